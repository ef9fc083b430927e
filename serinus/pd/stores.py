"""Where the pages of an engine live, by rank and part, and how bytes of other layouts get into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import ConfigError, TransferFailed
from serinus.core.parts import PageStore, Part
from serinus.pd.integrity import with_rows
from serinus.pd.layout import Cut, RankLayout, covers_pages, cut, is_same, recut
from serinus.pd.pages import MovePiece, TakeIn, no_bytes
from serinus.pd.slices import Slice, slices
from serinus.pd.stamps import StampIntake, StampOutlet, StampStore


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

    def begin_slice(self, command: TakeIn) -> tuple[Slice, Slice]:
        """What is read in place for a command, of the source rank and of own pages. Raises TransferFailed: nothing of
        that rank is ours."""
        found = self._cuts.get((command.source, command.part))
        if found is None:
            raise TransferFailed(f"pd: nothing of rank {command.source} belongs to rank {self._rank}")
        if self._stamps is not None:
            self._stamps.expect(command.xid)
        return slices(self._source, self._target, found[0])

    def slice_digests(self, command: TakeIn, found: bytes) -> bytes:
        """The digests of what was read in place, with that of the stamps that came with the message. Raises
        TransferFailed: not as many came as there are pages."""
        return found if self._stamps is None else with_rows(found, self._stamp_rows(command), command.digest_seed)

    def land_stamps(self, command: TakeIn) -> None:
        """The slice is in own pages, and is what was sent: complete their stamps. Raises TransferFailed: nothing of
        this handoff is used any more."""
        if self._stamps is None:
            return
        rows = self._stamps.join(command.xid, command.part, self._stamp_rows(command), command.first)
        if rows is None:
            raise TransferFailed("pd: the handoff is over")
        cast(StampStore, self._stores[command.part]).write_stamps(command.pages, rows)

    def _stamp_rows(self, command: TakeIn) -> NDArray[np.uint8]:
        wanted = self._target.page_size * self._target.signature.stamp_bytes
        if command.payload.size != len(command.pages) * wanted:
            raise TransferFailed(f"pd: {command.payload.size} bytes of stamps, expected {wanted} a page")
        return command.payload.reshape(-1, wanted)

    def forget(self, xid: str) -> None:
        """A handoff is over."""
        if self._stamps is not None:
            self._stamps.forget(xid)


class Outlet:
    """Pages of one rank as ranks of a peer with another layout read slices of them in place."""

    def __init__(
        self, source: RankLayout, target: RankLayout, rank: int, stores: Mapping[Part, PageStore]
    ) -> None:  # fmt: skip
        self._stores = stores
        cuts = [item for item in cut(source, target) if item.source_rank == rank]
        by_part = {part: [item for item in cuts if item.part is part] for part in source.parts}
        self.slices: dict[Part, list[Slice]] = {
            part: [slices(source, target, item)[0] for item in items] for part, items in by_part.items()
        }
        """One for each rank that reads, in the order of Routes.takers."""
        stamped = source.signature.stamp_bytes
        self._stamps = {part: StampOutlet(source, items) for part, items in by_part.items() if stamped}

    def with_stamps(self, command: MovePiece, digests: bytes) -> tuple[bytes, NDArray[np.uint8]]:
        """Digests of the slices of each page with those of the stamps that go with them, and these stamps, slice after
        slice."""
        outlet = self._stamps.get(command.part)
        if outlet is None:
            return digests, no_bytes()
        rows_KGZ = outlet.cut(cast(StampStore, self._stores[command.part]), command.pages)
        by_page = rows_KGZ.transpose(1, 0, 2).reshape(-1, rows_KGZ.shape[2])
        return with_rows(digests, by_page, command.digest_seed), rows_KGZ.reshape(-1)
