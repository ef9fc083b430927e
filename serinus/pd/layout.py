"""How KV lies on the ranks of an engine, which engines can exchange it, and which bytes of a page go where. Pure.

The bytes of one page on one rank, in one part: [layer][lane k, v][token][head][head_size] (DevicePool.read_pages), or
of latent rows one lane of one head, which every rank of a stage holds whole (slice 0 sends it); then its stamps where
there are any, which stamps.py cuts. Two engines exchange KV where everything that gives the bytes their meaning is
equal. TP, PP and the page size may differ: `cut` says which layers and heads of which source rank go to which target
rank, `recut` moves whole pieces at once (strided views; Python runs once per cut and page ratio, never per page).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import LayoutMismatch
from serinus.core.parts import Part
from serinus.core.stamps import STAMP_BYTES
from serinus.wire.messages import LayoutSignature

ITEM_BYTES: Final[Mapping[str, int]] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
"""Bytes of one element, by the name of the KV dtype."""

_EQUAL: Final = (
    "model", "kv_dtype", "layer_count", "kv_head_count", "head_size", "lanes", "layer_parts", "window", "stamp_bytes",
    "stamp_data",
)  # fmt: skip
_RULES: Final[Mapping[str, str]] = {
    "kv_dtype": "; KV is not converted on its way: give both engines one --dtype and one --kv-cache-dtype",
}
"""What to do about a field, where that is not plain."""
_WHOLE: Final = "; the data backend moves pages whole, others cut them anew"
_RECUT: Final = ("page_size", "tp", "pp", "stage_layers")
RANKS_MAX: Final = 1024
LAYERS_MAX: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What one rank holds."""

    rank: int
    """pp_rank * tp + tp_rank."""
    tp_rank: int
    pp_rank: int
    layers: range
    """Of the model, all parts together."""
    heads: range
    """KV heads that this rank holds."""
    part_layers: Mapping[Part, range]
    """Its layers of each part, counted within the part."""


