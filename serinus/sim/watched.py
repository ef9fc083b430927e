"""The product's own objects, watched: what the scheduler granted, what the leader tells its ranks to read and write.

I2: a page is written only while a request that is being filled from outside has it. I4: a page is read only while it
is held for a transfer. Both are held against the scheduler and the ledger when the command is given: then the leader
knows that the pages may be read or filled. That they still may when the rank comes to it follows from the order of the
line, and nothing checks that but the tokens. I6: what has landed is the KV of the prompt, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.cache import Pages, PrefixCache
from serinus.cache.node import Tier
from serinus.core.handoff import Reservation
from serinus.core.parts import Part
from serinus.core.request import TokenDelta
from serinus.pd import Mode, MovePiece, TakeIn
from serinus.ranks import LeaderLine
from serinus.sched import Scheduler

__all__ = ["FlakyCache", "PageWatch", "WatchedLine", "WatchedScheduler"]


class FlakyCache(PrefixCache):
    """A cache that sometimes has no room, though it has."""

    refuse: Callable[[], bool] = staticmethod(lambda: False)

    def allocate(self, rid: str, *args: Any, **more: Any) -> tuple[Pages, ...] | None:
        return None if self.refuse() else super().allocate(rid, *args, **more)


class WatchedScheduler(Scheduler):
    """Remembers which pages others may fill, and looks at what has landed before it is used."""

    landing: Callable[[Reservation], None] = staticmethod(lambda reservation: None)
    """Told of each prompt that is about to be published as landed."""

    def watch(self, landing: Callable[[Reservation], None]) -> None:
        """Begin; `landing` is told of each prompt that is about to be taken for landed."""
        self.reserved: dict[str, Reservation] = {}
        """By request: pages that a prefill engine may fill now."""
        self.landing = landing

    def take_reservations(self, now: float) -> tuple[Reservation, ...]:
        found = super().take_reservations(now)
        self.reserved.update({reservation.rid: reservation for reservation in found})
        return found

    def landed(self, rid: str, *args: Any, **more: Any) -> TokenDelta | None:
        reservation = self.reserved.pop(rid, None)
        if reservation is not None:
            self.landing(reservation)
        return super().landed(rid, *args, **more)

    def recompute(self, rid: str, reason: str) -> bool:
        self.reserved.pop(rid, None)
        return super().recompute(rid, reason)

    def abort(self, rid: str, *args: Any, **more: Any) -> TokenDelta | None:
        self.reserved.pop(rid, None)
        return super().abort(rid, *args, **more)

    def fillable_pages(self, part: Part) -> set[int]:
        """Pages of a part that a peer may write now."""
        filled = [each for rid, each in self.reserved.items() if rid in self._batch.transfer]
        spans = (span for each in filled for span in each.spans if span.part is part)
        return {page for span in spans for page in span.pages.tolist()}


class PageWatch:
    """Which pages of one engine may be read and written at this moment."""

    def __init__(self, name: str, cache: PrefixCache, scheduler: WatchedScheduler) -> None:
        """`name`: of the engine."""
        self._name, self._cache, self._scheduler = name, cache, scheduler

    def check_read(self, part: Part, pages: NDArray[np.integer]) -> None:
        """I4: these pages may be read now. Raises AssertionError."""
        ledger = self._cache.ledgers[Tier.DEVICE, part]
        loose = [page for page in pages.tolist() if not ledger.holds_of(page).get("transfer")]
        assert not loose, f"sim: I4: pages {loose} of {self._name} ({part.name}) are read, but not held for that"

    def check_write(self, part: Part, pages: NDArray[np.integer]) -> None:
        """I2: these pages may be written now. Raises AssertionError."""
        wild = set(pages.tolist()) - self._scheduler.fillable_pages(part)
        if wild:
            ledger = self._cache.ledgers[Tier.DEVICE, part]
            wild = {page for page in wild if not ledger.holds_of(page).get("quarantine")}
        assert not wild, f"sim: I2: pages {sorted(wild)} of {self._name} ({part.name}) are written without a grant"


class WatchedLine(LeaderLine):
    """The leader's line; its commands about pages are checked as they are given."""

    watch: PageWatch | None = None

    def command(self, command: object, rank: int | None = None) -> None:
        if self.watch is not None:
            match command:
                case MovePiece(part=part, pages=pages):
                    self.watch.check_read(part, pages)
                case TakeIn(part=part, pages=pages, mode=Mode.RECEIVER_CHECKED):
                    self.watch.check_write(part, pages)
        super().command(command, rank)
