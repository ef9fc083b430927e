"""The ranks of an engine as its handoff ports see them: orders go to one rank, answers come from all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from serinus.pd.hand import Hand
from serinus.pd.orders import HandAnswer, HandOrder

__all__ = ["Crew", "LocalCrew"]


class Crew(Protocol):
    """Hands of all ranks."""

    @property
    def size(self) -> int:
        """How many ranks."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether an order is obeyed before `order` returns."""
        ...

    @property
    def has_news(self) -> bool:
        """Whether `look` would find something that wakes nobody: do not sleep."""
        ...

    def order(self, rank: int, order: HandOrder) -> None:
        """Have it obeyed there after all that this rank was told before, whoever told it, and before all that comes
        after; its answer, where it has one, comes with a later `poll`."""
        ...

    def look(self) -> None:
        """Take in what has come, and let go out what was ordered. Never waits."""
        ...

    def poll(self) -> list[HandAnswer]:
        """Answers that were taken in, those of one rank in the order of its orders."""
        ...

    def close(self) -> None:
        """Nobody asks any more."""
        ...


class LocalCrew:
    """Hands of this thread: an order is obeyed at once."""

    is_local = True
    has_news = False

    def __init__(self, hands: Sequence[Hand]) -> None:
        """`hands`: by rank."""
        self.hands = tuple(hands)
        self._answers: list[HandAnswer] = []

    @property
    def size(self) -> int:
        return len(self.hands)

    def order(self, rank: int, order: HandOrder) -> None:
        answer = self.hands[rank].obey(order)
        if answer is not None:
            self._answers.append(answer)

    def look(self) -> None:
        """Nothing comes from elsewhere."""

    def poll(self) -> list[HandAnswer]:
        found = self._answers
        if found:
            self._answers = []
        return found

    def close(self) -> None:
        for hand in self.hands:
            hand.close()
