"""Pages from one pool into another of the same device, with a sum over each, in one kernel; see the reference.

G = pages, P = pages of a pool, W = bytes of a row, K = sums of a page, B = blocks of a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_pull
from serinus.kernels.ref import pull_pages as reference
from serinus.kernels.triton.pinned import sent_ahead

_BLOCK = 2048
"""Words of one program: 16 KB. On an H200 a pull of pages of 2.4 MB moves 1,897 GB/s so, a plain copy 2,087 (by 1,024
words 1,675), and the sums alone read 3,726."""
_COLUMNS = 10
"""Numbers that say what a block is."""
_KEY_STEP = tl.constexpr(reference.KEY_STEP)
_MIX = tl.constexpr(reference.MIX)

_Place: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Of a lane: its address, its sizes but that of P, its strides but that of W."""


@torch.inference_mode()
def pull_pages(
    lanes: Sequence[Tensor], pages_G: NDArray[np.int64], seed: int, sources: Sequence[Tensor] = (),
    source_pages_G: NDArray[np.int64] | None = None, sums: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Fill pages from those of another pool, with sums of each; see the reference. Queued on the current stream."""
    check_pull(lanes, pages_G, sources, source_pages_G, sums)
    device, count, each = lanes[0].device, len(pages_G), max(1, len(sums))
    if not count:
        return torch.zeros((count, each), dtype=torch.int64, device=device)
    copies = source_pages_G is not None and len(sources) > 0
    own, other = (tuple(map(_place, side)) for side in (lanes, sources if copies else lanes))
    blocks_BN, aligned, rows = _blocks(own, other, tuple(sums) or (len(lanes),), device)
    zeros = np.zeros(count * each, np.int64)
    parts = (zeros, np.array([seed]), pages_G, source_pages_G if copies else pages_G)
    job = sent_ahead(torch.from_numpy(np.concatenate(parts, dtype=np.int64)), device)  # type: ignore[arg-type]
    _pull[(len(blocks_BN), count)](
        blocks_BN, job, count, each, COPIES=copies, ALIGNED=aligned, ROWS=rows, BLOCK=_BLOCK, COLUMNS=_COLUMNS,
        num_warps=8,
    )  # fmt: skip
    return job[: count * each].view(count, each)


def _place(lane: Tensor) -> _Place:
    return lane.data_ptr(), tuple(lane.shape[1:]), lane.stride()[:-1]


@lru_cache(maxsize=64)
def _blocks(
    own: tuple[_Place, ...], others: tuple[_Place, ...], sums: tuple[int, ...], device: torch.device
) -> tuple[Tensor, bool, bool]:
    """Of each block of a page: where it begins in page 0 and the distance of two pages, on both sides, in bytes; its
    words, its place and the number of its sum; the words of a row, and of the gaps between two rows, on both sides. And
    whether all words lie in pairs of 16 bytes, and whether any block has several rows. Copied once."""
    numbers = [(address, *sizes[-1:], *strides) for address, sizes, strides in (*own, *others)]
    odd = [place for place in numbers if any(number % 8 for number in place)]
    if odd:
        raise ValueError(f"kernels: a lane lies at {odd[0]} (address, width, distances), expected multiples of 8")
    found, lanes, rows = [], zip(own, others, strict=True), False
    for which, lane_count in enumerate(sums):
        start = 0
        for _, (one, two) in zip(range(lane_count), lanes, strict=False):
            for at, there, count, width, gap, gap_there in _stretches(one, two):
                place = (one[0] + at, one[2][0], two[0] + there, two[2][0])
                found.append((*place, count * width // 8, start, which, width // 8, gap // 8, gap_there // 8))
                start += count * width // 8
                rows |= count > 1
    aligned = not any(number % 16 for place in numbers for number in place)
    return torch.tensor(found, dtype=torch.int64).to(device), aligned, rows


def _stretches(own: _Place, other: _Place) -> Iterator[tuple[int, int, int, int, int, int]]:
    """What one program moves of a lane, again and again: where its first row begins on both sides, rows, bytes of each,
    gaps between them on both sides. Rows that touch on both sides are one."""
    (_, sizes, strides), (_, _, strides_there) = own, other
    *outer, width = sizes
    axes = [axis for axis in zip(outer, strides[1:], strides_there[1:], strict=True) if axis[0] > 1]
    while axes and axes[-1][1:] == (width, width):
        width *= axes.pop()[0]
    count, step, step_there = axes.pop() if axes else (1, width, width)
    each = max(1, 8 * _BLOCK // width)  # rows of a program; of wider ones a piece
    for index in product(*(range(size) for size, _, _ in axes)):
        at = sum(i * stride for i, (_, stride, _) in zip(index, axes, strict=True))
        there = sum(i * stride for i, (_, _, stride) in zip(index, axes, strict=True))
        for row in range(0, count, each):
            rows, first, second = min(each, count - row), at + row * step, there + row * step_there
            if rows > 1:
                yield first, second, rows, width, step - width, step_there - width
                continue
            for column in range(0, width, 8 * _BLOCK):
                yield first + column, second + column, 1, min(width - column, 8 * _BLOCK), 0, 0


_jit: Any = triton.jit


@_jit(do_not_specialize=["count", "each"])
def _pull(
    blocks, job, count, each, COPIES: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """In `job` come `each` sums of every page, zeros yet, the seed, pages, source pages."""
    block, g, ids = blocks + tl.program_id(0) * COLUMNS, tl.program_id(1), job + count * each + 1
    seed, own_page, source_page = tl.load(ids - 1), tl.load(ids + g), tl.load(ids + count + g)
    own = (tl.load(block) + own_page * tl.load(block + 1)).to(tl.pointer_type(tl.int64))
    source = (tl.load(block + 2) + source_page * tl.load(block + 3)).to(tl.pointer_type(tl.int64))
    left, start, which = tl.load(block + 4), tl.load(block + 5), tl.load(block + 6)
    if ALIGNED:
        own, source, left = tl.multiple_of(own, 16), tl.multiple_of(source, 16), tl.multiple_of(left, 2)
    if ROWS:  # words that lie together are the last axis: rows are of any width
        UNIT: tl.constexpr = 2 if ALIGNED else 1
        unit = tl.arange(0, BLOCK // UNIT)[:, None]
        w = unit * UNIT + tl.arange(0, UNIT)[None, :]
        row = (unit // (tl.load(block + 7) // UNIT).to(tl.int32)).to(tl.int64)
        gap, source_gap = tl.load(block + 8), tl.load(block + 9)
        if ALIGNED:
            gap, source_gap = tl.multiple_of(gap, 2), tl.multiple_of(source_gap, 2)
        own_at, source_at = row * gap + w, row * source_gap + w
    else:
        w = tl.arange(0, BLOCK)
        own_at, source_at = w, w
    inside = w < left
    words = tl.load(source + source_at, mask=inside, other=0)
    if COPIES:
        tl.store(own + own_at, words, mask=inside)
    x = (words + seed + (start + w + 1) * _KEY_STEP).to(tl.uint64, bitcast=True)
    x ^= x >> 32
    x *= _MIX
    x ^= x >> 29
    x *= _MIX
    x ^= x >> 32
    x = tl.where(inside, x.to(tl.int64, bitcast=True), 0)
    tl.atomic_add(job + g * each + which, tl.sum(x), sem="relaxed")
