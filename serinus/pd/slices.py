"""What of its source ranks' pages a rank reads in place: rows of bytes, on both sides, for layouts that differ. Pure.

The bytes of one page (layout.py) are strips, one for each layer and half, of a row for each token. A cut takes some
strips whole or, where ranks hold other heads, a part of each of their rows. Stamps are no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from serinus.pd.layout import Cut, RankLayout, cut, is_same
from serinus.wire.messages import LayoutSignature

WORD_BYTES = 8
"""Rows are of whole words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Rows of one page of one rank: that of strip s and token t begins s * strip_bytes + t * token_bytes + start behind
    the page's first byte."""

    strips: range
    """Layers and halves that are taken."""
    strip_count: int
    """All that the rank has of the part."""
    tokens: int
    token_bytes: int
    start: int
    """Of the first head that is taken, in a row of all."""
    row_bytes: int
    """Of the heads that are taken."""

    @property
    def strip_bytes(self) -> int:
        """From one strip to the next, where a page is one run."""
        return self.tokens * self.token_bytes


def slices(source: RankLayout, target: RankLayout, item: Cut) -> tuple[Slice, Slice]:
    """What one cut takes of a source page, and what it fills of a target page, in one order; page sizes are equal."""
    halves, head = item.part.halves, source.signature.head_size * source.item_bytes

    def side(layout: RankLayout, rank: int, first_layer: int, first_head: int) -> Slice:
        shard = layout.shards[rank]
        return Slice(
            strips=range(first_layer * halves, (first_layer + item.layer_count) * halves),
            strip_count=len(shard.part_layers[item.part]) * halves, tokens=layout.page_size,
            token_bytes=len(shard.heads) * head, start=first_head * head, row_bytes=item.head_count * head,
        )  # fmt: skip

    return (
        side(source, item.source_rank, item.source_layer, item.source_head),
        side(target, item.target_rank, item.target_layer, item.target_head),
    )


def slices_fault(ours: LayoutSignature, theirs: LayoutSignature) -> str:
    """Why two engines that can exchange KV cannot read slices of each other's pages, in words; empty = they can."""
    one, other = RankLayout(ours), RankLayout(theirs)
    if is_same(one, other):
        return ""
    if ours.page_size != theirs.page_size:
        return (
            f"layout differs in page_size: {ours.page_size} here, {theirs.page_size} there; the data backend cuts"
            " layers and heads out of pages, others cut pages too"
        )
    odd = [found.row_bytes for item in cut(one, other) if (found := slices(one, other, item)[0]).row_bytes % WORD_BYTES]
    if odd:
        return f"a rank has {odd[0]} bytes of a token; the data backend moves words of {WORD_BYTES}"
    return ""
