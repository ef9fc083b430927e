"""The linear of a quantized weight: integers, or floats of 8 bits, become fp16, bf16 or fp32 in the kernel, exactly;
scales are applied to sums of groups; see the reference. T = tokens, I = input width, O = output width.

What a program reads of integers in one step, _TILE outputs of a span of inputs (a group, or a part of one), lies in one
piece. 8 bits: a byte each. 4 bits: of a span the first half is in the lower halves of bytes and the second half in the
upper ones, each plus 8: so inputs are read as they lie. In assembly bytes are taken apart four at a time: 0x4300 | n is
128 + n in bf16, 0x6400 | n is 1024 + n in fp16. Floats lie row after row, filled up to whole spans and tiles; sign,
exponent and mantissa go to their places in bf16 or fp16, which is a power of two too small.

Many rows by floats whose maker rounds rows too (`rounds_rows`) are rounded to E4M3 and multiplied as such
(`torch._scaled_mm`), with a scale for each row where each output has one, and one for 128 inputs of a row where weights
have one for 128 x 128.

Where the output is too narrow to fill the GPU, inputs are cut too: the last program adds the partial sums in their
order, so that equal inputs give equal bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.packed import PackedLinear, RowBlocks
from serinus.kernels.quantized import QuantizedWeight
from serinus.kernels.triton.dependent import dependent, wait_for_earlier
from serinus.kernels.triton.qk_rope_store import format_of, in_fp8
from serinus.kernels.triton.tickets import TICKETS

_SPAN = 128
"""Inputs of one step, at most; they share a scale."""
SPAN_MIN = 32
_TILE = 64
"""Outputs of one piece."""
_IN_ASSEMBLY = not triton.knobs.runtime.interpret
"""Triton's interpreter knows none."""
_PROGRAMS = 256
"""With fewer, inputs are cut into parts."""
_PROGRAMS_NARROW = 384
"""The same of few rows by 8 bits: their programs have fewer outputs."""
_PARTS_MAX = 16
_MANY = 1024
"""Tokens from which on larger tiles of 8 bits are faster."""
INTEGERS, E4M3, E4M3_ROUNDING, E2M1, E2M1_LARGE = range(5)
"""`RowBlocks.levels`: what bytes stand for, and whether many rows are rounded to it. E2M1: of experts alone, LARGE
where a scale is above 2."""
_BLOCKED = 4 * _SPAN
"""Widths are multiples of it where blocks of 128 x 128 are multiplied with: cuBLASLt reads rows of 4, 8... of their
scales."""
_SPANS = 8
"""Of a row that a program rounds."""
_ROUNDED_MIN = 128
"""Tokens from which on rounded rows are faster (benchmarks/gpu_models.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedCut:
    """How the work is cut."""

    rows: int
    """Tokens of one program."""
    outputs: int
    """Outputs of one program."""
    parts: int
    """Into which the inputs are cut."""
    warps: int
    """Warps of one program."""
    stages: int
    """Steps that are loaded ahead."""


def cut_of(count: int, out_size: int, in_size: int, bits: int, *, is_grouped: bool) -> QuantizedCut:
    """How a weight is cut for so many tokens, as measured best (benchmarks/gpu_models.py). `is_grouped`: it has several
    scales for an output, and sums of groups take registers of their own."""
    rows = min(128, max(16, int(triton.next_power_of_2(count))))
    if rows == 128:
        if bits == 8 and count >= _MANY and not is_grouped:
            return QuantizedCut(rows=256, outputs=128, parts=1, warps=8, stages=3)
        return QuantizedCut(rows=rows, outputs=64, parts=1, warps=4, stages=3)
    narrow = rows == 16 and bits == 8
    outputs = 32 if narrow else 128 if rows == 16 else 64
    programs, enough = triton.cdiv(out_size, outputs), _PROGRAMS_NARROW if narrow else _PROGRAMS
    wanted = min(_PARTS_MAX, int(triton.next_power_of_2(triton.cdiv(enough, programs))))
    parts = min(wanted, triton.cdiv(in_size, 4 * _SPAN)) if programs <= TICKETS else 1
    return QuantizedCut(rows=rows, outputs=outputs, parts=parts, warps=4, stages=5 if narrow else 3)


def span_of(group: int) -> int:
    """Inputs of one step, of groups of so many; 0: all inputs share a scale."""
    return math.gcd(group, _SPAN) if group else _SPAN


def pack_quantized(weight: QuantizedWeight, bias_O: Tensor | None) -> PackedLinear:
    """As the kernel reads it, on the device where it is. Raises ValueError: groups are too small."""
    out_size, in_size = weight.values_OI.shape
    single = weight.scales_OG.shape[1] == 1
    if not single and weight.group % SPAN_MIN:
        raise ValueError(f"kernels: a weight in groups of {weight.group}, expected a multiple of {SPAN_MIN}")
    group = 0 if single else weight.group
    span = span_of(group)
    whole = F.pad(weight.values_OI, (0, -in_size % span, 0, -out_size % _TILE))
    if weight.e4m3:
        return _pack_floats(weight, whole.contiguous(), group, bias_O)
    values = whole.view(-1, _TILE, whole.shape[1] // span, span).transpose(1, 2)  # tile, step, output, input
    if weight.bits == 4:
        digits = (values + 8).view(torch.uint8)
        values = digits[..., : span // 2] | digits[..., span // 2 :] << 4
    values = values.contiguous()
    rows = RowBlocks(
        address=values.data_ptr(), part=group, bits=weight.bits, scales=weight.scales_OG.T.contiguous(),
        zeros=None if weight.zeros_OG is None else weight.zeros_OG.T.contiguous(),
    )  # fmt: skip
    return PackedLinear(weight=values, bias_O=bias_O, in_size=in_size, out_size=out_size, blocked=True, rows=rows)


def _pack_floats(weight: QuantizedWeight, whole: Tensor, group: int, bias_O: Tensor | None) -> PackedLinear:
    out_size, in_size = weight.values_OI.shape
    blocks = None
    if group == _SPAN and out_size % _SPAN == in_size % _BLOCKED == 0:
        table = weight.scales_OG.view(-1, _SPAN, in_size // _SPAN)
        blocks = table[:, 0].contiguous() if bool((table == table[:, :1]).all()) else None
    rows = RowBlocks(
        address=whole.data_ptr(), part=group, bits=8, scales=weight.scales_OG.T.contiguous(), blocks=blocks,
        levels=E4M3_ROUNDING if weight.rounds_rows else E4M3,
    )  # fmt: skip
    return PackedLinear(weight=whole, bias_O=bias_O, in_size=in_size, out_size=out_size, blocked=True, rows=rows)


def multiply_quantized(
    x_TI: Tensor, packed: PackedLinear, how: RowBlocks, tickets: Tensor, cut: QuantizedCut | None = None
) -> Tensor:
    """x @ weight.T + bias, [T, O] in the dtype of x. `tickets`: of `Tickets`; `cut`: None = as measured best, and many
    rows rounded where they may be.

    Raises ValueError: x is not of width I.
    Cost: one read of the integers for every 128 rows at least, one write of the output; no host wait.
    """
    if x_TI.shape[-1] != packed.in_size:
        raise ValueError(f"kernels: linear got {tuple(x_TI.shape)}, expected [T, {packed.in_size}]")
    rows_TI = x_TI.reshape(-1, packed.in_size).contiguous()
    count, span = len(rows_TI), span_of(how.part)
    out_TO = rows_TI.new_empty((count, packed.out_size))
    if not out_TO.numel():
        return out_TO.view(*x_TI.shape[:-1], packed.out_size)
    assert how.scales is not None, "kernels: a quantized weight without scales"
    if cut is None and count >= _ROUNDED_MIN and is_rounding(rows_TI, packed, how):
        return multiply_rounded(rows_TI, packed, how).view(*x_TI.shape[:-1], packed.out_size)
    cut = cut or cut_of(count, packed.out_size, packed.in_size, how.bits, is_grouped=how.part > 0)
    partial = out_TO
    if cut.parts > 1:
        partial = torch.empty((cut.parts, count, packed.out_size), dtype=torch.float32, device=x_TI.device)
    _quantized[(triton.cdiv(packed.out_size, cut.outputs), triton.cdiv(count, cut.rows), cut.parts)](
        rows_TI, packed.weight, how.scales, how.scales if how.zeros is None else how.zeros,
        rows_TI if packed.bias_O is None else packed.bias_O, out_TO, partial, tickets, count, packed.out_size,
        packed.in_size, max(how.part, 1), BITS=how.bits, FLOATS=how.levels != INTEGERS, ROWS=cut.rows,
        OUTPUTS=cut.outputs, SPAN=span, PARTS=cut.parts, GROUPED=how.part > 0, HAS_ZEROS=how.zeros is not None,
        HAS_BIAS=packed.bias_O is not None, EVEN=packed.in_size % span == 0 and packed.out_size % cut.outputs == 0,
        TILE=_TILE, IN_ASSEMBLY=_IN_ASSEMBLY, num_warps=cut.warps, num_stages=cut.stages, **dependent(x_TI.device),
    )  # fmt: skip
    return out_TO.view(*x_TI.shape[:-1], packed.out_size)


def is_rounding(x_TI: Tensor, packed: PackedLinear, how: RowBlocks) -> bool:
    """Whether many such rows are rounded: of bf16, on a GPU that multiplies E4M3."""
    is_whole = packed.in_size == packed.weight.shape[1] and packed.out_size % 16 == 0
    fits = how.levels == E4M3_ROUNDING and (not how.part or how.blocks is not None) and is_whole
    return fits and x_TI.dtype == torch.bfloat16 and x_TI.is_cuda and _has_e4m3(x_TI.device, in_blocks=how.part > 0)


@cache
def _has_e4m3(device: torch.device, *, in_blocks: bool) -> bool:
    """Whether torch multiplies E4M3 there, with scales of rows or of blocks."""
    major, _ = torch.cuda.get_device_capability(device)
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return (major == 9 and cuda >= (12, 9)) if in_blocks else major >= 9


def multiply_rounded(x_TI: Tensor, packed: PackedLinear, how: RowBlocks) -> Tensor:
    """The product of rows that are rounded to E4M3, sums in fp32. Cost: two reads of the rows and one write of a byte
    for each element, and the product."""
    assert how.scales is not None, "kernels: a quantized weight without scales"
    weight_OI = packed.weight.view(torch.float8_e4m3fn)[: packed.out_size]
    if how.blocks is None:
        rounded_TI, scales = round_rows(x_TI)
        scales, theirs = scales[:, None], how.scales
    else:
        rounded_TI, scales = round_spans(x_TI)
        theirs = how.blocks.t()
    out_TO: Tensor = torch._scaled_mm(rounded_TI, weight_OI.t(), scales, theirs, out_dtype=x_TI.dtype)
    out_TO = out_TO[: len(x_TI)]
    return out_TO if packed.bias_O is None else out_TO.add_(packed.bias_O)


def round_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in E4M3, the largest element of each 448 or -448, and their scales in fp32, [T]."""
    count, width = x_TI.shape
    rounded_TI = torch.empty((count, width), dtype=torch.float8_e4m3fn, device=x_TI.device)
    scales_T = torch.empty(count, dtype=torch.float32, device=x_TI.device)
    block = min(4096, int(triton.next_power_of_2(width)))
    mantissa, bias, largest = format_of(rounded_TI.dtype)
    _round[(count,)](
        x_TI, rounded_TI, scales_T, width, BLOCK=block, MANTISSA=mantissa, BIAS=bias, LARGEST=largest, num_warps=8
    )  # fmt: skip
    return rounded_TI, scales_T


