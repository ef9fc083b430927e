"""Pages from one pool into another of the same device, with a sum over each, in one kernel; see the reference.

G = pages, N = words of a job, or numbers of a block, B = blocks of a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_pull_lanes, check_pull_pages
from serinus.kernels.contracts import PoolLane
from serinus.kernels.cuda_library import current_stream
from serinus.kernels.ref import pull_pages as reference
from serinus.kernels.triton.kept import KeptKernel, keep

_BLOCK = 2048
"""Words of one program: 16 KB. On an H200 a pull of pages of 2.4 MB moves 1,897 GB/s so, a plain copy 2,087 (by 1,024
words 1,675), and the sums alone read 3,726."""
_WARPS = 8
_COLUMNS = 10
"""Numbers that say what a block is."""
_KEY_STEP = tl.constexpr(reference.KEY_STEP)
_MIX = tl.constexpr(reference.MIX)


class PagePull:
    """What is done with pages of some lanes: filled from those of other ones, or as they lie, with sums of each. What
    is the same for any pages is made once."""

    def __init__(
        self, lanes: Sequence[PoolLane], sources: Sequence[PoolLane], sums: Sequence[int], device: torch.device
    ) -> None:
        """As the reference takes them. Waits for the current stream of the device. Raises ValueError: sizes disagree,
        or words lie at no multiple of 8."""
        check_pull_lanes(lanes, sources, sums)
        self.sums = max(1, len(sums))
        """Sums of each page."""
        self._page_count = min(lane.sizes[0] for lane in lanes)
        self._source_count = min(lane.sizes[0] for lane in sources) if sources else None
        self._device = device
        blocks, aligned, rows = _blocks(lanes, sources or lanes, tuple(sums) or (len(lanes),))
        self._block_count, self._blocks_BN = len(blocks), torch.tensor(blocks, dtype=torch.int64).to(device)
        self._constants = bool(sources), aligned, rows, _BLOCK, _COLUMNS
        self._kernel: KeptKernel | None = None
        """As it was compiled; None: not yet, or not for this device (the interpreter, a machine without a GPU)."""

    def check(self, pages_G: NDArray[np.integer[Any]], source_pages_G: NDArray[np.integer[Any]] | None) -> None:
        """Raise ValueError where a page lies outside, or there are other numbers of them."""
        check_pull_pages(pages_G, self._page_count, source_pages_G, self._source_count)

    def word_count(self, page_count: int) -> int:
        """Of the job of so many pages."""
        return page_count * (self.sums + 2) + 1

    def fill(
        self, words_N: NDArray[np.int64], pages_G: NDArray[np.integer[Any]], seed: int,
        source_pages_G: NDArray[np.integer[Any]] | None,
    ) -> None:  # fmt: skip
        """Write the job of pages that were checked, all `word_count` words of it: sums, zeros yet, the seed, pages,
        source pages."""
        count = len(pages_G)
        at = count * self.sums
        words_N[:at] = 0
        words_N[at] = seed
        words_N[at + 1 : at + 1 + count] = pages_G
        words_N[at + 1 + count :] = pages_G if source_pages_G is None else source_pages_G

    def launch(self, words_N: Tensor, page_count: int, stream: int | None = None) -> None:
        """Queue a job that is on the device, on a stream by its handle; None = the current one. Nothing waits. The
        kernel is the same whatever pages, and wherever their words lie."""
        if not page_count:
            return
        if self._kernel is not None:
            handle = current_stream(self._device.index) if stream is None else stream
            blocks, grid = self._blocks_BN.data_ptr(), (self._block_count, page_count, 1)
            self._kernel.launch(grid, handle, blocks, words_N.data_ptr(), page_count, self.sums)
            return
        values = self._blocks_BN, words_N, page_count, self.sums
        with nullcontext() if stream is None else _on(stream, self._device):
            compiled = _pull[(self._block_count, page_count)](*values, *self._constants, num_warps=_WARPS)
        self._kernel = keep(compiled, self._device)


def _on(stream: int, device: torch.device) -> AbstractContextManager[Any]:
    """That stream as torch's current one."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device))  # type: ignore[no-untyped-call]


def _blocks(
    own: Sequence[PoolLane], others: Sequence[PoolLane], sums: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], bool, bool]:
    """Of each block of a page: where it begins in page 0 and the distance of two pages, on both sides, in bytes; its
    words, its place and the number of its sum; the words of a row, and of the gaps between two rows, on both sides. And
    whether all words lie in pairs of 16 bytes, and whether any block has several rows."""
    numbers = [(lane.address, lane.sizes[-1], *lane.steps[:-1]) for lane in (*own, *others)]
    odd = [place for place in numbers if any(number % 8 for number in place)]
    if odd:
        raise ValueError(f"kernels: a lane lies at {odd[0]} (address, width, distances), expected multiples of 8")
    found: list[tuple[int, ...]] = []
    lanes, rows = zip(own, others, strict=True), False
    for which, lane_count in enumerate(sums):
        start = 0
        for _, (one, two) in zip(range(lane_count), lanes, strict=False):
            for at, there, count, width, gap, gap_there in _stretches(one, two):
                place = (one.address + at, one.steps[0], two.address + there, two.steps[0])
                found.append((*place, count * width // 8, start, which, width // 8, gap // 8, gap_there // 8))
                start += count * width // 8
                rows |= count > 1
    aligned = not any(number % 16 for place in numbers for number in place)
    return found, aligned, rows


def _stretches(own: PoolLane, other: PoolLane) -> Iterator[tuple[int, int, int, int, int, int]]:
    """What one program moves of a lane, again and again: where its first row begins on both sides, rows, bytes of each,
    gaps between them on both sides. Rows that touch on both sides are one."""
    *outer, width = own.sizes[1:]
    axes = [axis for axis in zip(outer, own.steps[1:-1], other.steps[1:-1], strict=True) if axis[0] > 1]
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


@_jit(do_not_specialize=["count", "each"], do_not_specialize_on_alignment=["blocks", "job"])
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
