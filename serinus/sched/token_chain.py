"""TokenChain: the chain hash of a request's first n tokens, for any n. Kept page by page; decides nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.core.stamps import CHAIN_ANCHOR, ChainHashes, chain_next


class TokenChain:
    """Of one request. Its tokens are handed in, as their buffer grows elsewhere."""

    __slots__ = ("_chain", "_count", "_hashes", "_page_size", "_pages", "reach")

    def __init__(self, hashes: ChainHashes, page_size: int) -> None:
        self._hashes, self._page_size = hashes, page_size
        self._pages = [CHAIN_ANCHOR]
        """Of the first 0, page_size, 2 * page_size... tokens."""
        self._chain = CHAIN_ANCHOR
        self._count = 0
        """Tokens that `at` was asked for last..."""
        self.reach = 0
        """...and at most, since `cut`."""

    def at(self, tokens: NDArray[np.int32], count: int) -> int:
        """The hash of the first `count` tokens, int64. Cost: 1 us for one more token than the last time, some 10 ns a
        token (compiled) from the latest page that is known otherwise."""
        if count == self._count + 1:
            self._chain = chain_next(self._chain, int(tokens[count - 1]), count - 1)
            self._count = count
            if not count % self._page_size and count // self._page_size == len(self._pages):
                self._pages.append(self._chain)
        elif count != self._count:
            self._seek(tokens, count)
        if count > self.reach:
            self.reach = count
        return self._chain

    def cut(self, count: int) -> None:
        """Tokens behind the first `count` are others now."""
        del self._pages[count // self._page_size + 1 :]
        self.reach = min(self.reach, count)
        if count < self._count:
            self._chain, self._count = CHAIN_ANCHOR, 0

    def _seek(self, tokens: NDArray[np.int32], count: int) -> None:
        size, pages = self._page_size, self._pages
        page = min(count // size, len(pages) - 1)
        first, chain = page * size, pages[page]
        hashes: list[Any] = self._hashes(tokens[first:count], first, chain).tolist()
        pages += hashes[size - 1 :: size]
        self._chain, self._count = hashes[-1] if hashes else chain, count