def round_spans(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Likewise for each 128 elements of a row; rows are filled up to a multiple of 4, by anything. Scales [T, I/128],
    those of one span side by side."""
    (count, width), spans = x_TI.shape, x_TI.shape[1] // _SPAN
    padded = -(-count // 4) * 4
    rounded_TI = torch.empty((padded, width), dtype=torch.float8_e4m3fn, device=x_TI.device)
    scales_GT = torch.ones((spans, padded), dtype=torch.float32, device=x_TI.device)
    mantissa, bias, largest = format_of(rounded_TI.dtype)
    _round_spans[(count, triton.cdiv(spans, _SPANS))](
        x_TI, rounded_TI, scales_GT, width, padded, spans, SPANS=_SPANS, SPAN=_SPAN, MANTISSA=mantissa, BIAS=bias,
        LARGEST=largest,
    )  # fmt: skip
    return rounded_TI, scales_GT.t()


_jit: Any = triton.jit
_HALVES: Any = tl.constexpr(
    "{ .reg .b32 a, b, k, n; mov.b32 k, 0xLESS; mov.b32 n, 0xONE; prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;"
    " lop3.b32 $0, a, 0x000F000F, 0xPLUS, 0xEA; lop3.b32 $1, b, 0x000F000F, 0xPLUS, 0xEA;"
    " shr.b32 a, a, 4; shr.b32 b, b, 4;"
    " lop3.b32 $2, a, 0x000F000F, 0xPLUS, 0xEA; lop3.b32 $3, b, 0x000F000F, 0xPLUS, 0xEA;"
    " fma.rn.TYPEx2 $0, $0, n, k; fma.rn.TYPEx2 $1, $1, n, k;"
    " fma.rn.TYPEx2 $2, $2, n, k; fma.rn.TYPEx2 $3, $3, n, k; }"
)
"""Times 1, plus minus what is too much: GPUs before Hopper have no subtraction in bf16."""


def _less(less: str, plus: str, one: str, kind: str) -> Any:
    text = _HALVES.value.replace("LESS", less * 2).replace("PLUS", plus * 2).replace("ONE", one * 2)
    return tl.constexpr(text.replace("TYPE", kind))


_BF16: Any = _less("C308", "4300", "3F80", "bf16")
_FP16: Any = _less("E408", "6400", "3C00", "f16")

_SPREAD: Any = tl.constexpr(
    "{ .reg .b32 a, b, c, d, z; prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;"
    " shr.b32 c, a, SHIFT; shr.b32 d, b, SHIFT; and.b32 c, c, 0xKEPT; and.b32 d, d, 0xKEPT;"
    " lop3.b32 c, a, 0x80008000, c, 0xEA; lop3.b32 d, b, 0x80008000, d, 0xEA;"
    " mov.b32 a, 0xTIMES; mov.b32 z, 0x80008000;"
    " fma.rn.TYPEx2 $0, c, a, z; fma.rn.TYPEx2 $1, d, a, z; }"
)
"""Bytes go to the upper halves of words, then exponent and mantissa to their places beside the sign."""


def _spread(shift: int, kept: str, times: str, kind: str) -> Any:
    text = _SPREAD.value.replace("SHIFT", str(shift)).replace("KEPT", kept * 2).replace("TIMES", times * 2)
    return tl.constexpr(text.replace("TYPE", kind))


_BF16_OF_E4M3: Any = _spread(4, "07F0", "7B80", "bf16")  # times 2**120
_FP16_OF_E4M3: Any = _spread(1, "3F80", "5C00", "f16")  # times 256
_BF16_OF_INT8: Any = tl.constexpr(
    "{ .reg .b32 a, b, c, d, m; mov.b32 m, 0xBF80BF80; prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;"
    " lop3.b32 c, a, 0x00800080, 0x43004300, 0xEA; lop3.b32 d, b, 0x00800080, 0x43004300, 0xEA;"
    " lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA; lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;"
    " fma.rn.bf16x2 $0, c, m, a; fma.rn.bf16x2 $1, d, m, b; }"
)
"""128 plus the lower seven bits, less 128 or, of one below 0, less 256."""


@_jit
def widened(bytes_, dtype: tl.constexpr, FLOATS: tl.constexpr, IN_ASSEMBLY: tl.constexpr):
    """Integers of 8 bits, or floats, as floats of that dtype."""
    if FLOATS:
        if IN_ASSEMBLY and dtype == tl.bfloat16:
            wide = tl.inline_asm_elementwise(
                _BF16_OF_E4M3, "=r,=r,r", [bytes_], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        elif IN_ASSEMBLY and dtype == tl.float16:
            wide = tl.inline_asm_elementwise(_FP16_OF_E4M3, "=r,=r,r", [bytes_], dtype=tl.float16, is_pure=True, pack=4)
        else:
            wide = bytes_.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif IN_ASSEMBLY and dtype == tl.bfloat16:
        wide = tl.inline_asm_elementwise(_BF16_OF_INT8, "=r,=r,r", [bytes_], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        wide = bytes_.to(dtype)
    return wide


@_jit
def _round(
    x, out, scales, width, BLOCK: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr
):  # fmt: skip
    """One row and its scale."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    at = row.to(tl.int64) * width
    largest = 0.0
    for first in range(0, width, BLOCK):
        some = tl.load(x + at + first + i, mask=first + i < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(some), 0))
    scale = tl.where(largest == 0.0, 1.0, largest / 448.0)
    tl.store(scales + row, scale)
    for first in range(0, width, BLOCK):
        some = tl.load(x + at + first + i, mask=first + i < width, other=0.0).to(tl.float32)
        tl.store(out + at + first + i, in_fp8(some / scale, out, MANTISSA, BIAS, LARGEST), mask=first + i < width)


