"""Words that ranks write into each other's memory, which the GPUs of all of them see.

Each program of a kernel writes its part into the memory of the others and waits until theirs has come into its own,
word by word: a word that has not come is `NOTHING`, a NaN that no rank writes. So there is neither a flag nor a fence,
and what is exchanged takes one way over the link. A recorded step replays it: what changes from call to call, the turn,
lies on the device.

Three regions of a program serve in turns. A rank empties the one of the call before while it waits in this one. The
others write there again in the next but one, for which they need its part of the next, and that is written by a kernel
that begins behind the end of this one. So each program waits for something of every other rank, also of those that it
gets nothing of. A program is known by its number: kernels of all kinds share the regions and their turns.

A kernel may have more programs than its GPU holds at once. They begin in the order of their numbers on each GPU, as
GPUs do it (CUDA does not promise it): so of those that wait, the first ones have their counterparts running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

REGION = 8192
"""Bytes of one program."""
REGIONS_MAX = 2048
"""Of one turn: 16 MB. With more ranks a program has one for each other rank."""
TURNS = 3
NOTHING = -1
"""All bits: what lies where nothing has come, in fp32 one NaN, in 16 bits two."""
NAN = 0x7FFFFFFF
"""What is written in its place."""
WORDS = REGION // 4
"""Of one program at most."""
_LOOK_S = 5e-7
"""Of one look for another rank's part, at least."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Of numbers that are added up."""


def exchange_memory(device: str) -> Tensor:
    """What a rank shares with the others, before the first call, [bytes]. Cost: 48 MB."""
    return torch.full((TURNS * REGIONS_MAX * REGION,), 0xFF, dtype=torch.uint8, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMemory:
    """The memory of all ranks, as one of them sees it."""

    own: Tensor
    """`exchange_memory` of this rank; kept."""
    addresses_N: Tensor
    """Where those of all ranks, this one included, lie for this one."""
    turns: Tensor
    """Of each program its turn, int32."""
    index: int
    """Of this rank among those of the stage."""
    looks: int
    """For another rank's part at most; then the device fails."""

    @staticmethod
    def of(memory: Tensor, addresses: Sequence[int], index: int, wait_s: float) -> PeerMemory:
        """`wait_s`: about so long another rank is waited for at least."""
        return PeerMemory(
            own=memory,
            addresses_N=torch.tensor(addresses, dtype=torch.int64).to(memory.device),
            turns=torch.zeros(REGIONS_MAX, dtype=torch.int32, device=memory.device),
            index=index,
            looks=min(int(wait_s / _LOOK_S), (1 << 31) - 1),
        )

    @property
    def ranks(self) -> int:
        return len(self.addresses_N)

    @property
    def told(self) -> tuple[Tensor, Tensor, int]:
        """What each kernel is given."""
        return self.addresses_N, self.turns, self.looks

    @property
    def programs(self) -> int:
        """Of one kernel at most."""
        return REGIONS_MAX // (self.ranks - 1)


_jit: Any = triton.jit
_NOTHING, _NAN, _TURNS = tl.constexpr(NOTHING), tl.constexpr(NAN), tl.constexpr(TURNS)
_TURN, _WORDS = tl.constexpr(REGIONS_MAX * REGION), tl.constexpr(WORDS)


@_jit
def region(memory, turn, program, source: tl.constexpr, owner: tl.constexpr, RANKS: tl.constexpr):
    """Where a rank's memory has the words of another one for a program."""
    other = source - 1 if source > owner else source
    at = memory + turn * _TURN + (program * (RANKS - 1) + other) * (_WORDS * 4)
    return tl.multiple_of(at.to(tl.pointer_type(tl.int32)), 16)


@_jit
def sendable(words):
    """The words as they are sent: none of them is `NOTHING`."""
    return tl.where(words == _NOTHING, _NAN, words)


@_jit
def empty_before(own, turn, program, INDEX: tl.constexpr, RANKS: tl.constexpr):
    """The regions of the call before."""
    for other in tl.static_range(RANKS):
        if other != INDEX:
            before = region(own, (turn + _TURNS - 1) % _TURNS, program, other, INDEX, RANKS)
            tl.store(before + tl.arange(0, _WORDS), tl.full((_WORDS,), _NOTHING, tl.int32))


@_jit
def come(place, looks_max):
    """The words there, once all have come."""
    words = tl.load(place, volatile=True)  # else Triton looks once
    looks = 0
    while tl.max((words == _NOTHING).to(tl.int32), 0) != 0:
        words = tl.load(place, volatile=True)
        looks += 1
        if looks == looks_max:
            tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [looks], tl.int32, False, 1)
    return words


@_jit
def end_turn(at, turn):
    """The next call has the next turn; all warps have read this one by now, also where each waited for itself."""
    tl.debug_barrier()
    tl.store(at, (turn + 1) % _TURNS)


@_jit
def _half(words, dtype: tl.constexpr):
    """The numbers in the low 16 bits of words, in fp32."""
    return words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@_jit
def bits_of(numbers, dtype: tl.constexpr):
    """Numbers in fp32 as 16 bits."""
    return numbers.to(dtype).to(tl.int16, bitcast=True)


@_jit
def word_of(low, high):
    """Twice 16 bits as a word."""
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@_jit
def add_words(
    words, own, turn, program, addresses, turns, looks_max, dtype: tl.constexpr,
    INDEX: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """A program's words, each of one number of 32 bits or two of 16, added up over the ranks in fp32 and in their
    order: all get the same bits. `own`, `turn`: this rank's memory, and the program's turn, which ends."""
    r = tl.arange(0, COUNT)
    words = sendable(words)
    for other in tl.static_range(RANKS):
        if other != INDEX:
            tl.store(region(tl.load(addresses + other), turn, program, INDEX, other, RANKS) + r, words)
    empty_before(own, turn, program, INDEX, RANKS)
    low, high = tl.zeros((COUNT,), tl.float32), tl.zeros((COUNT,), tl.float32)
    for other in tl.static_range(RANKS):
        part = words
        if other != INDEX:
            part = come(region(own, turn, program, other, INDEX, RANKS) + r, looks_max)
        if dtype == tl.float32:
            low += part.to(tl.float32, bitcast=True)
        else:
            low += _half(part, dtype)
            high += _half(part >> 16, dtype)
    end_turn(turns + program, turn)
    return low.to(tl.int32, bitcast=True) if dtype == tl.float32 else word_of(bits_of(low, dtype), bits_of(high, dtype))
