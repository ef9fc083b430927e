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
from serinus.kernels.triton.pinned import sent

_BLOCK = 1024
"""Words of one program: 8 KB. On an H200 a pull of pages of 2.4 MB by 512, 1,024, 2,048 and 4,096 words moves 1,250,
1,423, 917 and 818 GB/s (4,096 by 8 warps), a plain copy 2,077."""
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
    sums_G = torch.zeros(count, dtype=torch.int64, device=device)
    if not count:
        return sums_G
    copies = source_pages_G is not None and len(sources) > 0
    table_6L, blocks_2B = _table(_places(lanes), _places(sources if copies else lanes), device)
    parts = (np.array([seed]), pages_G, source_pages_G if copies else pages_G)
    job = sent(torch.from_numpy(np.concatenate(parts, dtype=np.int64)), device)  # type: ignore[arg-type]
    blocks = blocks_2B.shape[1]
    _pull[(count, blocks)](
        table_6L, len(lanes), blocks_2B, blocks, job, count, sums_G, COPIES=copies, BLOCK=_BLOCK
    )  # fmt: skip
    return sums_G


def _places(lanes: Sequence[Tensor]) -> tuple[tuple[int, int, int], ...]:
    """Address, distance of two rows and width of each lane, in bytes."""
    return tuple((lane.data_ptr(), lane.stride(0), lane.shape[1]) for lane in lanes)


@lru_cache(maxsize=64)
def _table(
    own: tuple[tuple[int, int, int], ...], others: tuple[tuple[int, int, int], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Both sides' addresses and distances, widths, and the places of lanes in a page, in words; and of each block its
    lane, and where it begins in it. Copied once."""
    odd = [place for place in (*own, *others) if any(number % 8 for number in place)]
    if odd:
        raise ValueError(f"kernels: a lane lies at {odd[0]} (address, distance, width), expected multiples of 8")
    widths = [width // 8 for _, _, width in own]
    starts = [sum(widths[:i]) for i in range(len(widths))]
    columns = [[address for address, _, _ in own], [step // 8 for _, step, _ in own]]
    columns += [[address for address, _, _ in others], [step // 8 for _, step, _ in others], widths, starts]
    blocks = [(lane, first) for lane, width in enumerate(widths) for first in range(0, width, _BLOCK)]
    found = (torch.tensor(rows, dtype=torch.int64) for rows in (columns, list(zip(*blocks, strict=True))))
    table_6L, blocks_2B = (rows.to(device) for rows in found)
    return table_6L, blocks_2B


_jit: Any = triton.jit


@_jit(do_not_specialize=["lanes", "block_count", "count"])
def _pull(
    table, lanes, blocks, block_count, job, count, sums, COPIES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The seed is the first number of `job`, then come pages, then source pages."""
    g, block = tl.program_id(0), tl.program_id(1)
    lane = tl.load(blocks + block)
    seed, own_page, source_page = tl.load(job), tl.load(job + 1 + g), tl.load(job + 1 + count + g)
    width, start = tl.load(table + 4 * lanes + lane), tl.load(table + 5 * lanes + lane)
    w = tl.load(blocks + block_count + block) + tl.arange(0, BLOCK)
    inside = w < width
    own = tl.load(table + lane).to(tl.pointer_type(tl.int64)) + own_page * tl.load(table + lanes + lane) + w
    if COPIES:
        source = tl.load(table + 2 * lanes + lane).to(tl.pointer_type(tl.int64))
        words = tl.load(source + source_page * tl.load(table + 3 * lanes + lane) + w, mask=inside, other=0)
        tl.store(own, words, mask=inside)
    else:
        words = tl.load(own, mask=inside, other=0)
    x = (words + seed + (start + w + 1) * _KEY_STEP).to(tl.uint64, bitcast=True)
    x ^= x >> 32
    x *= _MIX
    x ^= x >> 29
    x *= _MIX
    x ^= x >> 32
    x = tl.where(inside, x.to(tl.int64, bitcast=True), 0)
    tl.atomic_add(sums + g, tl.sum(x, axis=0), sem="relaxed")
