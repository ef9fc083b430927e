"""How stamps of KV that was cut anew come to be: from the stamps that came with it, without trusting bytes.

Token, position and hash of a slot are the same on every rank. Its digest covers the layers and heads of one rank, and
is linear. A target slot that holds a whole source rank's layers and heads has that rank's digest among its terms; one
that holds a part of them has the source's digest *less the digest of the bytes that go to others*, which are at hand,
as each target rank gets whole source pages. Terms of several source ranks add up. So no stamp is made of the bytes that
it vouches for: whatever was damaged before, and whatever a cut puts in a wrong place, shows at arrival as a digest that
differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serinus.core.parts import Part
from serinus.core.stamps import STAMP_FIELDS, STAMP_LANES, digest_coefficients, digest_difference, digest_sum
from serinus.pd.layout import Cut, RankLayout

__all__ = ["StampIntake"]

_POSITION, _DIGEST = 1, 3
_TAIL: Final = slice(STAMP_LANES // 2, STAMP_LANES)
_DISAGREE: Final = -1
"""Position of a stamp of which two source ranks say different things: the check at arrival names the slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Others:
    """What of a source row goes to other ranks than one target."""

    layer: int
    """Of the source rank, within the part."""
    factors_2HW: NDArray[np.uint32]
    """Of one half (k or v): coefficients [2 sums, head, 16-bit lane], 0 where the bytes are the target's own."""
    half: int


class StampIntake:
    """Stamps of one peer's pages, on their way into one rank's.

    Of a handoff it keeps one byte a token and part, until `forget`: which slots have terms of their digest already.
    """

    def __init__(self, source: RankLayout, target: RankLayout) -> None:
        self._source, self._target = source, target
        self._others: dict[Cut, list[_Others]] = {}
        self._begun: dict[str, dict[Part, NDArray[np.bool_]]] = {}

    def land(
        self, xid: str, item: Cut, rows: NDArray[np.uint8], first: int, out: NDArray[np.uint8], target_first: int
    ) -> None:
        """Put the stamps of one cut of source pages into target pages, as `recut` does with its KV. Each piece once.

        Cost: 128 bytes a token; and where the target holds only a part of the source rank's layers and heads, one read
        of the rest of these rows, at about 1 GB/s.
        """
        source, target = self._source, self._target
        came_N44 = _by_token(source, item.source_rank, item.part, rows)
        terms_N2 = came_N44[:, _TAIL, _DIGEST]  # a view
        for others in self._of(item):
            elsewhere_N = self._digest(item, rows, others)
            terms_N2[:, others.half] = digest_difference(terms_N2[:, others.half], elsewhere_N)
        positions = np.arange(first * source.page_size, (first + len(rows)) * source.page_size)
        pages, inside = positions // target.page_size - target_first, positions % target.page_size
        here = (pages >= 0) & (pages < len(out))
        pages, inside, came_N44 = pages[here], inside[here], came_N44[here]
        stamps = _stamps(target, item.target_rank, item.part, out)
        there_N44 = np.ascontiguousarray(stamps[pages, :, inside]).view(np.uint64)
        there_N44 = there_N44.reshape(-1, STAMP_LANES, STAMP_FIELDS)
        begun = self._begin(xid, item.part, positions[here])
        terms_N2 = came_N44[:, _TAIL, _DIGEST].copy()
        added_N2 = digest_sum(terms_N2, there_N44[:, _TAIL, _DIGEST])
        there_N44[:, _TAIL, _DIGEST] = terms_N2
        differs = begun & (came_N44 != there_N44).any((1, 2))
        came_N44[begun, _TAIL, _DIGEST] = added_N2[begun]
        came_N44[differs, :, _POSITION] = np.int64(_DISAGREE).view(np.uint64)
        stamps[pages, :, inside] = came_N44.view(np.uint8)

    def forget(self, xid: str) -> None:
        """A handoff is over, however."""
        self._begun.pop(xid, None)

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

    def _of(self, item: Cut) -> list[_Others]:
        found = self._others.get(item)
        if found is None:
            found = self._others[item] = _others(self._source, item)
        return found

    def _digest(self, item: Cut, rows: NDArray[np.uint8], others: _Others) -> NDArray[np.uint64]:
        """Of one layer's k or v, [N] tokens."""
        kv = self._source.view(item.source_rank, item.part, rows)[:, others.layer, others.half]
        heads = np.flatnonzero(others.factors_2HW.any((0, 2)))
        lanes = np.ascontiguousarray(kv[:, :, heads]).view(np.uint16).reshape(kv.shape[0] * kv.shape[1], -1)
        factors = others.factors_2HW[:, heads].reshape(2, -1)
        sums_2N: NDArray[np.uint64] = (lanes.astype(np.uint32) @ factors.T).astype(np.uint64).T
        packed: NDArray[np.uint64] = sums_2N[0] | sums_2N[1] << np.uint64(32)
        return packed


def _others(source: RankLayout, item: Cut) -> list[_Others]:
    signature, shard = source.signature, source.shards[item.source_rank]
    if signature.stamp_data == "none":
        return []
    ids = source.layer_ids(item.source_rank, item.part)
    factors = _factors(source, ids, shard.heads)
    mine = slice(item.source_layer, item.source_layer + item.layer_count)
    factors[mine, :, :, item.source_head : item.source_head + item.head_count] = 0
    return [
        _Others(layer=layer, factors_2HW=factors[layer, half], half=half)
        for layer in range(len(ids))
        for half in range(2)
        if factors[layer, half].any()
    ]


def _factors(source: RankLayout, layer_ids: list[int], heads: range) -> NDArray[np.uint32]:
    """Coefficients of whole rows, [layer, half, sum, head, lane]; 0 where nothing is digested."""
    size, item_bytes = source.signature.head_size, source.item_bytes
    width = size * item_bytes // 2
    if source.signature.stamp_data == "all":
        whole = digest_coefficients(layer_ids, heads, size, item_bytes, partial=False)
        return whole.view(np.uint32).reshape(len(layer_ids), 2, 2, len(heads), width)
    few = digest_coefficients(layer_ids, heads, size, item_bytes, partial=True).view(np.uint32)
    found = np.zeros((len(layer_ids), 2, 2, len(heads), width), np.uint32)
    found[:, :, :, 0, : few.shape[-1]] = few
    return found


def _stamps(layout: RankLayout, rank: int, part: Part, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Stamps of pages as [G, lane, token, bytes of a stamp]; no copy."""
    kv_bytes = layout.page_bytes(rank, part) - layout.page_size * layout.signature.stamp_bytes
    return rows[:, kv_bytes:].reshape(len(rows), STAMP_LANES, layout.page_size, STAMP_FIELDS * 8)


def _by_token(layout: RankLayout, rank: int, part: Part, rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Stamps of pages as words [token, lane, field]; a copy."""
    stamps = np.array(_stamps(layout, rank, part, rows).transpose(0, 2, 1, 3), order="C")
    return stamps.reshape(-1, STAMP_LANES, STAMP_FIELDS * 8).view(np.uint64)
