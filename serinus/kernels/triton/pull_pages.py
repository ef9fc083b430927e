"""Pages from one pool into another of the same device, with a sum over each, in one kernel; see the reference.

G = pages, P = pages of a pool, W = bytes of one page in one lane, L = lanes, B = blocks of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

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
_KEY_STEP = tl.constexpr(reference.KEY_STEP)
_MIX = tl.constexpr(reference.MIX)


@torch.inference_mode()
def pull_pages(
    lanes: Sequence[Tensor], pages_G: NDArray[np.int64], seed: int, sources: Sequence[Tensor] = (),
    source_pages_G: NDArray[np.int64] | None = None,
) -> Tensor:  # fmt: skip
    """Fill pages from those of another pool, with a sum of each; see the reference. Queued on the current stream."""
    check_pull(lanes, pages_G, sources, source_pages_G)
    device, count = lanes[0].device, len(pages_G)
    if not count:
        return torch.zeros(count, dtype=torch.int64, device=device)
    copies = source_pages_G is not None and len(sources) > 0
    blocks_B6, aligned = _blocks(_places(lanes), _places(sources if copies else lanes), device)
    zeros_G = np.zeros(count, np.int64)
    parts = (zeros_G, np.array([seed]), pages_G, source_pages_G if copies else pages_G)
    job = sent_ahead(torch.from_numpy(np.concatenate(parts, dtype=np.int64)), device)  # type: ignore[arg-type]
    sums_G = job[:count]
    _pull[(len(blocks_B6), count)](
        blocks_B6, job, count, COPIES=copies, ALIGNED=aligned, BLOCK=_BLOCK, num_warps=8
    )  # fmt: skip
    return sums_G


def _places(lanes: Sequence[Tensor]) -> tuple[tuple[int, int, int], ...]:
    """Address, distance of two rows and width of each lane, in bytes."""
    return tuple((lane.data_ptr(), lane.stride(0), lane.shape[1]) for lane in lanes)


@lru_cache(maxsize=64)
def _blocks(
    own: tuple[tuple[int, int, int], ...], others: tuple[tuple[int, int, int], ...], device: torch.device
) -> tuple[Tensor, bool]:
    """Of each block of a page: where it begins in page 0 and the distance of two pages, on both sides, in bytes; the
    words from there to the end of its lane, and its place in the page. And whether all words lie in pairs of 16 bytes.
    Copied once."""
    odd = [place for place in (*own, *others) if any(number % 8 for number in place)]
    if odd:
        raise ValueError(f"kernels: a lane lies at {odd[0]} (address, distance, width), expected multiples of 8")
    rows, start = [], 0
    for (address, step, width), (source, source_step, _) in zip(own, others, strict=True):
        for first in range(0, width, 8 * _BLOCK):
            rows.append((address + first, step, source + first, source_step, (width - first) // 8, start + first // 8))
        start += width // 8
    aligned = not any(number % 16 for place in (*own, *others) for number in place)
    return torch.tensor(rows, dtype=torch.int64).to(device), aligned


_jit: Any = triton.jit


@_jit(do_not_specialize=["count"])
def _pull(blocks, job, count, COPIES: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """In `job` come the sums, zeros yet, the seed, pages, source pages."""
    block, g, ids = blocks + tl.program_id(0) * 6, tl.program_id(1), job + count + 1
    seed, own_page, source_page = tl.load(job + count), tl.load(ids + g), tl.load(ids + count + g)
    own = (tl.load(block) + own_page * tl.load(block + 1)).to(tl.pointer_type(tl.int64))
    source = (tl.load(block + 2) + source_page * tl.load(block + 3)).to(tl.pointer_type(tl.int64))
    left, start = tl.load(block + 4), tl.load(block + 5)
    if ALIGNED:
        own, source, left = tl.multiple_of(own, 16), tl.multiple_of(source, 16), tl.multiple_of(left, 2)
    w = tl.arange(0, BLOCK)
    inside = w < left
    words = tl.load(source + w, mask=inside, other=0)
    if COPIES:
        tl.store(own + w, words, mask=inside)
    x = (words + seed + (start + w + 1) * _KEY_STEP).to(tl.uint64, bitcast=True)
    x ^= x >> 32
    x *= _MIX
    x ^= x >> 29
    x *= _MIX
    x ^= x >> 32
    x = tl.where(inside, x.to(tl.int64, bitcast=True), 0)
    tl.atomic_add(job + g, tl.sum(x, axis=0), sem="relaxed")
