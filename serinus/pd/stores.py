"""Where the pages of an engine live, by rank and part, and how bytes of other layouts get into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import ConfigError
from serinus.core.parts import Part
from serinus.pd.layout import Cut, RankLayout, covers_pages, cut, recut
from serinus.wire.messages import Data

__all__ = ["Intake", "PageStore", "Stores", "StoresOf"]


class PageStore(Protocol):
    """The pages of one part on one rank: pool.DevicePool, or anything of its shape."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers of the part."""
        ...

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> object:
        """Copy pages into out[G, page_bytes]."""
        ...

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        """Fill pages from data[G, page_bytes] (may be read only)."""
        ...


StoresOf = PageStore | Mapping[Part, PageStore] | Sequence[Mapping[Part, PageStore]]
"""One store (a model of one part on one rank), one per part, or these for each rank."""


class Stores:
    """The stores of all ranks. Raises ConfigError where they are not those of the layout."""

    def __init__(self, layout: RankLayout, stores: StoresOf) -> None:
        self.layout = layout
        if isinstance(stores, Sequence):
            by_rank: Sequence[Mapping[Part, PageStore]] = stores
        elif isinstance(stores, Mapping):
            by_rank = (stores,)
        else:
            by_rank = ({layout.parts[0]: stores},)
        if len(by_rank) != len(layout.shards):
            raise ConfigError(f"pd: stores of {len(by_rank)} ranks, the layout has {len(layout.shards)}")
        self._by_rank = tuple(by_rank)
        for rank in range(len(layout.shards)):
            for part in layout.parts:
                wanted = layout.page_bytes(rank, part)
                found = self._by_rank[rank][part].page_bytes if part in self._by_rank[rank] else 0
                if found != wanted:
                    raise ConfigError(
                        f"pd: layout says {wanted} bytes a page in part {part.name} of rank {rank}, the pool {found}"
                    )

    def at(self, rank: int, part: Part) -> PageStore:
        """The pages of one part on one rank; only where it has bytes of that part."""
        return self._by_rank[rank][part]

    def read(self, rank: int, part: Part, pages: NDArray[np.int32]) -> NDArray[np.uint8]:
        """A copy of pages, [G, page_bytes]."""
        store = self.at(rank, part)
        rows = np.empty((len(pages), store.page_bytes), dtype=np.uint8)
        store.read_pages(pages, rows)
        return rows


class Intake:
    """Takes pages of one peer in. Where the layouts are equal a source page is a target page; else it is cut anew."""

    def __init__(self, source: RankLayout, stores: Stores) -> None:
        self._source = source
        self._stores = stores
        same = all(
            getattr(source.signature, name) == getattr(stores.layout.signature, name)
            for name in ("page_size", "tp", "pp", "stage_layers")
        )
        self._cuts: dict[tuple[int, Part], list[Cut]] = {}
        for item in () if same else cut(source, stores.layout):
            self._cuts.setdefault((item.source_rank, item.part), []).append(item)

    def rows_of(self, data: Data, found: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Bytes of a Data as source pages, [G, page_bytes]."""
        return found.reshape(-1, self._source.page_bytes(data.rank, Part(data.part)))

    def fill(self, data: Data, rows: NDArray[np.uint8], pages: NDArray[np.int32], target_first: int) -> None:
        """Copy source pages into own pages (the first of which has index `target_first` in the prompt).

        Cost: the bytes once where layouts are equal; else once more into a buffer, and where only a part of each target
        page comes from this rank, a read of those pages before.
        """
        part = Part(data.part)
        if not self._cuts:
            self._stores.at(data.rank, part).write_pages(pages, rows)
            return
        target = self._stores.layout
        for item in self._cuts.get((data.rank, part), ()):
            if covers_pages(item, self._source, target, data.first, len(rows)):
                out = np.empty((len(pages), target.page_bytes(item.target_rank, part)), dtype=np.uint8)
            else:
                out = self._stores.read(item.target_rank, part, pages)
            recut(item, self._source, target, rows, data.first, out, target_first)
            self._stores.at(item.target_rank, part).write_pages(pages, out)
