"""ThreadRanks: an engine of several ranks in one process, each rank that follows in a thread of its own.

    built = build_engine(config, clock, ThreadRanks(config, folder, clock))

Everything is as in an engine of processes (connections over zmq, frames, one body per rank) but the processes, and the
torch.distributed groups between them. For the self-test of the canary and for tests: ranks share one interpreter and
one device. Nothing watches the ranks: one that fails fails all.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError, PeerGone
from serinus.parallel.comm import Comm
from serinus.parallel.thread_comm import ThreadComm
from serinus.ranks import LeaderLinks, RankLink, RankLoop, make_rank_loop
from serinus.ranks.handshake import hello_of, shared_settings
from serinus.ranks.rank_processes import mesh_of
from serinus.wire.messages import RankWelcome

_END_S = 20.0


class ThreadRanks:
    """RankStarter (engine/build.py) as threads."""

    def __init__(self, config: ServeConfig, folder: Path, clock: Clock) -> None:
        """`folder`: a short path, for the leader's socket."""
        self.mesh = mesh_of(config)
        self.links = LeaderLinks(
            f"ipc://{folder}/leader", mesh=self.mesh, clock=clock, settings=shared_settings(config)
        )
        self.links.why = self._why
        self.loops: dict[int, RankLoop] = {}
        """By rank, once they are built."""
        self._config = config
        self._dismissed = self._is_over = False
        self._dials: dict[int, RankLink] = {}
        self._clock = clock
        self._comms = ThreadComm.ranks_of(self.mesh)
        self._threads = ThreadPoolExecutor(max(1, self.mesh.size - 1), thread_name_prefix="rank")
        self._lives: dict[int, Future[None]] = {}

    def join(self) -> Comm:
        """Start the threads of all ranks; returns the leader's end. They need no meeting."""
        self._lives = {rank: self._threads.submit(self._live, rank) for rank in range(1, self.mesh.size)}
        self.links.welcome(RankWelcome(store="none"))
        self.links.gather(self._check, _END_S)
        return self._comms[0]

    def _check(self) -> None:
        if any(life.done() and life.exception() is not None for life in self._lives.values()):
            raise self.explained(PeerGone("parallel: a rank left"))

    def _why(self) -> str:
        """What the first rank that failed raised, in words."""
        if (failed := self._failed(3.0)) is None:
            return ""
        rank, error = failed
        return f"engine: rank {self.mesh.name(rank)} is gone: {type(error).__name__}: {error}"

    def explained(self, error: PeerGone) -> ConfigError | PeerGone:
        """What a rank failed of, in words where that is no error of settings or of peers; `error` where none did."""
        if (failed := self._failed(1.0)) is None:
            return error
        return failed[1] if isinstance(failed[1], (ConfigError, PeerGone)) else PeerGone(self._why())

    def fail(self, error: BaseException) -> None:
        """The leader failed: release the ranks that wait for it."""
        for comm in self._comms:
            comm.close()
        self._is_over = True
        self.links.close(0.0)
        for link in tuple(self._dials.values()):  # one that dials too late is not told
            link.close()
        self.close()

    def dismiss(self) -> None:
        """They are about to be told to stop."""
        self._dismissed = True

    def facts(self) -> list[dict[str, Any]]:
        """Number and name of each rank."""
        return [{"rank": rank, "name": self.mesh.name(rank)} for rank in range(self.mesh.size)]

    def close(self) -> None:
        """Wait for all lives to end; those that wait for others are failed. May be called again."""
        if not self._dismissed:
            self.links.close(0.0)
        wait(self._lives.values(), timeout=_END_S)
        for comm in self._comms:
            comm.close()
        self._threads.shutdown()

    def errors(self) -> dict[int, BaseException]:
        """What ranks failed of, by rank; after `close`."""
        found = {rank: life.exception() for rank, life in self._lives.items()}
        return {rank: error for rank, error in found.items() if error is not None}

    def _failed(self, s_max: float) -> tuple[int, BaseException] | None:
        wait(self._lives.values(), timeout=s_max, return_when="FIRST_EXCEPTION")
        for rank, life in self._lives.items():
            if life.done() and (error := life.exception()) is not None:
                return rank, error
        return None

    def _live(self, rank: int) -> None:
        comm = self._comms[rank]
        link = self._dials[rank] = RankLink(self.links.address, hello_of(self._config, rank), clock=self._clock)
        try:
            if self._is_over:
                link.close()
            link.welcome()
            loop = make_rank_loop(self._config, rank=rank, comm=comm, link=link, clock=self._clock)
            self.loops[rank] = loop
            try:
                loop.run()
            finally:
                loop.close()
        except BaseException:
            for each in self._comms:  # no rank waits for one that failed
                each.close()
            raise
        finally:
            link.close()
