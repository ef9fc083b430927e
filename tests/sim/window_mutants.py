"""Mutants of part SWA: only worlds in which layers slide can notice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from serinus.core.parts import Part
from serinus.sched.seats import Seats
from serinus.testing.world import Scenario, draw
from tests.sim.hunting import mutant, replaced

__all__ = ["sliding"]


def sliding(seed: int) -> Scenario:
    """A world in which layers slide."""
    return draw(seed, slides=True)


@mutant("windows are not held for a transfer", world=sliding)
def windows_not_held() -> Iterator[None]:
    """Only pages of part FULL stay where they are while they are read."""
    hold, unhold = Seats.hold, Seats.unhold
    with (
        replaced(Seats, "hold", lambda self, spans: hold(self, spans[:1])),
        replaced(Seats, "unhold", lambda self, spans: unhold(self, spans[:1])),
    ):
        yield


@mutant("windows are not put into quarantine", world=sliding)
def windows_not_quarantined() -> Iterator[None]:
    """Only pages of part FULL are kept from others while a peer may still write them."""
    quarantine, over = Seats.quarantine, Seats.quarantine_over
    with (
        replaced(Seats, "quarantine", lambda self, spans: quarantine(self, spans[:1])),
        replaced(Seats, "quarantine_over", lambda self, spans: over(self, spans[:1])),
    ):
        yield


@mutant("the row of part SWA is not rewritten", world=sliding)
def window_row_not_rewritten() -> Iterator[None]:
    """After publication it names duplicates that went back."""
    original = Seats._write

    def write(self: Seats, table_row: int, row: Any, part: Part, start: int, end: int) -> None:
        if part is Part.FULL or sys._getframe(1).f_code.co_name != "_insert":
            original(self, table_row, row, part, start, end)

    with replaced(Seats, "_write", write):
        yield


@mutant("a window ends one position early", world=sliding)
def window_too_short() -> Iterator[None]:
    """The last page that a window still reaches is dropped where only its last position is seen."""
    original = Seats.advance
    with replaced(Seats, "advance", lambda self, state, position: original(self, state, position + 1)):
        yield
