"""Sums over the ranks of a stage, also as the end of a linear, and what one of them gathers or tells the others: one
kernel on each rank. Its programs exchange words (`peer_words.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.packed import PackedLinear
from serinus.kernels.triton.dependent import dependent, wait_for_earlier
from serinus.kernels.triton.linear import cut_for, multiply_rows, rows_of
from serinus.kernels.triton.peer_words import (
    DTYPES,
    WORDS,
    PeerMemory,
    add_words,
    come,
    empty_before,
    end_turn,
    region,
    sendable,
)
from serinus.kernels.triton.tickets import Tickets

_WARPS = 8
_SUM_MAX = 1024
"""Programs of a sum at most: 8 MB. A larger one is as fast by NCCL."""
_TOLD = 32
"""Words that a rank is sent where it gets nothing of the sender: a warp looks at them at once."""


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
        self._peers = PeerMemory.of(memory, addresses, index, wait_s)
        self._tickets = Tickets().on(memory.device)

    def linear_all_reduce(self, x_TI: Tensor, packed: PackedLinear) -> Tensor | None:
        """The products of all ranks added up by the kernel that makes them, [T, O], bit for bit as by `linear` and
        `all_reduce`; None: nothing is done, as there is no such kernel for the shape. The ranks' weights have the same
        shape. Queued on the current stream. Cost: that of `linear`; its output is written to each other rank too."""
        cut = cut_for(x_TI, packed, is_gated=False)
        if cut is None or x_TI.dim() != 2 or cut.outputs * rows_of(len(x_TI), cut) > 2 * WORDS:
            return None
        if packed.out_size // cut.outputs > self._peers.programs:
            return None
        return multiply_rows(x_TI, packed, cut, None, self._tickets, self._peers)

    def all_reduce(self, x: Tensor) -> bool:
        """Whether x, which is contiguous, was added up, in place: not where it is too large, or no whole number of 4
        bytes. Queued on the current stream. Cost: x is read and written once, and written once to each other rank."""
        count, rest = divmod(x.numel() * x.element_size(), 4)
        programs = -(-count // WORDS)
        if rest or not 0 < programs <= _SUM_MAX // (self._peers.ranks - 1) or x.dtype not in DTYPES:
            return False
        assert x.is_contiguous(), "kernels: a sum of a tensor with gaps, expected one without"
        _add[(programs,)](
            x.view(-1).view(torch.int32), count, *self._peers.told, dtype=DTYPES[x.dtype], INDEX=self._peers.index,
            RANKS=self._peers.ranks, BLOCK=WORDS, EVEN=count % WORDS == 0, num_warps=_WARPS, **dependent(x.device),
        )  # fmt: skip
        return True

    def gathers(self, x: Tensor) -> bool:
        """Whether `gather_last` takes such an x: rows of a whole number of 4 bytes, and of 16 MB for all at most."""
        width = x.shape[-1] * x.element_size()
        return x.numel() > 0 and width % 4 == 0 and width <= self._peers.programs * WORDS * 4 and x.dtype in DTYPES

    def gather_last(self, x: Tensor) -> Tensor | None:
        """The x of all ranks side by side along the last dimension, on rank 0; None on the others. Queued on the
        current stream. Cost: x is read and written once, on rank 0 those of the others too; a kernel for each 16 MB."""
        index, ranks = self._peers.index, self._peers.ranks
        words_TW = x.contiguous().view(-1, x.shape[-1]).view(torch.int32)
        rows, width = words_TW.shape
        out = words_TW.new_empty((rows, ranks * width)) if index == 0 else words_TW
        chunks = -(-width // WORDS)
        piece = self._peers.programs // chunks
        for first in range(0, rows, piece):
            _gather[(chunks, min(piece, rows - first))](
                words_TW[first:], out[first:], *self._peers.told, WIDTH=width, INDEX=index, RANKS=ranks, BLOCK=WORDS,
                TOLD=_TOLD, num_warps=_WARPS, **dependent(x.device),
            )  # fmt: skip
        return out.view(x.dtype).view(*x.shape[:-1], -1) if index == 0 else None

    def broadcast(self, x: Tensor) -> bool:
        """Whether x, which is contiguous and of any type of 2 bytes or more, became that of rank 0: not where it is too
        large. Queued on the current stream. Cost: 4 bytes to each other rank for each 2 of x."""
        count = x.numel() * x.element_size() // 2
        programs = -(-count // WORDS)
        if x.element_size() < 2 or not 0 < programs <= self._peers.programs:
            return False
        assert x.is_contiguous(), "kernels: a broadcast of a tensor with gaps, expected one without"
        _tell[(programs,)](
            x.view(-1).view(torch.int16), count, *self._peers.told, INDEX=self._peers.index, RANKS=self._peers.ranks,
            BLOCK=WORDS, TOLD=_TOLD, num_warps=_WARPS, **dependent(x.device),
        )  # fmt: skip
        return True


_jit: Any = triton.jit


@_jit(do_not_specialize=["count", "looks_max"])
def _add(
    x, count, addresses, turns, looks_max, dtype: tl.constexpr,
    INDEX: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    w = program * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(addresses + INDEX)
    wait_for_earlier(DEPENDENT)
    turn = tl.load(turns + program)
    words = tl.load(x + w) if EVEN else tl.load(x + w, mask=w < count, other=0)
    total = add_words(words, own, turn, program, addresses, turns, looks_max, dtype, INDEX, RANKS, BLOCK)
    if EVEN:
        tl.store(x + w, total)
    else:
        tl.store(x + w, total, mask=w < count)


@_jit(do_not_specialize=["looks_max"])
def _gather(
    x, out, addresses, turns, looks_max, WIDTH: tl.constexpr,
    INDEX: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, TOLD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row, r, t = tl.program_id(1), tl.arange(0, BLOCK), tl.arange(0, TOLD)
    w = tl.program_id(0) * BLOCK + r
    program = row * tl.num_programs(0) + tl.program_id(0)
    own = tl.load(addresses + INDEX)
    wait_for_earlier(DEPENDENT)
    turn = tl.load(turns + program)
    words = tl.load(x + row.to(tl.int64) * WIDTH + w, mask=w < WIDTH, other=0)
    for other in tl.static_range(RANKS):
        if other != INDEX:
            place = region(tl.load(addresses + other), turn, program, INDEX, other, RANKS)
            if other == 0:
                tl.store(place + r, sendable(words))
            else:
                tl.store(place + t, tl.zeros((TOLD,), tl.int32))
    empty_before(own, turn, program, INDEX, RANKS)
    if INDEX == 0:
        out += row.to(tl.int64) * (RANKS * WIDTH) + w
        tl.store(out, words, mask=w < WIDTH)
    for other in tl.static_range(RANKS):
        if other != INDEX:
            place = region(own, turn, program, other, INDEX, RANKS)
            if INDEX == 0:
                tl.store(out + other * WIDTH, come(place + r, looks_max), mask=w < WIDTH)
            else:
                come(place + t, looks_max)
    end_turn(turns + program, turn)


@_jit(do_not_specialize=["count", "looks_max"])
def _tell(
    x, count, addresses, turns, looks_max,
    INDEX: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, TOLD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A word for each 16 bits: no word is `NOTHING`, whatever is told."""
    program, r, t = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, TOLD)
    w = program * BLOCK + r
    own = tl.load(addresses + INDEX)
    wait_for_earlier(DEPENDENT)
    turn = tl.load(turns + program)
    for other in tl.static_range(RANKS):
        if other != INDEX:
            place = region(tl.load(addresses + other), turn, program, INDEX, other, RANKS)
            if INDEX == 0:
                tl.store(place + r, tl.load(x + w, mask=w < count, other=0).to(tl.int32) & 0xFFFF)
            else:
                tl.store(place + t, tl.zeros((TOLD,), tl.int32))
    empty_before(own, turn, program, INDEX, RANKS)
    for other in tl.static_range(RANKS):
        if other != INDEX:
            place = region(own, turn, program, other, INDEX, RANKS)
            if other == 0:
                tl.store(x + w, come(place + r, looks_max).to(tl.int16), mask=w < count)
            else:
                come(place + t, looks_max)
    end_turn(turns + program, turn)
