"""How stamps of KV that was cut anew come to be: from the stamps that came with it, without trusting bytes.

Token, position and hash of a slot are the same on every rank. Its digest covers the layers and heads of one rank, and
is linear. A target slot that holds a whole source rank's layers and heads has that rank's digest among its terms; one
that holds a part of them has the source's digest *less the digest of the bytes that go to others*, which are at hand,
as each target rank gets whole source pages. Terms of several source ranks add up. So no stamp is made of the bytes that
it vouches for: whatever was damaged before, and whatever a cut puts in a wrong place, shows at arrival as a digest that
differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.parts import Part
from serinus.core.stamps import STAMP_FIELDS, digest_coefficients, digest_difference, digest_sum
from serinus.kernels import load
from serinus.pd.layout import Cut, RankLayout

_POSITION, _DIGEST = 1, 3
_DISAGREE: Final = -1
"""Position of a stamp of which two source ranks say different things: the check at arrival names the slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Others:
    """What of a source rank's rows goes to other ranks than one target."""

    first_layer: int
    """Of the source rank, within the part; what goes to others lies in this layer and those behind it."""
    coefficients_L22W: Tensor
    """Of these layers' rows, 0 where the bytes are the target's own; lanes behind W are its own, or in no digest."""


class StampStore(Protocol):
    """A store of pages with stamps that can be moved alone: pool.DevicePool."""

    def read_stamps(self, pages: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Stamps of pages, [G, bytes of stamps]."""

    def write_stamps(self, pages: NDArray[np.integer], rows: NDArray[np.uint8]) -> None:
        """The reverse: the KV of these pages stays."""

    def token_digests(
        self, pages: NDArray[np.integer], first_layer: int, coefficients_L22W: Tensor
    ) -> NDArray[np.uint64]:
        """Digests [tokens of the pages, 2] of layers from `first_layer` on."""


class StampOutlet:
    """Stamps of one rank's pages for the ranks of a peer that each read a slice of the KV."""

    def __init__(self, source: RankLayout, items: Sequence[Cut]) -> None:
        """`items`: the slices of one part."""
        self._size = source.page_size
        self._others = [(item.part, _others(source, item, whole_rows=True)) for item in items]

    def cut(self, store: StampStore, pages: NDArray[np.int32]) -> NDArray[np.uint8]:
        """[slice][page][bytes of stamps]: what each slice adds to the stamps of the page it goes to.

        Cost: 128 bytes a token and slice; where not all that is digested is in one slice, the KV is read once for each.
        """
        found, rows = [], store.read_stamps(pages)
        for part, others in self._others:
            came_N44 = _by_token(part, self._size, rows)
            if others is not None:
                terms_N2 = store.token_digests(pages, others.first_layer, others.coefficients_L22W)
                _take_off(part, came_N44, terms_N2[:, : part.halves])
            found.append(_by_page(part, self._size, came_N44))
        return np.stack(found)


class StampIntake:
    """Stamps of one peer's pages, on their way into one rank's.

    Of a handoff it keeps, until `forget`, one byte a token and part: which slots have terms of their digest already.
    Of one whose pages are read in slices (`expect`) it keeps the stamps themselves.
    """

    def __init__(self, source: RankLayout, target: RankLayout) -> None:
        self._source, self._target = source, target
        self._others: dict[Cut, _Others | None] = {}
        self._page_digests = load("cpu").page_digests
        self._begun: dict[str, dict[Part, NDArray[np.bool_]]] = {}
        self._kept: dict[str, dict[Part, NDArray[np.uint64]]] = {}
        """Stamps so far, by token of the prompt."""

    def land(
        self, xid: str, item: Cut, rows: NDArray[np.uint8], first: int, out: NDArray[np.uint8], target_first: int
    ) -> None:
        """Put the stamps of one cut of source pages into target pages, as `recut` does with its KV. Each piece once.

        Cost: 128 bytes a token; and where the target holds only a part of the source rank's layers and heads, one read
        of these rows, compiled, in the calling thread.
        """
        source, target, part = self._source, self._target, item.part
        came_N44 = _by_token(part, source.page_size, _behind_kv(source, item.source_rank, part, rows))
        others = self._of(item)
        if others is not None:
            _take_off(part, came_N44, self._digest(item, rows, others))
        positions = np.arange(first * source.page_size, (first + len(rows)) * source.page_size)
        pages, inside = positions // target.page_size - target_first, positions % target.page_size
        here = (pages >= 0) & (pages < len(out))
        pages, inside, came_N44 = pages[here], inside[here], came_N44[here]
        stamps = _stamps(part, target.page_size, _behind_kv(target, item.target_rank, part, out))
        there_N44 = np.ascontiguousarray(stamps[pages, :, inside]).view(np.uint64)
        there_N44 = there_N44.reshape(-1, 2 * part.halves, STAMP_FIELDS)
        begun = self._begin(xid, part, positions[here])
        stamps[pages, :, inside] = _joined(part, came_N44, there_N44, begun).view(np.uint8)

    def expect(self, xid: str) -> None:
        """Slices of this handoff are being read."""
        self._kept.setdefault(xid, {})

    def join(self, xid: str, part: Part, rows: NDArray[np.uint8], first: int) -> NDArray[np.uint8] | None:
        """Stamps of pages from index `first` on, [G, bytes of stamps], with all that came for them before and `rows`,
        what one source rank adds (StampOutlet). None = the handoff is over.

        Cost: 128 bytes a token.
        """
        if xid not in self._kept:
            return None
        size = self._target.page_size
        came_N44, start, end = _by_token(part, size, rows), first * size, (first + len(rows)) * size
        kept = self._kept[xid].get(part, came_N44[:0])
        if end > len(kept):
            more = np.zeros((max(end, 2 * len(kept)) - len(kept), *kept.shape[1:]), np.uint64)
            kept = self._kept[xid][part] = np.concatenate((kept, more))
        begun = self._begin(xid, part, np.arange(start, end))
        kept[start:end] = _joined(part, came_N44, kept[start:end].copy(), begun)
        return _by_page(part, size, kept[start:end])

    def forget(self, xid: str) -> None:
        """A handoff is over, however."""
        self._begun.pop(xid, None)
        self._kept.pop(xid, None)

    def _begin(self, xid: str, part: Part, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these slots had terms already; from now on they all have."""
        parts = self._begun.setdefault(xid, {})
        begun = parts.get(part, np.zeros(0, np.bool_))
        end = int(positions[-1]) + 1 if len(positions) else 0
        if end > len(begun):
            begun = np.concatenate((begun, np.zeros(max(end, 2 * len(begun)) - len(begun), np.bool_)))
        found = begun[positions]
        begun[positions] = True
        parts[part] = begun
        return found

    def _of(self, item: Cut) -> _Others | None:
        if item not in self._others:
            self._others[item] = _others(self._source, item)
        return self._others[item]

    def _digest(self, item: Cut, rows: NDArray[np.uint8], others: _Others) -> NDArray[np.uint64]:
        """Of the halves of what goes to others, [tokens, halves]."""
        source, halves = self._source, item.part.halves
        row_bytes = len(source.shards[item.source_rank].heads) * source.signature.head_size * source.item_bytes
        behind = rows[:, others.first_layer * halves * source.page_size * row_bytes :]
        pages = np.arange(len(rows), dtype=np.int64)
        found_GS2 = self._page_digests(behind, pages, source.page_size, row_bytes, others.coefficients_L22W)
        return found_GS2.view(np.uint64).reshape(-1, 2)[:, :halves]


def _others(source: RankLayout, item: Cut, *, whole_rows: bool = False) -> _Others | None:
    """None = everything that is digested goes to the target. `whole_rows`: with all lanes, as a pool's digests are."""
    signature, shard = source.signature, source.shards[item.source_rank]
    if signature.stamp_data == "none":
        return None
    ids = source.layer_ids(item.source_rank, item.part)
    partial = signature.stamp_data != "all"
    factors = digest_coefficients(
        ids, shard.heads, signature.head_size, source.item_bytes, partial=partial, halves=item.part.halves
    )
    width = signature.head_size * source.item_bytes // 2
    mine = slice(item.source_layer, item.source_layer + item.layer_count)
    factors[mine, ..., item.source_head * width : (item.source_head + item.head_count) * width] = 0
    layers, lanes = np.flatnonzero(factors.any((1, 2, 3))), np.flatnonzero(factors.any((0, 1, 2)))
    if not len(layers):
        return None
    end = None if whole_rows else lanes[-1] + 1
    kept = np.ascontiguousarray(factors[layers[0] : layers[-1] + 1, ..., :end])
    return _Others(first_layer=int(layers[0]), coefficients_L22W=torch.from_numpy(kept))


def _take_off(part: Part, came_N44: NDArray[np.uint64], digests_N2: NDArray[np.uint64]) -> None:
    """What goes to others is no part of these digests any more."""
    terms_N2 = came_N44[:, part.halves :, _DIGEST]  # a view
    terms_N2[:] = digest_difference(terms_N2, digests_N2)


def _joined(
    part: Part, came_N44: NDArray[np.uint64], there_N44: NDArray[np.uint64], begun: NDArray[np.bool_]
) -> NDArray[np.uint64]:
    """Stamps that came, with the terms of those that are there where these have some. Changes both."""
    tail = slice(part.halves, None)
    terms_N2 = came_N44[:, tail, _DIGEST].copy()
    added_N2 = digest_sum(terms_N2, there_N44[:, tail, _DIGEST])
    there_N44[:, tail, _DIGEST] = terms_N2
    differs = begun & (came_N44 != there_N44).any((1, 2))
    came_N44[begun, tail, _DIGEST] = added_N2[begun]
    came_N44[differs, :, _POSITION] = np.int64(_DISAGREE).view(np.uint64)
    return came_N44


def _behind_kv(layout: RankLayout, rank: int, part: Part, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The stamps of pages; no copy."""
    return rows[:, layout.page_bytes(rank, part) - layout.page_size * layout.signature.stamp_bytes :]


def _stamps(part: Part, page_size: int, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Stamps of pages as [G, lane, token, bytes of a stamp]; no copy."""
    return rows.reshape(len(rows), 2 * part.halves, page_size, STAMP_FIELDS * 8)


def _by_token(part: Part, page_size: int, rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Stamps of pages as words [token, lane, field]; a copy."""
    stamps = np.array(_stamps(part, page_size, rows).transpose(0, 2, 1, 3), order="C")
    return stamps.reshape(-1, 2 * part.halves, STAMP_FIELDS * 8).view(np.uint64)


def _by_page(part: Part, page_size: int, stamps_N44: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The reverse, [G, bytes of stamps]; a copy."""
    by_page = stamps_N44.reshape(-1, page_size, 2 * part.halves, STAMP_FIELDS).transpose(0, 2, 1, 3)
    pages = np.array(by_page, order="C")
    return pages.reshape(len(pages), -1).view(np.uint8)
