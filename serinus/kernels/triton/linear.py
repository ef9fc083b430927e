"""The linear layer, and the gate that may follow it: a kernel of its own up to 64 rows of 16 bits, cuBLAS above; see
the references of `linear` and `norm_linear`.

Up to 64 rows a linear is one read of its weight. How the weight is cut is a table by shape, measured
(benchmarks/gpu_kernels.py): few rows go to the narrow side of the product; for more the weight comes through the bulk
copy engine, to one program on each multiprocessor where that reaches.
Where the output is too narrow to fill the GPU, the inner dimension is cut too: the last program adds the partial sums
in their order, so that equal inputs give equal bits. T = tokens, I = input width, O = output width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from serinus.kernels.contracts import Gate
from serinus.kernels.packed import PackedLinear
from serinus.kernels.quantized import QuantizedWeight
from serinus.kernels.ref.linear import pack_linear as pack_plain
from serinus.kernels.triton.dependent import dependent, wait_for_earlier
from serinus.kernels.triton.gates import GATES, gated
from serinus.kernels.triton.peer_words import WORDS, PeerMemory, add_words, bits_of, word_of
from serinus.kernels.triton.quantized import multiply_quantized, pack_quantized
from serinus.kernels.triton.tickets import TICKETS, Tickets

_ROWS_MAX, _FEW = 64, 16
"""Rows that are multiplied here at most; and up to which they are the narrow side of the product."""
_PROGRAMS = 132
"""Multiprocessors of an H100 and an H200."""
_AHEAD_BYTES = 192 << 10
"""What a program that has one for itself loads ahead."""
_LEAST_OUT = 3072
"""Outputs that up to 32 rows are multiplied here for at least."""
_HEAD_OUT = 1 << 16
"""From so many outputs on it is an output head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCut:
    """How the weight is cut."""

    outputs: int
    """Outputs of one program."""
    inner: int
    """Inputs of one block."""
    parts: int = 1
    """Into which the inner dimension is cut."""
    warps: int = 4
    """Warps of one program."""
    stages: int = 4
    """Blocks that are loaded ahead."""
    swapped: bool = False
    """Whether the weight is the left factor: for few rows."""
    bulk: bool = False
    """Whether blocks come through the bulk copy engine."""

    def fits(self, out_size: int, in_size: int) -> bool:
        """Whether the sizes are whole multiples."""
        tiles = out_size // self.outputs
        return out_size % self.outputs == 0 and in_size % (self.inner * self.parts) == 0 and tiles <= TICKETS


def cut_of(rows: int, out_size: int, in_size: int, dtype: torch.dtype, *, is_gated: bool) -> WeightCut | None:
    """How a weight is cut for so many rows; None = cuBLAS computes it. `out_size`: of gate and up where it is gated."""
    if dtype is torch.float32 or not 0 < rows <= _ROWS_MAX:
        return None
    few, wide = rows <= _FEW, out_size >= _HEAD_OUT
    cut: WeightCut | None
    if is_gated:
        out_size //= 2
        is_round = few and _PROGRAMS // 2 < out_size // 64 <= _PROGRAMS
        cut = WeightCut(outputs=64, inner=128, swapped=True) if is_round else _whole(rows, out_size, in_size, factors=2)
    elif wide:
        if rows == 1:
            cut = WeightCut(outputs=64, inner=256, swapped=True)
        elif few:
            cut = WeightCut(outputs=16, inner=256, warps=2, stages=5, swapped=True)
        else:
            cut = WeightCut(outputs=128, inner=128, warps=8, stages=3, swapped=True, bulk=True)
    elif few:
        cut = _parted(out_size, in_size)
    else:
        least = _LEAST_OUT if rows <= 32 else 0
        is_own = least <= out_size <= 64 * _PROGRAMS and in_size < 4 * out_size
        cut = _whole(rows, out_size, in_size) if is_own else None  # cuBLAS is as fast there, or faster
    return cut if cut is not None and cut.fits(out_size, in_size) else None


