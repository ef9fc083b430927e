"""Sums over the ranks of a stage, and what one of them gathers or tells the others, through memory that the GPUs of all
of them see.

One kernel a rank: each program writes its part into the memory of the others and waits until theirs has come into its
own, word by word: a word that has not come is `_NOTHING`, a NaN that no rank writes. So there is neither a flag nor a
fence, and what is exchanged takes one way over the link. Sums are made in fp32, in the order of the ranks: all ranks
get the same bits, in every run. A recorded step replays it: what changes from call to call, the turn, lies on the
device.

Three regions of a program serve in turns. A rank empties the one of the call before while it waits in this one. The
others write there again in the next but one, for which they need its part of the next, and that is written by a kernel
that begins behind the end of this one. So each program waits for something of every other rank, also of those that it
gets nothing of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.triton.dependent import dependent, wait_for_earlier

_REGION = 8192
"""Bytes of one program."""
_WARPS = 8
_REGIONS_MAX = 2048
"""Of one turn: 16 MB. With more ranks a program has one for each other rank."""
_SUM_MAX = 1024
"""Regions of a sum at most: 8 MB. A larger one is as fast by NCCL."""
_TURNS = 3
_NOTHING = -1
"""All bits: what lies where nothing has come, in fp32 one NaN, in 16 bits two."""
_NAN = 0x7FFFFFFF
"""What is written in its place."""
_TOLD = 32
"""Words that a rank is sent where it gets nothing of the sender: a warp looks at them at once."""
_LOOK_S = 5e-7
"""Of one look for another rank's part, at least."""
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def exchange_memory(device: str) -> Tensor:
    """What a rank shares with the others, before the first call, [bytes]. Cost: 48 MB."""
    return torch.full((_TURNS * _REGIONS_MAX * _REGION,), 0xFF, dtype=torch.uint8, device=device)


