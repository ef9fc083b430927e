"""Ranks of a simulated engine that move their own pages: what is ordered is done when it comes down the rank's line.

I2 and I4 are held against the scheduler at the moment of the order: then the leader knows that the pages may be read or
filled. That they still may when the rank comes to it is the order of the line, and nothing checks that but the tokens.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from serinus.pd import (
    Backend,
    FillPages,
    Hand,
    HandAnswer,
    HandOrder,
    LeavePeer,
    RankLayout,
    StagePiece,
)
from serinus.testing.world.guard import OwnStore
from serinus.wire.messages import LayoutSignature

if TYPE_CHECKING:
    from serinus.testing.world.engine import Engine
    from serinus.testing.world.ranks import Rank

__all__ = ["SimCrew"]


class SimCrew:
    """The hands of all ranks of one life of one engine (pd.Crew)."""

    is_local = False
    has_news = False

    def __init__(self, engine: Engine, layout: LayoutSignature, backend: Backend) -> None:
        self._engine = engine
        self.hands = [
            Hand(
                rank.number, layout=RankLayout(layout), backends=[backend], clock=engine.timeline,
                stores={part: OwnStore(engine, part, own) for part, own in rank.stores.items()},
            )
            for rank in engine.ranks
        ]  # fmt: skip
        self._answers: list[HandAnswer] = []
        self._due = 0
        """Answers on their way."""
        self._answered_at = [0.0] * len(self.hands)

    @property
    def size(self) -> int:
        return len(self.hands)

    @property
    def idle(self) -> bool:
        """Nothing is staged, and every answer was heard."""
        return not self._due and not self._answers and not any(hand.staged_count for hand in self.hands)

    def order(self, rank: int, order: HandOrder) -> None:
        engine = self._engine
        if isinstance(order, StagePiece):
            engine.stores[rank][order.part].check_read(order.pages)
        elif isinstance(order, FillPages):
            engine.stores[rank][order.part].check_write(order.pages)
        if isinstance(order, LeavePeer) and not engine.alive:
            self.hands[rank].obey(order)  # the process ended: the system takes back what it held
            return
        engine.tell(engine.ranks[rank], partial(self._obey, engine.ranks[rank], order))

    def _obey(self, rank: Rank, order: HandOrder) -> None:
        answer = self.hands[rank.number].obey(order)
        if answer is None:
            return
        if not rank.number:
            self._answers.append(answer)
            self._engine.wake()
            return
        self._due += 1
        engine = self._engine
        at = max(self._answered_at[rank.number], engine.timeline.now_s + engine.rank_delay())
        self._answered_at[rank.number] = at
        engine.timeline.at(at, self._came, engine.life, answer)

    def _came(self, life: int, answer: HandAnswer) -> None:
        if life == self._engine.life and self._engine.alive:
            self._due -= 1
            self._answers.append(answer)
            self._engine.wake()

    def look(self) -> None:
        """What has come is here."""

    def poll(self) -> list[HandAnswer]:
        found, self._answers = self._answers, []
        return found

    def close(self) -> None:
        """The process ended."""
        for hand in self.hands:
            hand.close()
