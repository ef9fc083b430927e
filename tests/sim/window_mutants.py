"""Mutants of part SWA: only worlds in which layers slide can notice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from serinus.core.parts import PageSpan, Part
from serinus.core.plan import TableWrite
from serinus.sched.page_allocator import PageAllocator
from serinus.sim import Scenario, draw
from tests.sim.hunting import mutant, replaced

__all__ = ["sliding"]


def sliding(seed: int) -> Scenario:
    """A world in which layers slide."""
    return draw(seed, slides=True)


@contextmanager
def without_windows(name: str) -> Iterator[None]:
    """Holds of this name are of pages of part FULL alone."""
    hold, unhold = PageAllocator.hold, PageAllocator.unhold

    def kept(of: str, spans: Sequence[PageSpan]) -> Sequence[PageSpan]:
        return spans[:1] if of == name else spans

    with (
        replaced(PageAllocator, "hold", lambda self, of, spans: hold(self, of, kept(of, spans))),
        replaced(PageAllocator, "unhold", lambda self, of, spans: unhold(self, of, kept(of, spans))),
    ):
        yield


@mutant("windows are not held for a transfer", world=sliding, says="I4:")
def windows_not_held() -> Iterator[None]:
    """Only pages of part FULL stay where they are while they are read."""
    with without_windows("transfer"):
        yield


@mutant("windows are not put into quarantine", world=sliding, says="I2:")
def windows_not_quarantined() -> Iterator[None]:
    """Only pages of part FULL are kept from others while a peer may still write them."""
    with without_windows("quarantine"):
        yield


@mutant("the row of part SWA is not rewritten", world=sliding, says="I6:")
def window_row_not_rewritten() -> Iterator[None]:
    """After publication it names duplicates that went back."""
    publish, take = PageAllocator.publish, PageAllocator.take_writes
    kept: dict[int, tuple[TableWrite, ...]] = {}

    def publishing(self: PageAllocator, state: Any) -> None:
        before = take_kept(self)
        publish(self, state)
        kept[id(self)] = before + tuple(write for write in take(self) if write.part is Part.FULL)

    def take_kept(self: PageAllocator) -> tuple[TableWrite, ...]:
        return kept.pop(id(self), ()) + take(self)

    with replaced(PageAllocator, "publish", publishing), replaced(PageAllocator, "take_writes", take_kept):
        yield


@mutant("a window ends one position early", world=sliding, says="own pages")
def window_too_short() -> Iterator[None]:
    """The last page that a window still reaches is dropped where only its last position is seen."""
    original = PageAllocator.advance
    with replaced(PageAllocator, "advance", lambda self, state, position: original(self, state, position + 1)):
        yield
