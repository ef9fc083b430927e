"""Sums of one tensor over the ranks of a stage, each on a GPU of its own, through memory that all of them see.

One kernel a rank: each program puts its part into the rank's own memory, tells the others, waits until they have told
it, and adds the parts of all up in fp32, in the order of the ranks. So all ranks get the same bits, in every run, and a
recorded step replays it: what changes from sum to sum, the number of the round, lies on the device.

Two halves of the memory serve in turns: a rank begins a round when all have begun the one before it, and so have read
all of the round before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_REGION = 8192
"""Bytes of one program. By 4,096 a sum of 512 KB takes 7.2 us on two H200 instead of 5.7."""
_WARPS = 8
_BLOCKS_MAX = 1024
"""Programs of one sum of two ranks at most: 8 MB. A larger one is as fast by NCCL, and of more ranks each reads all."""
_HALF = _BLOCKS_MAX * _REGION
_TURN_S = 5e-7
"""Of one look for another rank, at least."""


def memory_bytes(ranks: int) -> int:
    """What each rank shares: two halves, and behind them a flag for each program and rank."""
    return 2 * _HALF + 8 * _BLOCKS_MAX * ranks


class PeerSum:
    """Adds up in place; one rank's end."""

    def __init__(self, memory: Tensor, addresses: Sequence[int], index: int, wait_s: float) -> None:
        """
        Args:
            memory: `memory_bytes` zeros of this rank.
            addresses: where those of all ranks, this one included, lie for this one.
            index: of this rank.
            wait_s: about so long another rank is waited for at least; then the device fails.
        """
        self._memory = memory  # kept
        self._addresses_N = torch.tensor(addresses, dtype=torch.int64).to(memory.device)
        self._rounds = torch.zeros(_BLOCKS_MAX, dtype=torch.int64, device=memory.device)
        self._index, self._turns = index, min(int(wait_s / _TURN_S), (1 << 31) - 1)

    def __call__(self, x: Tensor) -> bool:
        """Whether x, which is contiguous and of the same shape on all ranks, was added up: not where it is too large.
        Queued on the current stream. Cost: x is read and written once, and read once from each other rank."""
        count, block, ranks = x.numel(), _REGION // x.element_size(), len(self._addresses_N)
        blocks = -(-count // block)
        if not 0 < blocks <= _BLOCKS_MAX // (ranks - 1) or not x.dtype.is_floating_point or x.dtype is torch.float64:
            return False
        assert x.is_contiguous(), "kernels: a sum of a tensor with gaps, expected one without"
        _add_peers[(blocks,)](
            x, count, self._addresses_N, self._rounds, self._turns, INDEX=self._index, RANKS=ranks,
            BLOCK=block, EVEN=count % block == 0, num_warps=_WARPS,
        )  # fmt: skip
        return True


_jit: Any = triton.jit
_REGION_ = tl.constexpr(_REGION)
_HALF_ = tl.constexpr(_HALF)


@_jit(do_not_specialize=["count", "turns_max"])
def _add_peers(
    x, count, addresses, rounds, turns_max,
    INDEX: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    dtype: tl.constexpr = x.dtype.element_ty
    t = tl.arange(0, BLOCK)
    inside = block * BLOCK + t < count
    x += block * BLOCK
    number = tl.load(rounds + block) + 1
    place = (number % 2) * _HALF_ + block * _REGION_
    own = tl.load(addresses + INDEX)
    values = tl.load(x + t) if EVEN else tl.load(x + t, mask=inside, other=0.0)
    tl.store(tl.multiple_of((own + place).to(tl.pointer_type(dtype)), 16) + t, values)
    tl.debug_barrier()
    for other in tl.static_range(RANKS):
        if other != INDEX:
            flags = (tl.load(addresses + other) + 2 * _HALF_).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(flags + block * RANKS + INDEX, number, sem="release", scope="sys")
    for other in tl.static_range(RANKS):
        if other != INDEX:
            flag = (own + 2 * _HALF_).to(tl.pointer_type(tl.int64)) + block * RANKS + other
            turns = 0
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < number:
                turns += 1
                if turns == turns_max:
                    tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [turns], tl.int32, False, 1)
    tl.debug_barrier()
    total = tl.zeros((BLOCK,), tl.float32)
    for other in tl.static_range(RANKS):
        theirs = (tl.load(addresses + other) + place).to(tl.pointer_type(dtype))
        total += tl.load(tl.multiple_of(theirs, 16) + t, cache_modifier=".cv").to(tl.float32)
    if EVEN:
        tl.store(x + t, total.to(dtype))
    else:
        tl.store(x + t, total.to(dtype), mask=inside)
    tl.store(rounds + block, number)
