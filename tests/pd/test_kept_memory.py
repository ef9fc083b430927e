"""Memory of arrived frames is used again, and not fetched from the system anew for each."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource, threading
import numpy as np
from serinus.pd.backends import TcpBackend

TcpBackend(1 << 20).receiver()
faults = []

def receive():
    for turn in range(6):
        frames = [np.full(8 << 20, 1, np.uint8) for _ in range(4)]
        del frames
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

thread = threading.Thread(target=receive)
thread.start()
thread.join()
print(faults[-1] - faults[2])
"""
PAGES = 3 * 4 * (8 << 20) // 4096
"""Of all frames that are counted."""


def test_a_process_that_receives_over_tcp_keeps_the_memory_of_its_frames() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    assert int(found.stdout) < PAGES // 8
