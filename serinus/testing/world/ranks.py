"""The ranks of a simulated engine: each holds the bytes of its own layers and heads, and lives by the decision log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.core.parts import Part
from serinus.core.plan import SeqWork, StepPlan
from serinus.core.rng import splitmix64
from serinus.parallel import DecisionFollower, RankTable, StepHeader
from serinus.testing.world.toy import ROOT, Lanes, expected_kv, is_linked, link

__all__ = ["Rank", "RankPart", "share"]


def share(count: int, parts: int, index: int) -> range:
    """The index-th of `parts` shares of range(count); the first ones are larger where it does not divide."""
    each, more = divmod(count, parts)
    first = index * each + min(index, more)
    return range(first, first + each + (index < more))


class RankPart:
    """One part of one rank: its pool and its row table (pd's PageStore). A word is 8 bytes; a rank may have no layer
    of a part, whose pages then have no bytes."""

    def __init__(
        self, lanes: Lanes, layers: list[int], heads: range, *, pages: int, page_size: int, rows: int, context: int
    ) -> None:
        self.layers = layers
        self.page_count = pages
        self.page_size = page_size
        self.which: NDArray[np.intp] = np.array(
            [(layer * 2 + kv) * lanes.heads + head for layer in layers for kv in (0, 1) for head in heads], np.intp
        )
        """The model's lanes that are here."""
        self._lanes = lanes
        self._shape = (len(layers), 2, len(heads))
        self.table_RC: NDArray[np.integer[Any]]
        self._allocate(pages, len(heads), rows, context)
        self.weights_PL = lanes.weight_PL[:, self.which]
        self._odd, self._salt = lanes.odd_L[self.which], lanes.salt_L[self.which]
        self._inverse = lanes.inverse_L[self.which]

    def _allocate(self, pages: int, heads: int, rows: int, context: int) -> None:
        self._kv: NDArray[np.uint64] = np.zeros((pages, len(self.layers), 2, self.page_size, heads), np.uint64)
        self._bytes: NDArray[np.uint8] = self._kv.view(np.uint8).reshape(pages, -1)
        self.table_RC = np.zeros((rows, context), np.int64)

    def put(self, slots: NDArray[np.integer[Any]], chain_T: NDArray[np.uint64]) -> None:
        """Write the KV of tokens with these chains."""
        pages, offsets = np.divmod(slots, self.page_size)
        words = chain_T[:, None] * self._odd + self._salt
        self._kv[pages, :, :, offsets, :] = words.reshape(len(chain_T), *self._shape)

    def read(self, slots: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
        """What these slots hold: [slots, lanes of this part here]."""
        pages, offsets = np.divmod(slots, self.page_size)
        words: NDArray[np.uint64] = self._kv[pages, :, :, offsets, :].reshape(len(slots), -1)
        return words

    def chains(self, slots: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
        """What chains these slots were made of, as each lane says: [slots, lanes]."""
        return (self.read(slots) - self._salt) * self._inverse

    def chain(self, slot: int) -> int:
        """The same of one slot, as the first lane says."""
        page, offset = divmod(slot, self.page_size)
        return self._lanes.chain(self._kv[page, 0, 0, offset, 0], int(self.which[0]))

    def pages_of(self, tokens: NDArray[np.int32]) -> NDArray[np.uint8]:
        """The bytes of whole pages of a sequence: [pages, page_bytes]."""
        words = expected_kv(self._lanes, tokens, self.which)
        count = len(tokens) // self.page_size
        pages = np.ascontiguousarray(words.reshape(count, self.page_size, *self._shape).transpose(0, 2, 3, 1, 4))
        found: NDArray[np.uint8] = pages.view(np.uint8).reshape(count, self.page_bytes)
        return found

    # ---- pages as bytes (pd's PageStore) ----------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return int(self._bytes.shape[1])

    @property
    def kv_bytes(self) -> int:
        """Of them, those of KV."""
        return self.page_bytes

    def read_pages(self, pages: NDArray[np.integer[Any]], out: NDArray[np.uint8]) -> None:
        """Copy pages out."""
        out[:] = self._bytes[pages]

    def take_pages(self, pages: NDArray[np.integer[Any]]) -> NDArray[np.uint8]:
        """A copy of pages, [pages, page_bytes]."""
        found = np.empty((len(pages), self.page_bytes), np.uint8)
        self.read_pages(pages, found)
        return found

    def write_pages(self, pages: NDArray[np.integer[Any]], data: NDArray[np.uint8]) -> None:
        """Fill pages."""
        self._bytes[pages] = data


class Rank:
    """One rank: its parts, and a follower of the decision log."""

    def __init__(
        self, number: int, *, lanes: Lanes, tp: int, pp: int, pages: Mapping[Part, int], page_size: int, rows: int,
        context: int, kind: type[RankPart] = RankPart,
    ) -> None:  # fmt: skip
        """`pages`: of each part that the model has; `kind`: what keeps them."""
        self.number = number
        self.lanes = lanes
        self.layers = share(lanes.layers, pp, number // tp)
        self.heads = share(lanes.heads, tp, number % tp)
        slides = lanes.slides
        self.parts = {
            part: kind(
                lanes, [layer for layer in self.layers if slides[layer] is (part is Part.SWA)], self.heads,
                pages=count, page_size=page_size, rows=rows, context=context,
            )
            for part, count in pages.items()
        }  # fmt: skip
        """Those without layers here included."""
        self.follower = DecisionFollower(number)
        self.begun: set[str] = set()
        """Requests for which this rank has begun a prefetch from storage."""
        self.table = RankTable(self)
        self._first = Part.SWA if slides[self.layers[0]] else Part.FULL
        """Whose first lane says how far the chain came."""

    @property
    def stores(self) -> dict[Part, RankPart]:
        """Of the parts that have bytes here."""
        return {part: own for part, own in self.parts.items() if own.layers}

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

    def enter(self, plan: StepPlan) -> None:
        """Begin a step: it must be the leader's; its rows are written."""
        batch = self.table.take_batch()
        rids = tuple(work.rid for work in plan.work)
        assert batch == rids, f"testing: rank {self.number} was told to run {batch}, its plan says {rids} (I14)"
        for write in plan.table_writes:
            self.parts[write.part].table_RC[write.row, write.start : write.start + len(write.slots)] = write.slots

    def compute(self, plan: StepPlan) -> list[int]:
        """Write this rank's KV of a step; the fold over its lanes for every part of the batch that samples (else 0)."""
        return [self._compute(work) for work in plan.work]

    def _compute(self, work: SeqWork) -> int:
        end = work.start + len(work.tokens)
        for part, own in self.parts.items():
            slots = work.slots if part is Part.FULL else work.swa_slots
            row = own.table_RC[work.row]
            assert slots is not None, f"testing: {work.rid} has no slots of part {part.name}"
            assert np.array_equal(row[work.start : end], slots), f"testing: {work.rid} writes slots not in its row"
        before = self._before(work) if work.start else ROOT
        chain = np.empty(len(work.tokens), np.uint64)
        for index, token in enumerate(work.tokens.tolist()):
            before = link(before, token)
            chain[index] = before
        fold = 0
        for part, own in self.parts.items():
            if not own.layers:
                continue
            row = own.table_RC[work.row]
            own.put(row[work.start : end], chain)
            if work.sample is not None:
                first = max(0, end - self.lanes.window) if part is Part.SWA else 0
                words = own.read(row[first:end]) * own.weights_PL[first:end]
                fold ^= int(np.bitwise_xor.reduce(words, axis=None))
        return fold

    def _before(self, work: SeqWork) -> int:
        """The chain before a piece of work, as the KV of the position before it says. What the window holds of the
        positions before must fit it, in every sliding lane; if not, everything from here on is wrong."""
        own = self.parts[self._first]
        before = own.chain(int(own.table_RC[work.row, work.start - 1]))
        own = self.parts.get(Part.SWA, own)
        if self.lanes.window and own.layers:
            first = max(0, work.start + 1 - self.lanes.window)
            chains = own.chains(own.table_RC[work.row, first : work.start])
            path = np.concatenate(([np.uint64(ROOT)], chains[:, 0])) if not first else chains[:, 0]
            if int(path[-1]) != before or (chains != chains[:, :1]).any() or not is_linked(path):
                return splitmix64(before ^ 1)
        return before
