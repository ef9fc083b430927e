"""The engine process: `python -m serinus.engine.process --config FILE --endpoint ipc://...`.

Started by `serinus serve`. Binds its front endpoint at once, loads, answers `Ready`, then runs the loop until it is
told to stop. Ends when its parent ends. This is the process's one broad `except`: whatever the loop lets through is
logged with its traceback, the front is told why, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError
from serinus.core.lifeline import end_with_parent
from serinus.core.log import get_logger, setup_logging

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one engine to its end; returns the exit code: 0 told to stop, 1 it broke, 2 its settings are wrong."""
    parser = argparse.ArgumentParser(prog="serinus-engine", description="One engine process of `serinus serve`.")
    parser.add_argument("--config", required=True, help="file with the ServeConfig as JSON")
    parser.add_argument("--endpoint", required=True, help="zmq endpoint to bind for the front, e.g. ipc:///tmp/x")
    parser.add_argument("--parent", type=int, required=True, help="process id of the front; it ends with it")
    arguments = parser.parse_args(argv)
    end_with_parent(arguments.parent, signal.SIGKILL)
    clock = WallClock()
    started = clock.now()
    config = ServeConfig.from_json(Path(arguments.config).read_text())
    setup_logging(config.server.log_level)
    log = get_logger("engine")
    try:
        from serinus.engine.launch import launch  # the heavy imports, timed as a start-up phase

        loop = launch(config, arguments.endpoint, clock, started)
    except ConfigError as error:
        log.error("%s", error)
        return 2

    def stop(number: int, frame: FrameType | None) -> None:
        loop.request_stop(drain=True)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides
    signal.signal(signal.SIGTERM, stop)
    try:
        loop.run()
    except Exception as error:
        log.exception("engine: stopped by %s", type(error).__name__)
        loop.last_words(f"{type(error).__name__}: {error}")
        return 1
    finally:
        loop.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
