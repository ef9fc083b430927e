"""A rank's process: `python -m serinus.ranks.process --config FILE --rank N --leader ADDRESS --parent PID`.

Started by the leader of an engine for the ranks of its own machine, and by `serinus serve --node-rank N` for those of
another. Reports, joins the ranks' groups, loads its part of the model, and obeys until it is told to stop. Its broad
`except` is the process's one: whatever breaks the rank is logged, told to the leader, and ends the process.
Exit code 0 told to stop, 2 settings, checkpoint or machine are wrong, 3 it broke or the engine ended.
"""

from __future__ import annotations

import argparse
import signal
import socket
from pathlib import Path
from types import FrameType

from serinus.core.addresses import split_host_port
from serinus.core.clock import Clock, WallClock
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError, PeerGone
from serinus.core.heap import collect_seldom, settle_heap
from serinus.core.lifeline import end_now, end_with_parent, leave_terminal_to_parent, show_stacks_at
from serinus.core.log import get_logger, setup_logging
from serinus.ranks.exit_reason import CONFIG_CODE, LOST_CODE
from serinus.ranks.handshake import hello_of
from serinus.ranks.links import RankLink
from serinus.ranks.rank_processes import mesh_of

_log = get_logger("engine")


def main(argv: list[str] | None = None) -> int:
    """Run one rank to its end; returns the exit code."""
    parser = argparse.ArgumentParser(prog="serinus-rank", description="One rank of an engine of several.")
    parser.add_argument("--config", required=True, help="file with the ServeConfig as JSON")
    parser.add_argument("--rank", type=int, required=True, help="number of this rank, from 1")
    parser.add_argument("--leader", required=True, help="zmq endpoint where ranks report to the leader")
    parser.add_argument("--parent", type=int, required=True, help="process id of whoever started it; it ends with it")
    arguments = parser.parse_args(argv)
    collect_seldom()
    end_with_parent(arguments.parent, signal.SIGKILL)
    show_stacks_at(signal.SIGUSR1)
    clock = WallClock()
    config = ServeConfig.from_json(Path(arguments.config).read_text())
    rank: int = arguments.rank
    setup_logging(config.server.log_level, mesh_of(config).name(rank), config.server.log_format)
    link = RankLink(
        arguments.leader,
        hello_of(config, rank),
        clock=clock,
        silence_s=config.parallel.silence_s_max,
        join_s_max=config.parallel.dist_s_max,
        ends_process=True,
    )

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(LOST_CODE)  # only an operator does this to one rank: the engine ends with it

    leave_terminal_to_parent()
    signal.signal(signal.SIGTERM, stop)
    try:
        _obey(config, rank, link, clock)
    except ConfigError as error:
        _log.error("%s", error)
        link.leave(str(error), CONFIG_CODE)
        return CONFIG_CODE
    except PeerGone as error:
        _log.warning("%s", error)
        link.leave(str(error), LOST_CODE, suffers=True)
        return LOST_CODE
    except SystemExit:
        link.leave("was told to stop (SIGTERM), which only a whole engine can", LOST_CODE)
        return LOST_CODE
    except Exception as error:
        _log.exception("engine: stopped by %s", type(error).__name__)
        link.leave(f"broke: {type(error).__name__}: {error}", LOST_CODE)
        return LOST_CODE
    finally:
        link.close()
    return 0


def _obey(config: ServeConfig, rank: int, link: RankLink, clock: Clock) -> None:
    """Report, join, load, obey. Raises whatever breaks the rank."""
    link.start()
    from serinus.parallel.comm import TorchComm, find
    from serinus.ranks import make_rank_loop
    from serinus.ranks.devices import take_device  # the heavy imports, watched already

    welcome = link.welcome()
    parallel = config.parallel
    device = take_device(config, rank)
    meeting = find(welcome.store, parallel.dist_s_max)
    comm = TorchComm(
        meeting, mesh_of(config), rank, device=device, host=_own_host(welcome.store), timeout_s=parallel.dist_s_max
    )
    try:
        loop = make_rank_loop(config, rank=rank, comm=comm, link=link, clock=clock)
        try:
            settle_heap()
            loop.run()
        finally:
            loop.close()
    finally:
        comm.close()


def _own_host(leader: str) -> str:
    """Our address as the other ranks reach it: the one from which we would speak to the leader. Sends nothing."""
    host, port = split_host_port(leader, "ranks: the leader's address")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    end_now(main())
