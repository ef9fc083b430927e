"""AnsweringLine: a line to ranks of this thread, for whatever is driven without an engine and its own line.

A command is obeyed at the next `pump`, or as late as the test likes; its answers are handed out by a `pump`, or taken
out, held back or put in another order in `answers` before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class _Rank(Protocol):
    """What obeys: a page worker, a tier worker, or what a test puts in their place."""

    def obey(self, command: Any) -> Any:
        """An answer, a list of answers, or None."""


class AnsweringLine:
    """A CommandLine (core/line.py) to some ranks."""

    def __init__(self, ranks: Sequence[_Rank], *, late: bool = False, answers_max: int = 1 << 30) -> None:
        """`ranks`: in their order. `late`: they obey when `work` is called. `answers_max`: of one `pump`."""
        self.ranks: tuple[Any, ...] = tuple(ranks)
        self.waiting: list[deque[Any]] = [deque() for _ in ranks]
        """Commands that a rank has not obeyed, by rank."""
        self.answers: list[tuple[int, Any]] = []
        """Rank and answer: given, and not handed out."""
        self._late, self._answers_max = late, answers_max
        self._takers: dict[type, Callable[[int, Any], None]] = {}

    @property
    def size(self) -> int:
        return len(self.ranks)

    def command(self, command: Any, rank: int | None = None) -> None:
        """See CommandLine: it waits for a `pump`, or for `work`."""
        for number in range(self.size) if rank is None else (rank,):
            self.waiting[number].append(command)

    def subscribe(self, answer_type: type, take: Callable[[int, Any], None]) -> None:
        """See CommandLine: `take` gets answers of this type."""
        self._takers[answer_type] = take

    def pump(self, wait_s: float = 0.0) -> None:
        """Have the ranks obey, if they are not late; hand out the answers, the oldest first; never waits."""
        if not self._late:
            self.work()
        now, self.answers = self.answers[: self._answers_max], self.answers[self._answers_max :]
        for rank, answer in now:
            self._takers[type(answer)](rank, answer)

    def work(self, rank: int | None = None) -> None:
        """A rank (or each) obeys all that waits for it."""
        for number in range(self.size) if rank is None else (rank,):
            while self.waiting[number]:
                found = self.ranks[number].obey(self.waiting[number].popleft())
                answers = found if isinstance(found, (list, tuple)) else [] if found is None else [found]
                self.answers += [(number, answer) for answer in answers]
            later = getattr(self.ranks[number], "answers", tuple)
            self.answers += [(number, answer) for answer in later()]

    def answer(self, rank: int, *answers: Any) -> None:
        """The leader hears this of a rank, now."""
        self.answers += [(rank, answer) for answer in answers]
        self.pump()

    def count(self, kind: type) -> int:
        """Commands of a type that wait, of all ranks."""
        return sum(isinstance(command, kind) for waiting in self.waiting for command in waiting)
