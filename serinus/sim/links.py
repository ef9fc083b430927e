"""The line between the leader and the other ranks of one simulated engine: real headers and answers, simulated delays.

`SimLinks` is the leader's end (RankLinks of ranks/line.py), `SimLink` a rank's. A header is obeyed some time after it
was sent, behind all that was sent to that rank before, and not before the tensors that its step takes are there. Where
the leader waits for its ranks no time passes: they do what they were told, and their answers are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from serinus.core.errors import InvariantError
from serinus.ranks import RankLoop, RunStep
from serinus.ranks.codec import decode_header, make_reader
from serinus.sim.comm import RankTensors
from serinus.sim.process import SimProcess
from serinus.wire import Buffer, Parts, ZmqChannel

STEP_S = 0.004
"""What a step takes on a rank."""
_WAITS_MAX = 200
"""The leader may wait so often in a row without any rank having an answer."""


class SimLinks:
    """The leader's connections to ranks 1 to n - 1."""

    def __init__(self, process: SimProcess, tensors: RankTensors, delay: Callable[[], float]) -> None:
        """`delay`: what a header or an answer takes this time, in seconds."""
        size = tensors.mesh.size
        self._process, self._tensors, self._delay = process, tensors, delay
        self._loops: list[RankLoop] = []
        self._ends: list[SimLink] = []
        self._sent: list[deque[tuple[float, tuple[Buffer, ...]]]] = [deque() for _ in range(size)]
        """Headers on their way, by rank, and when each comes."""
        self._free_at = [0.0] * size
        """When each rank has done what it began."""
        self._told: deque[tuple[float, int, tuple[Buffer, ...]]] = deque()
        """Answers on their way."""
        self._told_at = [0.0] * size
        self._reader = make_reader()
        self._idle_waits = 0
        self.obeyed = [0] * size
        """Number of the last header that each rank has obeyed."""

    def attach(self, loops: Sequence[RankLoop], ends: Sequence[SimLink]) -> None:
        """The loops of ranks 1 to n - 1 and their ends of the line."""
        self._loops, self._ends = list(loops), list(ends)

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        return not self._told and not any(self._sent)

    # ---- RankLinks --------------------------------------------------------------------------------------------------

    def send(self, rank: int, parts: Parts) -> None:
        """Send a header to a rank; see RankLinks."""
        before = self._sent[rank][-1][0] if self._sent[rank] else 0.0
        at = max(before, self._process.now_s + self._delay())
        self._sent[rank].append((at, tuple(bytes(part) for part in parts)))
        self._process.at(at, self._deliver, rank)

    def answers(self, wait_s: float) -> list[tuple[int, Parts]]:
        """See RankLinks. Raises InvariantError: the leader waits for ranks that have nothing to tell."""
        if not self._told and wait_s <= 0:
            return []
        now = self._process.now_s
        found = [told for told in self._told if told[0] <= now]
        if not found and wait_s > 0:
            self.wait(lambda: bool(self._told), force=False)
            found = list(self._told)
            self._idle_waits = 0 if found else self._idle_waits + 1
            if self._idle_waits > _WAITS_MAX:
                raise InvariantError("sim: the leader waits for ranks that have nothing to tell")
        for told in found:
            self._told.remove(told)
        return [(rank, parts) for _, rank, parts in found]

    def wait_any(self, others: Sequence[ZmqChannel], wait_s: float) -> None:
        """See RankLinks. Raises InvariantError: simulated engines are woken, they never sleep."""
        raise InvariantError("sim: an engine sleeps on its sockets, expected none")

    def why(self) -> str:
        """No rank is lost alone."""
        return ""

    def close(self, wait_s: float | None = None) -> None:
        """Nothing is left to close."""

    # ---- ranks ------------------------------------------------------------------------------------------------------

    def wait(self, holds: Callable[[], bool], *, force: bool = True) -> None:
        """Ranks obey what was sent to them, until this holds. Raises InvariantError, with `force`: it never will."""
        while not holds():
            obeyed = [self._obey_next(rank) for rank in range(1, len(self._sent))]
            if not any(obeyed):
                if force:
                    raise InvariantError("sim: ranks wait for each other's tensors for ever")
                for rank in range(1, len(self._sent)):
                    self.look(rank)
                return

    def came(self, rank: int) -> None:
        """A rank has one more input for a step."""
        if rank:
            self._process.at(self._process.now_s, self._deliver, rank)

    def look(self, rank: int) -> None:
        """Something that a rank had begun has ended there."""
        self._loops[rank - 1].turn(0.0)

    def told(self, rank: int, parts: Parts) -> None:
        """A rank answers its leader."""
        at = max(self._told_at[rank], self._free_at[rank], self._process.now_s) + self._delay()
        self._told_at[rank] = at
        self._told.append((at, rank, tuple(bytes(part) for part in parts)))
        self._process.at(at, self._process.wake)

    def _deliver(self, rank: int) -> None:
        """Obey what has come to this rank."""
        now = self._process.now_s
        while self._sent[rank] and self._sent[rank][0][0] <= now:
            if self._free_at[rank] > now:
                self._process.at(self._free_at[rank], self._deliver, rank)
                return
            if not self._obey_next(rank):
                return

    def _obey_next(self, rank: int) -> bool:
        """One header; False = there is none, or the tensors that it takes are not there."""
        if not self._sent[rank]:
            return False
        parts = self._sent[rank][0][1]
        header = decode_header(parts, self._reader)
        plans = [command.plan for command in header.commands if isinstance(command, RunStep) and command.plan.work]
        samples = sum(any(work.sample is not None for work in plan.work) for plan in plans)
        if not self._tensors.has_inputs(rank, len(plans), samples):
            return False
        self._sent[rank].popleft()
        if plans:
            self._free_at[rank] = max(self._free_at[rank], self._process.now_s) + STEP_S
        self._ends[rank - 1].arrived.append(parts)
        self._loops[rank - 1].turn(0.0)
        self.obeyed[rank] = header.number
        return True


class SimLink:
    """The end of a rank that does not lead (RankLink of ranks/links.py)."""

    def __init__(self, links: SimLinks, rank: int) -> None:
        self.rank = rank
        self.arrived: list[Parts] = []
        self._links = links

    def headers(self, wait_s: float) -> list[Parts]:
        """What has come, in order."""
        found, self.arrived = self.arrived, []
        return found

    def send(self, parts: Parts) -> None:
        """Answers to the leader."""
        self._links.told(self.rank, parts)
