"""Where the pages of an engine live, by rank and part, and how bytes of other layouts get into them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import ConfigError
from serinus.core.parts import PageStore, Part
from serinus.pd.layout import Cut, RankLayout, covers_pages, cut, is_same, recut
from serinus.pd.pages import TakeIn
from serinus.pd.stamps import StampIntake


def check_stores(layout: RankLayout, rank: int, stores: Mapping[Part, PageStore]) -> None:
    """Raises ConfigError where these are not the stores of a rank."""
    for part in layout.parts:
        wanted = layout.page_bytes(rank, part)
        found = stores[part].page_bytes if part in stores else 0
        if found != wanted:
            raise ConfigError(
                f"pd: layout says {wanted} bytes a page in part {part.name} of rank {rank}, the pool {found}"
            )


def read_pages(store: PageStore, pages: NDArray[np.int32]) -> NDArray[np.uint8]:
    """A copy of pages, [G, page_bytes]."""
    rows = np.empty((len(pages), store.page_bytes), dtype=np.uint8)
    store.read_pages(pages, rows)
    return rows


class Intake:
    """Takes pages of one peer into one rank. Where the layouts are equal a source page is a target page; else this rank
    cuts its own layers and heads out of it."""

    def __init__(
        self, source: RankLayout, target: RankLayout, rank: int, stores: Mapping[Part, PageStore]
    ) -> None:  # fmt: skip
        self._source = source
        self._target = target
        self._rank = rank
        self._stores = stores
        self.is_same = is_same(source, target)
        """A source page is a target page."""
        self._cuts: dict[tuple[int, Part], list[Cut]] = {}
        for item in () if self.is_same else cut(source, target):
            if item.target_rank == rank:
                self._cuts.setdefault((item.source_rank, item.part), []).append(item)
        self._stamps = StampIntake(source, target) if source.signature.stamp_bytes and not self.is_same else None

    def sources(self) -> tuple[int, ...]:
        """Ranks of the peer that have bytes of this rank."""
        return (self._rank,) if self.is_same else tuple(sorted({source for source, _ in self._cuts}))

    def page_bytes(self, command: TakeIn) -> int:
        """Bytes of one page as the source rank of a command has it."""
        return self._source.page_bytes(command.source, command.part)

    def rows_of(self, command: TakeIn, found: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The bytes that came as source pages, [G, page_bytes]."""
        return found.reshape(-1, self.page_bytes(command))

    def fill(self, command: TakeIn, rows: NDArray[np.uint8]) -> None:
        """Copy source pages into own pages.

        Cost: the bytes once where layouts are equal; else once more into a buffer, and where only a part of each target
        page comes from this source rank, a read of those pages before.
        """
        store, pages = self._stores[command.part], command.pages
        if self.is_same:
            store.write_pages(pages, rows)
            return
        for item in self._cuts.get((command.source, command.part), ()):
            if covers_pages(item, self._source, self._target, command.first, len(rows)):
                out = np.empty((len(pages), store.page_bytes), dtype=np.uint8)
            else:
                out = read_pages(store, pages)
            recut(item, self._source, self._target, rows, command.first, out, command.target_first)
            if self._stamps is not None:
                self._stamps.land(command.xid, item, rows, command.first, out, command.target_first)
            store.write_pages(pages, out)

    def forget(self, xid: str) -> None:
        """A handoff is over."""
        if self._stamps is not None:
            self._stamps.forget(xid)
