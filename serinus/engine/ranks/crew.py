"""Handoffs of an engine of several ranks: the leader's view of all hands, and a rank's own.

Orders of a handoff go down the same line as plans and copies, so a rank that is busy with a step obeys them after it:
what a plan wrote is staged whole, and a page that changed hands on the leader changes hands there in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

from serinus.core.clock import Clock
from serinus.core.parts import Part
from serinus.engine.layouts import HasPools, data_backends, layout_of
from serinus.engine.ranks.body import RankBody
from serinus.engine.ranks.line import Line
from serinus.pd import (
    HAND_ANSWERS,
    HAND_ORDERS,
    FillPages,
    Hand,
    HandAnswer,
    HandOrder,
    OfferPiece,
    PageStore,
    RankLayout,
    StagePiece,
    frame_backends,
)

__all__ = ["STAGING_PIECES", "RankCrew", "attach_hand"]

STAGING_PIECES = 8
"""Pieces of one rank that may be asked to be staged and not be reported yet: a rank hears of them between two steps and
should find enough to do then."""

_ANSWERED = (FillPages, OfferPiece, StagePiece)


class RankCrew:
    """The hands of all ranks, over the leader's line (pd.Crew)."""

    is_local = False

    def __init__(self, line: Line) -> None:
        self._line = line
        self._answers: list[HandAnswer] = []
        self._own_due = 0
        """Answers of the leader's own rank that nobody has taken in: it obeys with the header; no socket tells."""
        for kind in HAND_ANSWERS:
            line.subscribe(kind, self._take)

    @property
    def size(self) -> int:
        return self._line.size

    @property
    def has_news(self) -> bool:
        return self._own_due > 0 or bool(self._answers)  # somebody else's pump took these in, after our look

    def order(self, rank: int, order: HandOrder) -> None:
        self._own_due += not rank and isinstance(order, _ANSWERED)
        self._line.order(order, rank)

    def look(self) -> None:
        self._line.pump()

    def poll(self) -> list[HandAnswer]:
        found, self._answers = self._answers, []
        return found

    def close(self) -> None:
        """Hands are their ranks', and end with them; the line may be broken by now."""

    def _take(self, rank: int, answer: HandAnswer) -> None:
        self._own_due -= not rank
        self._answers.append(answer)


def attach_hand(
    body: RankBody, parts: HasPools, clock: Clock, stores: Mapping[Part, PageStore] | None = None
) -> Hand | None:
    """Give a rank its hand, which obeys the orders of handoffs; None = this engine hands nothing over.

    `stores`: the pools as they are to be read and written by it; None = as they are.
    """
    config = parts.config
    if config.role == "unified":
        return None
    backends = frame_backends(data_backends(config, f"{config.engine_name}-{body.rank}"))
    layout = RankLayout(layout_of(parts))
    hand = Hand(body.rank, layout=layout, stores=stores or parts.pools, backends=backends, clock=clock)

    def obey(order: HandOrder) -> tuple[HandAnswer, ...]:
        answer = hand.obey(order)
        return () if answer is None else (answer,)

    for kind in HAND_ORDERS:
        body.on(kind, obey)
    return hand