def _parted(out_size: int, in_size: int) -> WeightCut:
    """Few rows: the inner dimension in as many parts as make one round of programs; where that leaves a third of the
    multiprocessors idle, in as many as make three to each, which load half as much ahead."""
    tiles = out_size // 64
    whole, thrice = (_parts(tiles, in_size, rounds * _PROGRAMS) for rounds in (1, 3))
    is_one = thrice == whole or _PROGRAMS * 2 // 3 <= tiles * whole <= _PROGRAMS
    parts, stages = (whole, 6) if is_one else (thrice, 3)
    return WeightCut(outputs=64, inner=128, parts=parts, stages=stages, swapped=True)


def _parts(tiles: int, in_size: int, programs: int) -> int:
    """As many parts of a long enough input as make no more than so many programs."""
    found = [parts for parts in (4, 2) if tiles * parts <= programs and in_size % (128 * parts) == 0]
    return found[0] if found and in_size > 1024 else 1


def _whole(rows: int, out_size: int, in_size: int, factors: int = 1) -> WeightCut:
    """Programs that have a multiprocessor each, and all of its shared memory for what they load ahead: one round of
    them, where 64 outputs of each are enough. `factors`: weights that share an input."""
    swapped = rows <= 32  # a matrix unit takes 64 rows of the left factor
    outputs, inner = 32 if out_size <= 32 * _PROGRAMS and not swapped else 64, 64 if in_size % 128 else 128
    if outputs == 32 and factors == 1 and in_size % 256 == 0:
        inner = 256  # half as many turns, of which each waits for its products
    stage = (outputs * factors + (_FEW if rows <= _FEW else 32 if swapped else 64)) * inner * 2
    return WeightCut(outputs=outputs, inner=inner, stages=_AHEAD_BYTES // stage, swapped=swapped, bulk=True)


def cut_for(x_TI: Tensor, packed: PackedLinear, *, is_gated: bool) -> WeightCut | None:
    """How this weight is cut for these rows; None = it is not multiplied by the kernel of few rows."""
    if packed.rows is not None or packed.blocked or not packed.weight.is_contiguous():
        return None
    return cut_of(x_TI.numel() // packed.in_size, packed.out_size, packed.in_size, x_TI.dtype, is_gated=is_gated)


def rows_of(rows: int, cut: WeightCut) -> int:
    """Rows of one program, filled up to what a matrix unit takes."""
    return _FEW if rows <= _FEW else int(triton.next_power_of_2(rows)) if cut.swapped else _ROWS_MAX


def pack_linear(weight: Tensor | QuantizedWeight, bias_O: Tensor | None) -> PackedLinear:
    """A plain weight as it is, a quantized one as its kernel reads it. Raises ValueError: shapes disagree, or groups
    are too small."""
    plain = pack_plain(weight, bias_O)
    return pack_quantized(weight, bias_O) if isinstance(weight, QuantizedWeight) else plain


def new_linear() -> Linear:
    """The op, with tickets of its own."""
    return Linear()


class Linear:
    """x @ weight.T + bias; with a gate its activation behind."""

    def __init__(self) -> None:
        self._tickets = Tickets()

    def __call__(self, x_TI: Tensor, packed: PackedLinear) -> Tensor:
        """As the reference. Cost: one read of the weight, of x and one write of the output; no host wait."""
        if packed.rows is not None:
            return multiply_quantized(x_TI, packed, packed.rows, self._tickets.on(x_TI.device))
        cut = cut_for(x_TI, packed, is_gated=False)
        if cut is None:
            return _plain(x_TI, packed)
        rows_TI = x_TI.reshape(-1, packed.in_size)
        out_TO = multiply_rows(rows_TI, packed, cut, None, self._tickets.on(x_TI.device))
        return out_TO.view(*x_TI.shape[:-1], packed.out_size)

    def gated(self, x_TI: Tensor, packed: PackedLinear, gate: Gate) -> Tensor | None:
        """The same and the activation in one kernel, [T, O / 2]; None where there is none for this shape."""
        cut = cut_for(x_TI, packed, is_gated=True)
        return None if cut is None else multiply_rows(x_TI, packed, cut, gate, self._tickets.on(x_TI.device))

    def joined(self, x_TI: Tensor, packed: PackedLinear, residual_TO: Tensor) -> bool:
        """Add the product to the stream by cuBLAS, which reads it there; False: nothing is done, as there are few rows
        or a weight of another kind. Cost: one read and one write of the stream less than by two ops."""
        is_own = packed.rows is not None or packed.blocked or packed.bias_O is not None
        if is_own or x_TI.dim() != 2 or len(x_TI) <= _ROWS_MAX or x_TI.dtype is torch.float32:
            return False
        residual_TO.addmm_(x_TI, packed.weight.t())
        return True


def _plain(x_TI: Tensor, packed: PackedLinear) -> Tensor:
    if packed.blocked:
        raise ValueError("kernels: linear of column triton got a blocked weight, expected one packed by its column")
    return F.linear(x_TI, packed.weight, packed.bias_O)


def multiply_rows(
    x_TI: Tensor, packed: PackedLinear, cut: WeightCut, gate: Gate | None, tickets: Tensor,
    peers: PeerMemory | None = None,
) -> Tensor:  # fmt: skip
    """The product of at most 64 rows, cut so: [T, O], or [T, O / 2] with a gate; with peers the sum of those of all
    ranks, in 16 bits. The sizes must be whole multiples."""
    x_TI = x_TI.contiguous()
    rows, inner = x_TI.shape
    out_size = packed.out_size // (1 if gate is None else 2)
    out_TO = x_TI.new_empty((rows, out_size))
    block = rows_of(rows, cut)
    stage = (cut.outputs * packed.out_size // out_size + block) * cut.inner * x_TI.element_size()
    partial = out_TO
    if cut.parts > 1:
        partial = torch.empty((cut.parts, rows, out_size), dtype=torch.float32, device=x_TI.device)
    assert peers is None or block * cut.outputs <= 2 * WORDS, f"kernels: a sum of {rows} rows by {cut}"
    told = (tickets, tickets, 0) if peers is None else peers.told
    left, right = x_TI, packed.weight
    if cut.bulk:
        left = TensorDescriptor(x_TI, [rows, inner], [inner, 1], [block, cut.inner])
        right = TensorDescriptor(right, [packed.out_size, inner], [inner, 1], [cut.outputs, cut.inner])
    _rows[(out_size // cut.outputs, cut.parts)](
        left, right, x_TI if packed.bias_O is None else packed.bias_O, out_TO, partial, tickets, rows, out_size, *told,
        INNER=inner, ROWS=block, OUTPUTS=cut.outputs, BLOCK=cut.inner, PARTS=cut.parts, GATE=GATES[gate],
        HAS_BIAS=packed.bias_O is not None, SWAPPED=cut.swapped, BULK=cut.bulk,
        INDEX=0 if peers is None else peers.index, RANKS=1 if peers is None else peers.ranks, num_warps=cut.warps,
        num_stages=min(cut.stages, _shared_bytes() // stage), **dependent(x_TI.device),
    )  # fmt: skip
    return out_TO


@lru_cache(maxsize=1)
def _shared_bytes() -> int:
    """Of a multiprocessor, for what a program loads ahead. Source: CUDA's table of compute capabilities."""
    is_cuda = not triton.knobs.runtime.interpret
    arch = triton.runtime.driver.active.get_current_target().arch if is_cuda else 90
    return {80: 160, 87: 160, 90: 224, 100: 224, 103: 224}.get(arch, 96) << 10


_jit: Any = triton.jit


@_jit(do_not_specialize=["rows", "looks_max"])
def _rows(
    x, weight, bias, out, partial, tickets, rows, outs, addresses, turns, looks_max,
    INNER: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    GATE: tl.constexpr, HAS_BIAS: tl.constexpr, SWAPPED: tl.constexpr, BULK: tl.constexpr,
    INDEX: tl.constexpr, RANKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    o, t, i = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS), tl.arange(0, BLOCK)
    EACH: tl.constexpr = INNER // PARTS
    wait_for_earlier(DEPENDENT)
    if RANKS > 1:
        own, turn = tl.load(addresses + INDEX), tl.load(turns + tile)
    if SWAPPED:
        total = tl.zeros((OUTPUTS, ROWS), tl.float32)
        upper = tl.zeros((OUTPUTS, ROWS), tl.float32)
        t_, o_ = t[None, :], o[:, None]
    else:
        total = tl.zeros((ROWS, OUTPUTS), tl.float32)
        upper = tl.zeros((ROWS, OUTPUTS), tl.float32)
        t_, o_ = t[:, None], o[None, :]
    inside = t_ < rows
    for at in range(0, EACH, BLOCK):
        first = part * EACH + at
        if BULK:
            x_TI, one_OI = x.load([0, first]), weight.load([tile * OUTPUTS, first])
        else:
            x_TI = tl.load(x + t[:, None] * INNER + first + i[None, :], mask=(t < rows)[:, None], other=0.0)
            spot = weight + o[:, None].to(tl.int64) * INNER + first + i[None, :]
            one_OI = tl.load(spot, eviction_policy="evict_first")
        if SWAPPED:
            total = tl.dot(one_OI, tl.trans(x_TI), total, input_precision="ieee")
        else:
            total = tl.dot(x_TI, tl.trans(one_OI), total, input_precision="ieee")
        if GATE:
            if BULK:
                other_OI = weight.load([outs + tile * OUTPUTS, first])
            else:
                other_OI = tl.load(spot + outs.to(tl.int64) * INNER, eviction_policy="evict_first")
            if SWAPPED:
                upper = tl.dot(other_OI, tl.trans(x_TI), upper, input_precision="ieee")
            else:
                upper = tl.dot(x_TI, tl.trans(other_OI), upper, input_precision="ieee")
    is_last = PARTS == 1
    if PARTS > 1:
        spot = partial + t_ * outs + o_
        tl.store(spot + part * rows * outs, total, mask=inside)
        tl.debug_barrier()
        is_last = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu") == PARTS - 1
        if is_last:
            tl.store(tickets + tile, 0)
            total = tl.load(spot, mask=inside, other=0.0, cache_modifier=".cg")
            for other in tl.static_range(1, PARTS):
                total += tl.load(spot + other * rows * outs, mask=inside, other=0.0, cache_modifier=".cg")
    if is_last:
        dtype: tl.constexpr = out.dtype.element_ty
        if HAS_BIAS:
            total += tl.load(bias + o_).to(tl.float32)
        if GATE:
            if HAS_BIAS:
                upper += tl.load(bias + outs + o_).to(tl.float32)
            total = gated(total.to(dtype).to(tl.float32), upper.to(dtype).to(tl.float32), GATE)
        if RANKS > 1:
            COUNT: tl.constexpr = ROWS * OUTPUTS // 2
            part_TO = tl.trans(total) if SWAPPED else total
            low, high = tl.split(tl.reshape(bits_of(part_TO, dtype), (COUNT, 2)))
            words = word_of(low, high)
            words = add_words(words, own, turn, tile, addresses, turns, looks_max, dtype, INDEX, RANKS, COUNT)
            w = tl.arange(0, COUNT)
            row, pair = w // (OUTPUTS // 2), tile * (OUTPUTS // 2) + w % (OUTPUTS // 2)
            tl.store(out.to(tl.pointer_type(tl.int32)) + row * (outs // 2) + pair, words, mask=row < rows)
        else:
            tl.store(out + t_ * outs + o_, total.to(dtype), mask=inside)
