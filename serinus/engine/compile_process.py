"""A process that compiles kernels: `python -m serinus.engine.compile_process SIZES PARENT`, settings on stdin.

SIZES is a JSON list of batch sizes of decode steps; where it is empty, the largest step and the first steps are run.
Prints a line for each that is done. The process that started it goes on without, where something is broken.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence

from serinus.core.clock import Clock, WallClock
from serinus.core.config import ServeConfig
from serinus.core.lifeline import end_now, end_with_parent


def main() -> int:
    """Compile; returns the exit code."""
    sizes, parent = json.loads(sys.argv[1]), int(sys.argv[2])
    end_with_parent(parent, signal.SIGKILL)

    def tell() -> None:
        sys.stdout.write("done\n")
        sys.stdout.flush()

    compile_share(ServeConfig.from_json(sys.stdin.read()), sizes, WallClock(), tell)
    return 0


def compile_share(config: ServeConfig, sizes: Sequence[int], clock: Clock, done: Callable[[], object]) -> None:
    """Make an engine and run what compiles its kernels: steps of these sizes, or, where there are none, what a start
    runs beside. `done`: is called after each.

    Raises ConfigError: there is no such engine.
    """
    from serinus.engine.build import build_engine
    from serinus.parallel import Mesh
    from serinus.parallel.comm import SoloComm
    from serinus.ranks.build import build_rank

    if not sizes:
        build_engine(config, clock, recorded=False).close()
        done()
        return
    parts = build_rank(config, Mesh(), 0, SoloComm(), clock, profiled=False)
    parts.runner.record(sizes, lambda size: done())
    parts.close()


if __name__ == "__main__":
    end_now(main())