class PeerExchange:
    """One rank's end. All ranks make the same calls, of tensors of the same shapes, in the same order."""

    def __init__(self, memory: Tensor, addresses: Sequence[int], index: int, wait_s: float) -> None:
        """
        Args:
            memory: `exchange_memory` of this rank.
            addresses: where those of all ranks, this one included, lie for this one.
            index: of this rank.
            wait_s: about so long another rank is waited for at least; then the device fails.
        """
        self._memory = memory  # kept
        self._addresses_N = torch.tensor(addresses, dtype=torch.int64).to(memory.device)
        self._turns = torch.zeros(_REGIONS_MAX, dtype=torch.int32, device=memory.device)
        self._piece = _REGIONS_MAX // (len(addresses) - 1)
        """Programs of one kernel at most."""
        self._index, self._looks = index, min(int(wait_s / _LOOK_S), (1 << 31) - 1)

    def all_reduce(self, x: Tensor) -> bool:
        """Whether x, which is contiguous, was added up, in place: not where it is too large, or no whole number of 4
        bytes. Queued on the current stream. Cost: x is read and written once, and written once to each other rank."""
        ranks, (count, rest), block = len(self._addresses_N), divmod(x.numel() * x.element_size(), 4), _REGION // 4
        blocks = -(-count // block)
        if rest or not 0 < blocks <= _SUM_MAX // (ranks - 1) or x.dtype not in _DTYPES:
            return False
        assert x.is_contiguous(), "kernels: a sum of a tensor with gaps, expected one without"
        _add[(blocks,)](
            x.view(-1).view(torch.int32), count, self._addresses_N, self._turns, self._looks, dtype=_DTYPES[x.dtype],
            INDEX=self._index, RANKS=ranks, BLOCK=block, EVEN=count % block == 0, num_warps=_WARPS,
            **dependent(x.device),
        )  # fmt: skip
        return True

    def gathers(self, x: Tensor) -> bool:
        """Whether `gather_last` takes such an x: rows of a whole number of 4 bytes, and of 16 MB for all at most."""
        width = x.shape[-1] * x.element_size()
        return x.numel() > 0 and width % 4 == 0 and width <= self._piece * _REGION and x.dtype in _DTYPES

    def gather_last(self, x: Tensor) -> Tensor | None:
        """The x of all ranks side by side along the last dimension, on rank 0; None on the others. Queued on the
        current stream. Cost: x is read and written once, on rank 0 those of the others too; a kernel for each 16 MB."""
        ranks, block = len(self._addresses_N), _REGION // 4
        words_TW = x.contiguous().view(-1, x.shape[-1]).view(torch.int32)
        rows, width = words_TW.shape
        out = words_TW.new_empty((rows, ranks * width)) if self._index == 0 else words_TW
        chunks = -(-width // block)
        piece = self._piece // chunks
        for first in range(0, rows, piece):
            _gather[(chunks, min(piece, rows - first))](
                words_TW[first:], out[first:], self._addresses_N, self._turns, self._looks, WIDTH=width,
                INDEX=self._index, RANKS=ranks, BLOCK=block, TOLD=_TOLD, num_warps=_WARPS, **dependent(x.device),
            )  # fmt: skip
        return out.view(x.dtype).view(*x.shape[:-1], -1) if self._index == 0 else None

    def broadcast(self, x: Tensor) -> bool:
        """Whether x, which is contiguous and of any type of 2 bytes or more, became that of rank 0: not where it is too
        large. Queued on the current stream. Cost: 4 bytes to each other rank for each 2 of x."""
        count, block = x.numel() * x.element_size() // 2, _REGION // 4
        blocks = -(-count // block)
        if x.element_size() < 2 or not 0 < blocks <= self._piece:
            return False
        assert x.is_contiguous(), "kernels: a broadcast of a tensor with gaps, expected one without"
        _tell[(blocks,)](
            x.view(-1).view(torch.int16), count, self._addresses_N, self._turns, self._looks, INDEX=self._index,
            RANKS=len(self._addresses_N), BLOCK=block, TOLD=_TOLD, num_warps=_WARPS, **dependent(x.device),
        )  # fmt: skip
        return True


_jit: Any = triton.jit
_NOTHING_, _NAN_, _TURNS_ = tl.constexpr(_NOTHING), tl.constexpr(_NAN), tl.constexpr(_TURNS)
_TURN_ = tl.constexpr(_REGIONS_MAX * _REGION)


@_jit
def _region(
    memory, turn, block, source: tl.constexpr, owner: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Where a rank's memory has the words of another one for a program."""
    other = source - 1 if source > owner else source
    at = memory + turn * _TURN_ + (block * (RANKS - 1) + other) * (BLOCK * 4)
    return tl.multiple_of(at.to(tl.pointer_type(tl.int32)), 16)


@_jit
def _sendable(words):
    return tl.where(words == _NOTHING_, _NAN_, words)


@_jit
def _empty_before(own, turn, block, INDEX: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """The regions of the call before."""
    for other in tl.static_range(RANKS):
        if other != INDEX:
            before = _region(own, (turn + _TURNS_ - 1) % _TURNS_, block, other, INDEX, RANKS, BLOCK)
            tl.store(before + tl.arange(0, BLOCK), tl.full((BLOCK,), _NOTHING_, tl.int32))


@_jit
def _come(place, looks_max):
    """The words there, once all have come."""
    words = tl.load(place, volatile=True)  # else Triton looks once
    looks = 0
    while tl.max((words == _NOTHING_).to(tl.int32), 0) != 0:
        words = tl.load(place, volatile=True)
        looks += 1
        if looks == looks_max:
            tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [looks], tl.int32, False, 1)
    return words


@_jit
def _half(words, dtype: tl.constexpr):
    """The numbers in the low 16 bits of words, in fp32."""
    return words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@_jit
def _bits(numbers, dtype: tl.constexpr):
    """Numbers in fp32 as 16 bits, the low ones of a word."""
    return numbers.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@_jit
def _end(at, turn):
    """The next call has the next turn; all warps have read this one by now, also where each waited for itself."""
    tl.debug_barrier()
    tl.store(at, (turn + 1) % _TURNS_)


@_jit(do_not_specialize=["count", "looks_max"])
def _add(
    x, count, addresses, turns, looks_max, dtype: tl.constexpr,
    INDEX: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    block, r = tl.program_id(0), tl.arange(0, BLOCK)
    w = block * BLOCK + r
    own = tl.load(addresses + INDEX)
    wait_for_earlier(DEPENDENT)
    turn = tl.load(turns + block)
    words = _sendable(tl.load(x + w) if EVEN else tl.load(x + w, mask=w < count, other=0))
    for other in tl.static_range(RANKS):
        if other != INDEX:
            tl.store(_region(tl.load(addresses + other), turn, block, INDEX, other, RANKS, BLOCK) + r, words)
    _empty_before(own, turn, block, INDEX, RANKS, BLOCK)
    low, high = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for other in tl.static_range(RANKS):
        part = words
        if other != INDEX:
            part = _come(_region(own, turn, block, other, INDEX, RANKS, BLOCK) + r, looks_max)
        if dtype == tl.float32:
            low += part.to(tl.float32, bitcast=True)
        else:
            low += _half(part, dtype)
            high += _half(part >> 16, dtype)
    total = low.to(tl.int32, bitcast=True) if dtype == tl.float32 else _bits(low, dtype) | (_bits(high, dtype) << 16)
    if EVEN:
        tl.store(x + w, total)
    else:
        tl.store(x + w, total, mask=w < count)
    _end(turns + block, turn)


@_jit(do_not_specialize=["looks_max"])
def _gather(
    x, out, addresses, turns, looks_max, WIDTH: tl.constexpr,
    INDEX: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, TOLD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row, r, t = tl.program_id(1), tl.arange(0, BLOCK), tl.arange(0, TOLD)
    w = tl.program_id(0) * BLOCK + r
    block = row * tl.num_programs(0) + tl.program_id(0)
    own = tl.load(addresses + INDEX)
    wait_for_earlier(DEPENDENT)
    turn = tl.load(turns + block)
    words = tl.load(x + row.to(tl.int64) * WIDTH + w, mask=w < WIDTH, other=0)
    for other in tl.static_range(RANKS):
        if other != INDEX:
            place = _region(tl.load(addresses + other), turn, block, INDEX, other, RANKS, BLOCK)
            if other == 0:
                tl.store(place + r, _sendable(words))
            else:
                tl.store(place + t, tl.zeros((TOLD,), tl.int32))
    _empty_before(own, turn, block, INDEX, RANKS, BLOCK)
    if INDEX == 0:
        out += row.to(tl.int64) * (RANKS * WIDTH) + w
        tl.store(out, words, mask=w < WIDTH)
    for other in tl.static_range(RANKS):
        if other != INDEX:
            place = _region(own, turn, block, other, INDEX, RANKS, BLOCK)
            if INDEX == 0:
                tl.store(out + other * WIDTH, _come(place + r, looks_max), mask=w < WIDTH)
            else:
                _come(place + t, looks_max)
    _end(turns + block, turn)


@_jit(do_not_specialize=["count", "looks_max"])
def _tell(
    x, count, addresses, turns, looks_max,
    INDEX: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, TOLD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A word for each 16 bits: no word is `_NOTHING`, whatever is told."""
    block, r, t = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, TOLD)
    w = block * BLOCK + r
    own = tl.load(addresses + INDEX)
    wait_for_earlier(DEPENDENT)
    turn = tl.load(turns + block)
    for other in tl.static_range(RANKS):
        if other != INDEX:
            place = _region(tl.load(addresses + other), turn, block, INDEX, other, RANKS, BLOCK)
            if INDEX == 0:
                tl.store(place + r, tl.load(x + w, mask=w < count, other=0).to(tl.int32) & 0xFFFF)
            else:
                tl.store(place + t, tl.zeros((TOLD,), tl.int32))
    _empty_before(own, turn, block, INDEX, RANKS, BLOCK)
    for other in tl.static_range(RANKS):
        if other != INDEX:
            place = _region(own, turn, block, other, INDEX, RANKS, BLOCK)
            if other == 0:
                tl.store(x + w, _come(place + r, looks_max).to(tl.int16), mask=w < count)
            else:
                _come(place + t, looks_max)
    _end(turns + block, turn)
