"""What the garbage collector of a process that serves looks at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from serinus.core.config import ServeConfig, from_names

ENGINE = """
import atexit, gc, sys, types, weakref
atexit.register(lambda: print(gc.get_freeze_count()))  # behind what is registered later
from serinus.engine import process
class Node:
    pass
def launch(*_):
    before = Node()
    before.itself = before
    class Loop:
        garbage = weakref.ref(before)
        stop = close = lambda self: None
        def run(self):
            kept = gc.get_freeze_count()
            young = [[] for _ in range(5_000)]
            print(kept > 10_000, self.garbage() is None, gc.get_count()[0] > 5_000, gc.isenabled(), flush=True)
    return Loop()
sys.modules["serinus.engine.launch"] = types.SimpleNamespace(launch=launch)
sys.exit(process.main(["--config", sys.argv[1], "--endpoint", "ipc:///none", "--parent", sys.argv[2]]))
"""


def test_an_engine_begins_with_its_garbage_gone_and_all_else_out_of_the_collectors_sight(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(from_names(ServeConfig, {"model_path": "none"}).to_json())
    command = [sys.executable, "-c", ENGINE, str(file), str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 4 + ["0"], done
