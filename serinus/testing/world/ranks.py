"""The ranks of a simulated engine: each holds the bytes of its own layers and heads, and lives by the decision log."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from serinus.core.plan import SeqWork, StepPlan
from serinus.parallel import DecisionFollower, RankTable, StepHeader
from serinus.testing.world.toy import ROOT, Lanes, expected_kv, link

__all__ = ["Rank", "share"]

FREED = 0xDD
"""What a page is filled with when it changes hands, so that nobody can live on old bytes."""


def share(count: int, parts: int, index: int) -> range:
    """The index-th of `parts` shares of range(count); the first ones are larger where it does not divide."""
    each, more = divmod(count, parts)
    first = index * each + min(index, more)
    return range(first, first + each + (index < more))


class Rank:
    """One rank: pool, row table, follower. Lanes are (layer, k or v, head); a word is 8 bytes."""

    def __init__(
        self, number: int, *, lanes: Lanes, tp: int, pp: int, pages: int, page_size: int, rows: int, context: int
    ) -> None:
        self.number = number
        self.lanes = lanes
        self.page_size = page_size
        self.layers = share(lanes.layers, pp, number // tp)
        self.heads = share(lanes.heads, tp, number % tp)
        self.which: NDArray[np.intp] = np.array(
            [(layer * 2 + kv) * lanes.heads + head for layer in self.layers for kv in (0, 1) for head in self.heads],
            np.intp,
        )
        self.kv: NDArray[np.uint64] = np.zeros((pages, len(self.layers), 2, page_size, len(self.heads)), np.uint64)
        self.bytes: NDArray[np.uint8] = self.kv.view(np.uint8).reshape(pages, -1)
        self.table_RC: NDArray[np.int64] = np.zeros((rows, context), np.int64)
        self.follower = DecisionFollower(number)
        self.begun: set[str] = set()
        """Requests for which this rank has begun a prefetch from storage."""
        self.table = RankTable(self)
        self._weights = lanes.weight_PL[:, self.which]
        self._odd, self._salt = lanes.odd_L[self.which], lanes.salt_L[self.which]
        self._first = int(self.which[0])

    # ---- by decision ------------------------------------------------------------------------------------------------

    def placed(self, rid: str, queue: str) -> None:
        if queue == "bootstrap":
            self.begun.add(rid)

    def dropped(self, rid: str, code: str) -> None:
        self.begun.discard(rid)

    def hear(self, header: StepHeader) -> None:
        """Apply what the leader decided."""
        for decision in self.follower.apply(header):
            self.table.apply(decision)

    # ---- computing --------------------------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> list[int]:
        """Write this rank's KV of a step; the fold over its lanes for every part of the batch that samples (else 0)."""
        batch = self.table.take_batch()
        rids = tuple(work.rid for work in plan.work)
        assert batch == rids, f"testing: rank {self.number} was told to run {batch}, its plan says {rids} (I14)"
        for write in plan.table_writes:
            self.table_RC[write.row, write.start : write.start + len(write.slots)] = write.slots
        return [self._compute(work) for work in plan.work]

    def _compute(self, work: SeqWork) -> int:
        end = work.start + len(work.tokens)
        size = self.page_size
        row = self.table_RC[work.row]
        assert np.array_equal(row[work.start : end], work.slots), f"testing: {work.rid} writes slots not in its row"
        before = ROOT
        if work.start:
            page, offset = divmod(int(row[work.start - 1]), size)
            before = self.lanes.chain(self.kv[page, 0, 0, offset, 0], self._first)
        chain = np.empty(len(work.tokens), np.uint64)
        for index, token in enumerate(work.tokens.tolist()):
            before = link(before, token)
            chain[index] = before
        pages, offsets = np.divmod(work.slots, size)
        words = chain[:, None] * self._odd + self._salt
        self.kv[pages, :, :, offsets, :] = words.reshape(len(chain), len(self.layers), 2, len(self.heads))
        if work.sample is None:
            return 0
        return int(np.bitwise_xor.reduce(self.read(row[:end]) * self._weights[:end], axis=None))

    def read(self, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
        """What these slots hold: [slots, lanes of this rank]."""
        pages, offsets = np.divmod(slots, self.page_size)
        words: NDArray[np.uint64] = self.kv[pages, :, :, offsets, :].reshape(len(slots), -1)
        return words

    def pages_of(self, tokens: NDArray[np.int32]) -> NDArray[np.uint8]:
        """The bytes of whole pages of a sequence: [pages, page_bytes]."""
        words = expected_kv(self.lanes, tokens, self.which)
        shape = (len(tokens) // self.page_size, self.page_size, len(self.layers), 2, len(self.heads))
        pages = np.ascontiguousarray(words.reshape(shape).transpose(0, 2, 3, 1, 4))
        found: NDArray[np.uint8] = pages.view(np.uint8).reshape(shape[0], -1)
        return found

    # ---- pages as bytes (pd's PageStore) ----------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on this rank."""
        return int(self.bytes.shape[1])

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> None:
        """Copy pages out."""
        out[:] = self.bytes[pages]

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        """Fill pages."""
        self.bytes[pages] = data

    def spoil(self, pages: Sequence[int]) -> None:
        """These pages changed hands."""
        self.bytes[list(pages)] = FREED
