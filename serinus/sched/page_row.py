"""One part of a request's pages, and the slot of each position they hold. Indexed from the beginning of the sequence:
page i is for positions i * page_size on, whatever was given back before it. Decides nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serinus.core.parts import PageSpan, Part

_GROWTH_TOKENS = 256


def slots_of(pages: NDArray[np.int32], page_size: int) -> NDArray[np.int64]:
    """The slots of pages, in order."""
    return (pages.astype(np.int64)[:, None] * page_size + np.arange(page_size)).reshape(-1)


class PageRow:
    """Pages [first, end) of a sequence in one part; `first` is 0 unless the part has a window."""

    __slots__ = ("end", "first", "page_size", "pages", "part", "room", "slots", "windowed")

    def __init__(self, part: Part, page_size: int, *, windowed: bool = False) -> None:
        self.part = part
        self.page_size = page_size
        self.windowed = windowed
        """Whether pages behind the part's window are given back."""
        self.pages: NDArray[np.int32] = np.empty(0, np.int32)
        """Buffer; those from `first` to `end` are meant."""
        self.slots: NDArray[np.int64] = np.empty(0, np.int64)
        """Buffer; those of positions first * page_size to `room` are meant."""
        self.first = 0
        self.end = 0
        self.room = 0
        """end * page_size: positions below it (and not below `first`) have a slot."""

    @property
    def count(self) -> int:
        """Number of pages in the row."""
        return self.end - self.first

    def span(self) -> PageSpan:
        """Its pages; a view, good until it changes."""
        return PageSpan(self.part, self.first, self.pages[self.first : self.end])

    def cut(self, first: int, end: int) -> PageSpan:
        """Those of its pages [first, end) that it has from its own first one on; a view, as `span`."""
        first = min(max(first, self.first), end)
        return PageSpan(self.part, first, self.pages[first:end])

    def named(self) -> NDArray[np.int32]:
        """Its pages, in order; a view."""
        return self.pages[self.first : self.end]

    def add(self, pages: NDArray[np.int32], slots: NDArray[np.int64] | None = None) -> None:
        """Append pages. `slots`: those of the pages, where they are known."""
        begin, end = self.end, self.end + len(pages)
        if end > len(self.pages):
            capacity = max(end, len(self.pages) + max(_GROWTH_TOKENS // self.page_size, len(self.pages) // 2, 1))
            grown_pages, grown_slots = np.empty(capacity, np.int32), np.empty(capacity * self.page_size, np.int64)
            grown_pages[:begin] = self.pages[:begin]
            grown_slots[: self.room] = self.slots[: self.room]
            self.pages, self.slots = grown_pages, grown_slots
        self.end = end
        self.room = end * self.page_size
        self.put(begin, pages, slots)

    def join(self, span: PageSpan) -> None:
        """Append what a match or a load brought: of a part with a window it is all that is still read."""
        if self.windowed:
            self.begin_at(span.first)
        assert span.first == self.end, f"sched: pages from {span.first} on behind {self.end} of {self.part.name}"
        self.add(span.pages)

    def put(self, first: int, pages: NDArray[np.int32], slots: NDArray[np.int64] | None = None) -> None:
        """Replace its pages from index `first` on, as publication does where the tree already had them; as `add`."""
        size, last = self.page_size, first + len(pages)
        assert self.first <= first <= last <= self.end, f"sched: pages {first}..{last} of {self.first}..{self.end}"
        self.pages[first:last] = pages
        self.slots[first * size : last * size] = slots_of(pages, size) if slots is None else slots

    def begin_at(self, first: int) -> None:
        """Forget all pages; the next one added is page `first` of the sequence."""
        if first > len(self.pages):  # what lies below is never read
            self.pages = np.empty(first, np.int32)
            self.slots = np.empty(first * self.page_size, np.int64)
        self.first = self.end = first
        self.room = first * self.page_size

    def drop_before(self, first: int) -> None:
        """Forget the pages below index `first`; all of them, where that is beyond its end."""
        if first >= self.end:
            self.begin_at(first)
        else:
            self.first = max(self.first, first)
