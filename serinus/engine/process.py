"""The engine process: `python -m serinus.engine.process --config FILE --endpoint ipc://...`.

Started by `serinus serve`. Binds its front endpoint at once, loads, answers `Ready`, then runs the loop until it is
told to stop. Ends when its parent ends. Where the engine has several ranks this is the leader's. This is the process's
one broad `except`: whatever the loop lets through is logged with its traceback, the front is told why, and the exit
code says it.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError, PeerGone
from serinus.core.heap import collect_seldom, settle_heap
from serinus.core.lifeline import end_now, end_with_parent, leave_terminal_to_parent, show_stacks_at
from serinus.core.log import get_logger, setup_logging
from serinus.ranks.exit_reason import CONFIG_CODE, LOST_CODE, EngineExit, ExitRecord

if TYPE_CHECKING:
    from serinus.engine.loop import EngineLoop

_REASON_S = 3.0
"""Seconds that the supervisor gets to say which rank's end broke the loop."""


def main(argv: list[str] | None = None) -> int:
    """Run one engine to its end; returns the exit code: 0 told to stop, 1 it broke, 2 its settings are wrong, 3 one of
    its ranks broke or was lost. Raises SystemExit: the front has ended, and took the settings with it."""
    parser = argparse.ArgumentParser(prog="serinus-engine", description="One engine process of `serinus serve`.")
    parser.add_argument("--config", required=True, help="file with the ServeConfig as JSON")
    parser.add_argument("--endpoint", required=True, help="zmq endpoint to bind for the front, e.g. ipc:///tmp/x")
    parser.add_argument("--parent", type=int, required=True, help="process id of the front; it ends with it")
    parser.add_argument("--words", default="", help="file for the reason of its end, in a folder of its own")
    arguments = parser.parse_args(argv)
    collect_seldom()
    end_with_parent(arguments.parent, signal.SIGKILL)
    show_stacks_at(signal.SIGUSR1)
    clock = WallClock()
    started = clock.now()
    try:
        config = ServeConfig.from_json(Path(arguments.config).read_text())
    except FileNotFoundError:  # with its folder, which the front removes as it ends
        raise SystemExit(
            f"engine: no settings at {arguments.config}, expected them there: the front has ended"
        ) from None
    several = config.parallel.size > 1
    setup_logging(config.server.log_level, "TP0 PP0" if several else "TP0", config.server.log_format)
    exit_record = ExitRecord(Path(arguments.words) if arguments.words else None)
    log = get_logger("engine")
    loop: EngineLoop | None = None
    try:
        from serinus.ranks.rank_processes import RankProcesses

        starter = RankProcesses(config, clock, exit_record) if several else None
        from serinus.engine.launch import launch  # the heavy imports, timed as a start-up phase

        loop = launch(config, arguments.endpoint, clock, started, starter)
        _obey_signals(loop)
        settle_heap()
        loop.run()
    except Exception as error:
        if isinstance(error, ConfigError) and loop is None:
            log.error("%s", error)
            return exit_record.record(str(error), CONFIG_CODE).code
        ending = _ending(error, exit_record, several=several)
        if several and isinstance(error, PeerGone):
            log.error("%s", error if str(error) == ending.reason else f"{ending.reason} ({error})")
        else:
            log.exception("engine: stopped by %s", type(error).__name__)
        if loop is not None:
            loop.tell_failure(ending.reason)
        return ending.code
    finally:
        if loop is not None:
            loop.close()
    return 0


def _ending(error: Exception, exit_record: ExitRecord, *, several: bool) -> EngineExit:
    """Why the engine ends. Where another rank's end broke the loop, what the supervisor knows of it."""
    if several and isinstance(error, PeerGone):
        exit_record.wait(_REASON_S)
    reason = f"{type(error).__name__}: {error}"
    return exit_record.record(f"engine: rank TP0 PP0: {reason}" if several else reason, LOST_CODE if several else 1)


def _obey_signals(loop: EngineLoop) -> None:
    """SIGTERM ends the loop after what runs; what the terminal says is left to the front."""

    def stop(number: int, frame: FrameType | None) -> None:
        loop.request_stop(drain=True)

    leave_terminal_to_parent()
    signal.signal(signal.SIGTERM, stop)


if __name__ == "__main__":
    end_now(main())