class RankLayout:
    """The shards of one engine. Raises LayoutMismatch where the signature makes no sense or cannot be cut."""

    def __init__(self, signature: LayoutSignature) -> None:
        self.signature = signature
        _check(signature)
        self.item_bytes: int = ITEM_BYTES[signature.kv_dtype]
        stages = _stages(signature)
        parts = signature.layer_parts or bytes(signature.layer_count)
        self.is_replicated: bool = Part.LATENT in parts and signature.tp > 1
        """Whether the ranks of a stage hold the same bytes."""
        heads = signature.kv_head_count // (1 if self.is_replicated else signature.tp)
        before = {part: np.cumsum([0] + [value == part for value in parts]) for part in Part}
        self.parts: tuple[Part, ...] = tuple(part for part in Part if part in set(parts))
        """Those that have layers, and so bytes."""
        self.shards: tuple[RankShare, ...] = tuple(
            RankShare(
                rank=stage * signature.tp + tp_rank,
                tp_rank=tp_rank,
                pp_rank=stage,
                layers=layers,
                heads=range(heads) if self.is_replicated else range(tp_rank * heads, (tp_rank + 1) * heads),
                part_layers={
                    part: range(int(before[part][layers.start]), int(before[part][layers.stop])) for part in Part
                },
            )
            for stage, layers in enumerate(stages)
            for tp_rank in range(signature.tp)
        )

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.signature.page_size

    def page_bytes(self, rank: int, part: Part) -> int:
        """Bytes of one page of a part on a rank; 0 = it has no layer of that part."""
        shard = self.shards[rank]
        row = len(shard.heads) * self.signature.head_size * self.item_bytes
        kv_bytes = len(shard.part_layers[part]) * part.halves * row
        return self.page_size * (kv_bytes + self.signature.stamp_bytes) if kv_bytes else 0

    def senders(self, part: Part) -> tuple[int, ...]:
        """Ranks that send bytes of a part: all that hold some; of ranks that hold the same ones the first."""
        return tuple(
            shard.rank
            for shard in self.shards
            if self.page_bytes(shard.rank, part) and not (self.is_replicated and shard.tp_rank)
        )

    def view(self, rank: int, part: Part, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Pages rows[G, page_bytes], without stamps, as [G, layer, lane, token, head, bytes of a head]; no copy."""
        shard, signature = self.shards[rank], self.signature
        kv_bytes = self.page_bytes(rank, part) - self.page_size * signature.stamp_bytes
        return rows[:, :kv_bytes].reshape(
            len(rows), len(shard.part_layers[part]), part.halves, self.page_size, len(shard.heads),
            signature.head_size * self.item_bytes,
        )  # fmt: skip

    def layer_ids(self, rank: int, part: Part) -> list[int]:
        """The model's numbers of a rank's layers of a part."""
        parts = self.signature.layer_parts or bytes(self.signature.layer_count)
        return [i for i in self.shards[rank].layers if parts[i] == part]


def _check(signature: LayoutSignature) -> None:
    wrong = _sizes_wrong(signature) or _lists_wrong(signature)
    if wrong:
        raise LayoutMismatch(f"pd: layout: {wrong}")


def _sizes_wrong(signature: LayoutSignature) -> str:
    layers, heads, tp, pp = signature.layer_count, signature.kv_head_count, signature.tp, signature.pp
    for name in ("page_size", "layer_count", "kv_head_count", "head_size", "tp", "pp"):
        if not getattr(signature, name):
            return f"{name} is 0, expected more"
    if signature.kv_dtype not in ITEM_BYTES:
        return f"kv_dtype is {signature.kv_dtype!r}, expected one of {', '.join(ITEM_BYTES)}"
    if tp * pp > RANKS_MAX:
        return f"tp * pp is {tp * pp}, expected at most {RANKS_MAX}"
    if Part.LATENT in signature.layer_parts:
        heads = tp if heads == 1 else heads  # every rank holds the one row
    if tp > heads:
        return f"tp is {tp} with {heads} KV heads, which would be replicated; expected at most one rank per head"
    if heads % tp:
        return f"tp is {tp} with {heads} KV heads, expected a divisor"
    if not pp <= layers <= LAYERS_MAX:
        return f"layer_count is {layers} with pp {pp}, expected at least one layer per stage, at most {LAYERS_MAX}"
    return ""


def _lists_wrong(signature: LayoutSignature) -> str:
    layers, stages, parts = signature.layer_count, signature.stage_layers, signature.layer_parts
    if stages and (len(stages) != signature.pp or sum(stages) != layers or min(stages) < 1):
        return f"stage_layers is {stages}, expected {signature.pp} numbers from 1 on with the sum {layers}"
    if parts and (len(parts) != layers or not set(parts) <= set(Part)):
        return f"layer_parts has {len(parts)} entries, expected a part for each of {layers} layers"
    halves = {Part(part).halves for part in parts} or {Part.FULL.halves}
    if halves != {len(signature.lanes)} or (Part.LATENT in parts and signature.kv_head_count != 1):
        return (
            f"lanes is {signature.lanes} of {signature.kv_head_count} heads with layers of parts"
            f" {sorted(set(parts))}, expected one lane for latent rows, which have one head, two for keys and values"
        )
    if (Part.SWA in parts) != (signature.window > 0):
        return f"window is {signature.window}, expected more than 0 exactly if there are sliding layers"
    stamp_bytes = len(signature.lanes) * STAMP_BYTES
    if signature.stamp_bytes not in (0, stamp_bytes) or bool(signature.stamp_bytes) != bool(signature.stamp_data):
        return (
            f"stamp_bytes is {signature.stamp_bytes} with stamp_data {signature.stamp_data!r}, expected 0 and nothing,"
            f" or {stamp_bytes} and none, partial or all"
        )
    return ""


def _stages(signature: LayoutSignature) -> list[range]:
    counts = signature.stage_layers
    if not counts:
        share, more = divmod(signature.layer_count, signature.pp)
        counts = tuple(share + (stage < more) for stage in range(signature.pp))
    ends = np.cumsum((0, *counts)).tolist()
    return [range(first, end) for first, end in pairwise(ends)]


def difference(ours: LayoutSignature, theirs: LayoutSignature, *, can_recut: bool = True, we_send: bool = False) -> str:
    """Why these two cannot exchange KV, in words with both values; empty = they can.

    `can_recut` False: TP, PP and the page size must be equal too. `we_send`: KV goes from us to them, else to us.
    """
    for name in (*_EQUAL, *(() if can_recut else _RECUT)):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            rule = _RULES.get(name, _WHOLE if name in _RECUT else "")
            return f"layout differs in {name}: {mine!r} here, {other!r} there{rule}"
    try:
        _check(theirs)
    except LayoutMismatch as error:
        return str(error)
    if not can_recut and RankLayout(ours).is_replicated:
        return f"tp is {ours.tp} with latent rows, which one rank sends to all; the data backend goes from rank to rank"
    small, large = sorted((ours.page_size, theirs.page_size))
    if large % small:
        return (
            f"layout differs in page_size: {ours.page_size} here, {theirs.page_size} there, neither divides the other"
        )
    source, target = (ours, theirs) if we_send else (theirs, ours)
    if ours.window and target.page_size > source.page_size:
        # What lies before the window in its first page is gone at the sender; the larger page would be there in part.
        return (
            f"layout differs in page_size: {ours.page_size} here, {theirs.page_size} there; with sliding layers pages"
            f" are cut into smaller ones, never put together"
        )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Layers and heads of one part that go from one source rank to one target rank; all lanes, all tokens."""

    part: Part
    source_rank: int
    target_rank: int
    layer_count: int
    source_layer: int
    """First layer, counted within the part on that rank."""
    target_layer: int
    head_count: int
    source_head: int
    """First head, counted on that rank."""
    target_head: int


def cut(source: RankLayout, target: RankLayout) -> tuple[Cut, ...]:
    """All cuts from a source engine to a target engine. Raises LayoutMismatch where they cannot exchange KV."""
    reason = difference(target.signature, source.signature)
    if reason:
        raise LayoutMismatch(f"pd: {reason}")
    cuts: list[Cut] = []
    for ours in source.shards:
        for theirs in target.shards if not source.is_replicated or not ours.tp_rank else ():
            heads = _overlap(ours.heads, theirs.heads)
            for part in source.parts:
                mine, other = ours.part_layers[part], theirs.part_layers[part]
                layers = _overlap(mine, other)
                if layers and heads:
                    cuts.append(
                        Cut(
                            part=part, source_rank=ours.rank, target_rank=theirs.rank, layer_count=len(layers),
                            source_layer=layers.start - mine.start, target_layer=layers.start - other.start,
                            head_count=len(heads), source_head=heads.start - ours.heads.start,
                            target_head=heads.start - theirs.heads.start,
                        )
                    )  # fmt: skip
    return tuple(cuts)


def is_same(source: RankLayout, target: RankLayout) -> bool:
    """Whether a source page is a target page, rank by rank."""
    return not source.is_replicated and all(
        getattr(source.signature, name) == getattr(target.signature, name)
        for name in ("page_size", "tp", "pp", "stage_layers")
    )


class Routes:
    """Which ranks of one engine take what a rank of another sends."""

    def __init__(self, source: RankLayout, target: RankLayout, *, slices: bool = False) -> None:
        """`slices`: each reads what it takes alone (Capabilities.slices)."""
        self._slices = slices
        self._takers: dict[tuple[int, Part], tuple[int, ...]] = {}
        cuts = () if is_same(source, target) else cut(source, target)
        for item in cuts:
            found = self._takers.get((item.source_rank, item.part), ())
            self._takers[item.source_rank, item.part] = (*found, item.target_rank)
        same = [(shard.rank, shard.rank) for shard in source.shards]
        self.pairs: tuple[tuple[int, int], ...] = tuple(
            sorted({(item.source_rank, item.target_rank) for item in cuts}) or same
        )
        """Source and target rank of all that moves."""

    def takers(self, source: int, part: Part) -> tuple[int, ...]:
        """Target ranks, each once; never none."""
        return self._takers.get((source, part), (source,))

    def digest_count(self, source: int, part: Part) -> int:
        """Digests of each page: one for each taker, in their order, where each reads its own bytes alone."""
        return len(self.takers(source, part)) if self._slices else 1


def _overlap(one: range, two: range) -> range:
    return range(max(one.start, two.start), max(max(one.start, two.start), min(one.stop, two.stop)))


def target_range(source: RankLayout, target: RankLayout, first: int, count: int) -> range:
    """Pages of the target that `count` pages of the source from index `first` on reach into (indices in the prompt)."""
    start, end = first * source.page_size, (first + count) * source.page_size
    return range(start // target.page_size, -(-end // target.page_size))


def covers_pages(item: Cut, source: RankLayout, target: RankLayout, first: int, count: int) -> bool:
    """Whether these source pages fill all bytes of the target pages they reach into: nothing of them must be kept."""
    ratio = max(1, target.page_size // source.page_size)
    shard = target.shards[item.target_rank]
    whole = item.layer_count == len(shard.part_layers[item.part]) and item.head_count == len(shard.heads)
    return whole and first % ratio == 0 and count % ratio == 0


def recut(
    item: Cut, source: RankLayout, target: RankLayout, rows: NDArray[np.uint8], first: int, out: NDArray[np.uint8],
    target_first: int,
) -> None:  # fmt: skip
    """Copy one cut of source pages rows[G, page_bytes] (the first has index `first` in the prompt) into target pages
    out[T, page_bytes] (the first has index `target_first`). Tokens that `out` has no page for are left away.

    Cost: the bytes once; max(page ratio) numpy assignments.
    """
    layers = slice(item.source_layer, item.source_layer + item.layer_count)
    heads = slice(item.source_head, item.source_head + item.head_count)
    into_layers = slice(item.target_layer, item.target_layer + item.layer_count)
    into_heads = slice(item.target_head, item.target_head + item.head_count)
    from_GLKSHD = source.view(item.source_rank, item.part, rows)[:, layers, :, :, heads]
    into_TLKSHD = target.view(item.target_rank, item.part, out)[:, into_layers, :, :, into_heads]
    ours, theirs = source.page_size, target.page_size
    if ours >= theirs:
        ratio = ours // theirs
        for step in range(ratio):  # the step-th slice of every source page is a target page
            start = first * ratio + step - target_first
            skip = max(0, -(start // ratio)) if start < 0 else 0
            start += skip * ratio
            count = min(len(rows) - skip, -(-(len(out) - start) // ratio))
            if count > 0:
                tokens = slice(step * theirs, (step + 1) * theirs)
                into_TLKSHD[start : start + count * ratio : ratio] = from_GLKSHD[skip : skip + count, :, :, tokens]
        return
    ratio = theirs // ours
    for step in range(min(ratio, len(rows))):  # source pages step, step + ratio... go to the same place of target pages
        index = first + step
        start = index // ratio - target_first
        skip = max(0, -start)
        start += skip
        count = min(-(-(len(rows) - step) // ratio) - skip, len(out) - start)
        if count > 0:
            at = index % ratio * ours
            picked = from_GLKSHD[step + skip * ratio :: ratio][:count]
            into_TLKSHD[start : start + count, :, :, at : at + ours] = picked