@_jit(do_not_specialize=["padded"])
def _round_spans(
    x, out, scales, width, padded, spans, SPANS: tl.constexpr, SPAN: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Some spans of one row."""
    row, g, i = tl.program_id(0), tl.program_id(1) * SPANS + tl.arange(0, SPANS), tl.arange(0, SPAN)
    at = row.to(tl.int64) * width + g[:, None] * SPAN + i[None, :]
    inside = (g < spans)[:, None]
    some = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(some), 1)
    scale = tl.where(largest == 0.0, 1.0, largest / 448.0)
    tl.store(scales + g * padded + row, scale, mask=g < spans)
    tl.store(out + at, in_fp8(some / scale[:, None], out, MANTISSA, BIAS, LARGEST), mask=inside)


@_jit
def halves(both, dtype: tl.constexpr, IN_ASSEMBLY: tl.constexpr):
    """The lower and the upper halves of bytes, each less 8."""
    if IN_ASSEMBLY and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _BF16, "=r,=r,=r,=r,r", [both], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif IN_ASSEMBLY and dtype == tl.float16:
        low, high = tl.inline_asm_elementwise(
            _FP16, "=r,=r,=r,=r,r", [both], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        wide = both.to(tl.int32)
        low, high = ((wide & 15) - 8).to(dtype), ((wide >> 4) - 8).to(dtype)
    return low, high


@_jit(do_not_specialize=["rows"])
def _quantized(
    x, weight, scales, zeros, bias, out, partial, tickets, rows, outs, inner, group,
    BITS: tl.constexpr, FLOATS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SPAN: tl.constexpr,
    PARTS: tl.constexpr, GROUPED: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    TILE: tl.constexpr, IN_ASSEMBLY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(DEPENDENT)
    tile, part = tl.program_id(0), tl.program_id(2)
    o, t = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_out, is_row = o < outs, t < rows
    dtype: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = SPAN if BITS == 8 else SPAN // 2
    i = tl.arange(0, WIDTH)
    steps = tl.cdiv(inner, SPAN)
    each = tl.cdiv(steps, PARTS)
    begin, end = part * each, tl.minimum(part * each + each, steps)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    row = x + t[:, None].to(tl.int64) * inner + i[None, :]
    NEXT: tl.constexpr = WIDTH if FLOATS else TILE * WIDTH
    place_O = o.to(tl.int64) * steps if FLOATS else (o // TILE).to(tl.int64) * steps * TILE + o % TILE
    at_OI = weight + place_O[:, None] * WIDTH + i[None, :]
    # The tables of a step are loaded in the step before.
    last = tl.minimum(begin, steps - 1) * SPAN // group if GROUPED else 0
    scale_O = tl.load(scales + last * outs + o, mask=is_out, other=0.0)
    zero_O = tl.load(zeros + last * outs + o, mask=is_out, other=0).to(dtype) if HAS_ZEROS else scale_O
    for step in range(begin, end):
        first = step * SPAN
        this_O, less_O = scale_O, zero_O
        if GROUPED:
            last = tl.minimum(step + 1, steps - 1) * SPAN // group
            scale_O = tl.load(scales + last * outs + o, mask=is_out, other=0.0)
            if HAS_ZEROS:
                zero_O = tl.load(zeros + last * outs + o, mask=is_out, other=0).to(dtype)
        if EVEN:
            whole = tl.load(at_OI + step * NEXT)
            one_TI = tl.load(row + first, mask=is_row[:, None], other=0.0)
        else:
            whole = tl.load(at_OI + step * NEXT, mask=is_out[:, None], other=0)
            one_TI = tl.load(row + first, mask=is_row[:, None] & (first + i < inner)[None, :], other=0.0)
        if BITS == 8:
            values = widened(whole, dtype, FLOATS, IN_ASSEMBLY)
            if HAS_ZEROS:
                values -= less_O[:, None]
            sums = tl.dot(values, tl.trans(one_TI), input_precision="ieee")
        else:
            if EVEN:
                other_TI = tl.load(row + first + WIDTH, mask=is_row[:, None], other=0.0)
            else:
                inside = is_row[:, None] & (first + WIDTH + i < inner)[None, :]
                other_TI = tl.load(row + first + WIDTH, mask=inside, other=0.0)
            low, high = halves(whole, dtype, IN_ASSEMBLY)
            if HAS_ZEROS:
                low, high = low - less_O[:, None], high - less_O[:, None]
            sums = tl.dot(low, tl.trans(one_TI), input_precision="ieee")
            sums = tl.dot(high, tl.trans(other_TI), sums, input_precision="ieee")
        total += sums * this_O[:, None] if GROUPED else sums
    if not GROUPED:
        total *= scale_O[:, None]
    inside = is_out[:, None] & is_row[None, :]
    spot = t[None, :].to(tl.int64) * outs + o[:, None]
    is_last = PARTS == 1
    if PARTS > 1:
        every = rows * outs  # few rows: it fits into 32 bits
        tl.store(partial + part * every + spot, total, mask=inside)
        tl.debug_barrier()
        ticket = tickets + tile * tl.num_programs(1) + tl.program_id(1)
        is_last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == PARTS - 1
        if is_last:
            tl.store(ticket, 0)
            total = tl.load(partial + spot, mask=inside, other=0.0, cache_modifier=".cg")
            for other in tl.static_range(1, PARTS):
                total += tl.load(partial + other * every + spot, mask=inside, other=0.0, cache_modifier=".cg")
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias + o, mask=is_out, other=0.0).to(tl.float32)[:, None]
        tl.store(out + spot, total.to(dtype), mask=inside)
