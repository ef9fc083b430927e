"""An engine of several ranks in one process: the followers are threads. For tests that need ranks and no processes.

    built, ranks = threaded_core(config)
    built.core.step(); built.core.close()

Headers, answers and tensors go the ways they go between processes; only that a rank can die alone is missing.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any, cast

from serinus.core.clock import Clock, WallClock
from serinus.core.config import ServeConfig
from serinus.core.errors import PeerGone
from serinus.core.ids import new_token
from serinus.engine.build import Built, build_core
from serinus.engine.followers import Followers, mesh_of
from serinus.engine.ranks import Follower, make_follower
from serinus.parallel.comm import Comm, ThreadComm

__all__ = ["ThreadedRanks", "threaded_core"]

_TIMEOUT_S = 60.0


class ThreadedRanks:
    """Followers (engine/followers.py) as threads of this process."""

    def __init__(self, config: ServeConfig, clock: Clock) -> None:
        self._config, self._clock = config, clock
        self._mesh = mesh_of(config)
        self._comms = ThreadComm.ranks_of(self._mesh, _TIMEOUT_S)
        self._home = tempfile.TemporaryDirectory(prefix="serinus-ranks-")
        self.control_bind = f"ipc://{Path(self._home.name) / 'control'}"
        self.token = new_token()
        self.followers: dict[int, Follower] = {}
        """By rank, once they are built; their threads own them."""
        self.errors: list[BaseException] = []
        """What broke a rank."""
        self._threads: list[threading.Thread] = []

    def start(self, *, control: str) -> None:
        """Let them build what they need."""
        for rank in range(1, self._mesh.size):
            thread = threading.Thread(target=self._live, args=(rank, control), name=self._mesh.name(rank), daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self) -> Comm:
        """The leader's way to them."""
        return self._comms[0]

    def check(self) -> None:
        """Raise what broke a rank."""
        if self.errors:
            raise self.errors[0]

    def why(self, s_max: float = 0.0) -> str:
        """What broke a rank; empty: nothing."""
        return "; ".join(map(str, self.errors))

    def explained(self, error: PeerGone) -> BaseException:
        """What is behind an error of the lines."""
        return self.errors[0] if self.errors else error

    def facts(self) -> list[dict[str, Any]]:
        """No processes."""
        return []

    def fail(self, error: BaseException) -> None:
        """The leader broke."""
        self.close()

    def close(self) -> None:
        """They have been told to stop, or nobody will tell them. May be called again."""
        for comm in self._comms[1:] if self.errors else ():
            comm.close()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)
        self._home.cleanup()

    def _live(self, rank: int, control: str) -> None:
        try:
            follower = make_follower(
                self._config, rank=rank, comm=self._comms[rank], control=control, token=self.token, clock=self._clock
            )
            self.followers[rank] = follower
            try:
                follower.run()
            finally:
                follower.close()
        except BaseException as error:  # told by the leader's thread
            self.errors.append(error)
            for comm in self._comms:
                comm.close()


def threaded_core(config: ServeConfig, clock: Clock | None = None) -> tuple[Built, ThreadedRanks]:
    """A whole engine, and its other ranks. Close `built.core`: they end with it."""
    clock = clock or WallClock()
    ranks = ThreadedRanks(config, clock)
    return build_core(config, clock, cast("Followers", ranks)), ranks
