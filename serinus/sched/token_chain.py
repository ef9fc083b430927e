"""TokenChain: the chain hash of a request's first n tokens, for any n. Decides nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serinus.core.stamps import CHAIN_ANCHOR, ChainHashes, chain_next


class TokenChain:
    """Of one request. Its tokens are handed in, as their buffer grows elsewhere."""

    __slots__ = ("_chain", "_hashes", "count")

    def __init__(self, hashes: ChainHashes) -> None:
        self._hashes = hashes
        self._chain = CHAIN_ANCHOR
        self.count = 0
        """Tokens that `at` was asked for last: it goes on from there."""

    def at(self, tokens: NDArray[np.int32], count: int) -> int:
        """The hash of the first `count` tokens, int64. Cost: 1 us for one token more than the last time; some 10 ns a
        token (compiled) for several more, and for fewer from the first token on: after a heal, and for the receipt of
        an answer that a stop text has cut."""
        if count == self.count + 1:
            self._chain = chain_next(self._chain, tokens.item(self.count), self.count)
        elif count != self.count:
            self.cut(count)
            if count:
                self._chain = self._hashes(tokens[self.count : count], self.count, self._chain).item(-1)
        self.count = count
        return self._chain

    def cut(self, count: int) -> None:
        """Tokens behind the first `count` are others now."""
        if count < self.count:
            self._chain, self.count = CHAIN_ANCHOR, 0
