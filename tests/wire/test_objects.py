"""Objects of listed types read by several threads at once."""

from __future__ import annotations

import subprocess
import sys

_ROUNDS = """
import sys, threading
from dataclasses import make_dataclass
from serinus.wire.objects import Forms, ObjectReader, ObjectWriter

sys.setswitchinterval(1e-6)
for _ in range(400):
    parts = [make_dataclass(f"Part{i}", [("a", int), ("b", str)]) for i in range(6)]
    kind = make_dataclass("Whole", [(f"field{i}", tuple[part, ...]) for i, part in enumerate(parts)])
    forms = Forms([kind], {})
    whole = kind(*((part(1, "x"),) for part in parts))
    item = ObjectWriter(forms).item(whole)
    together, found = threading.Barrier(3), []

    def read():
        together.wait()
        found.append(ObjectReader(forms).item(*item, (kind,)))

    threads = [threading.Thread(target=read) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == [whole] * 3, found
"""


def test_threads_that_meet_a_type_for_the_first_time_at_once_all_read_it() -> None:
    """Ranks in threads of one process get their first header at the same moment. Without the lock: SIGSEGV."""
    ended = subprocess.run([sys.executable, "-c", _ROUNDS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
