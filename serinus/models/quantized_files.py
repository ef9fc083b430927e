"""QuantizedFiles: linears of checkpoints that are quantized, as integers or FP8 with scales, or dequantized.

Which linears those are is seen by their tensors: what a list of exceptions left out has a `weight` of floats. Integers
are kept as they are and multiplied with, FP8 where kernels can. FP8 elsewhere, and what something else than a linear
asks for (latent attention, projections of which only some are quantized), is dequantized to the dtype of the model.
Shapes: O = output width, I = input width, G = groups of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from serinus.core.errors import ConfigError
from serinus.core.log import get_logger
from serinus.kernels import QuantizedWeight
from serinus.models.quantization import FP8_BLOCK, QuantSpec
from serinus.models.weights import SafetensorsSource

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each digit of a word."""
_INTEGERS = ("qweight", "weight_packed")
"""What linears of integers have in place of a weight."""
_FP8_SCALES = ("weight_scale_inv", "weight_scale")
_FP8_SPAN = 32
"""Inputs of FP8 of which groups are multiples, for kernels."""
_FP8_NAN = 0x7F
_log = get_logger("models")


class QuantizedFiles:
    """A source over the files of a quantized checkpoint."""

    def __init__(self, files: SafetensorsSource, spec: QuantSpec) -> None:
        self.device, self.dtype = files.device, files.dtype
        self._files, self._spec = files, spec
        self._kinds: dict[str, set[str]] = {}
        """Of each module what its tensors are called."""
        self._has_told = False
        for name in files.names:
            module, _, kind = name.rpartition(".")
            self._kinds.setdefault(module, set()).add(kind)

    def take(
        self, name: str, shape: tuple[int, ...], span: range | None = None, dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """As the files have it; the weight of a quantized module is dequantized."""
        module, _, kind = name.rpartition(".")
        if kind != "weight" or not self._is_quantized(module):
            return self._files.take(name, shape, span, dim, dtype)
        assert len(shape) == 2, f"models: {name} of shape {list(shape)}, expected a matrix"
        weight = self.linear(module, (shape[0], shape[1]), span, dim)
        plain = weight.dequantized() if isinstance(weight, QuantizedWeight) else weight
        return plain.to(self.device, dtype or self._files.dtype)

    def linear(
        self, name: str, shape: tuple[int, int], span: range | None = None, dim: int = 0
    ) -> Tensor | QuantizedWeight:
        """The integers or FP8 of it, or a weight of floats. All of it is read and unpacked, whatever the span. Raises
        ConfigError: a tensor is missing or not as config.json says, or groups would be cut too short."""
        if not self._is_quantized(name):
            return self._files.take(f"{name}.weight", shape, span, dim)
        tensors = {
            kind: self._files.stored(f"{name}.{kind}").to(self.device) for kind in sorted(self._kinds[name] - {"bias"})
        }
        if "weight" in tensors:
            return self._fp8(name, _fp8(name, tensors, shape, self._spec), span, dim)
        whole = _integers(name, tensors, shape, self._spec)
        if span is None:
            return whole
        try:
            return whole.columns(span) if dim else whole.rows(span)
        except ValueError as error:
            raise ConfigError(f"models: {name} cannot be shared among ranks ({error})") from None

    def _fp8(self, name: str, whole: QuantizedWeight, span: range | None, dim: int) -> Tensor | QuantizedWeight:
        """As it is where kernels multiply with it, else dequantized; also blocks that are cut too short for them."""
        if self._spec.bits == 16:
            weight = whole.dequantized().to(self._files.dtype)
            return weight if span is None else weight.narrow(dim, span.start, len(span)).contiguous()
        if span is None or dim == 0:
            return whole if span is None else whole.rows(span)
        if whole.scales_OG.shape[1] > 1 and span.start % _FP8_SPAN:
            if not self._has_told:
                _log.info("%s and others are dequantized: blocks are cut at input %d", name, span.start)
                self._has_told = True
            return whole.dequantized()[:, span.start : span.stop].to(self._files.dtype).contiguous()
        return whole.columns(span)

    def quantized(self, name: str, weight_OI: Tensor) -> Tensor | QuantizedWeight:
        """The same weight again: what is not quantized stays as it is."""
        return weight_OI

    def names_of(self, name: str) -> Sequence[str]:
        """All that the module has, but its bias."""
        return [f"{name}.{kind}" for kind in self._kinds.get(name, {"weight"}) - {"bias"}]

    def has(self, name: str) -> bool:
        """Whether the files have it, or the integers in its place."""
        module, _, kind = name.rpartition(".")
        return self._files.has(name) or (kind == "weight" and self._is_quantized(module))

    def finish(self, ignore: Callable[[str], bool]) -> None:
        """As the files do; quantizers write biases of zeros for linears that have none."""

        def is_nothing(name: str) -> bool:
            module, _, kind = name.rpartition(".")
            return kind == "bias" and self._is_quantized(module) and not self._files.stored(name).any()

        self._files.finish(lambda name: ignore(name) or is_nothing(name))

    def _is_quantized(self, module: str) -> bool:
        kinds = self._kinds.get(module, set())
        return not kinds.isdisjoint(_INTEGERS) or not kinds.isdisjoint(_FP8_SCALES)


def _integers(name: str, tensors: dict[str, Tensor], shape: tuple[int, int], spec: QuantSpec) -> QuantizedWeight:
    """Values and zero points less half of their range, whatever the format."""
    bits, half = spec.bits, 1 << spec.bits - 1
    try:
        if spec.method == "compressed-tensors":
            values_OI = _digits(tensors["weight_packed"], bits, 1)[:, : shape[1]]
            scales_OG, packed = tensors["weight_scale"], tensors.get("weight_zero_point")
            zeros_OG = None if packed is None else _digits(packed, bits, 0)[: shape[0]]
        elif spec.method == "awq":
            values_OI = _digits(tensors["qweight"], bits, 1, _AWQ_ORDER).T
            scales_OG = tensors["scales"].T
            zeros_OG = _digits(tensors["qzeros"], bits, 1, _AWQ_ORDER).T if "qzeros" in tensors else None
        else:
            values_OI = _digits(tensors["qweight"], bits, 0)[: shape[1]].T
            scales_OG = tensors["scales"].T
            zeros_OG = _digits(tensors["qzeros"], bits, 1).T[: shape[0]] + (spec.method == "gptq")
    except KeyError as error:
        raise ConfigError(f"models: {name} has no tensor {error}, expected it of {spec.method}") from None
    _check_order(name, tensors, shape[1], spec)
    group = spec.group or shape[1]
    wanted = shape[0], -(-shape[1] // group)
    tables = [table for table in (scales_OG, zeros_OG) if table is not None]
    if tuple(values_OI.shape) != shape or any(tuple(table.shape) != wanted for table in tables):
        raise ConfigError(
            f"models: {name} has {list(values_OI.shape)} integers and tables {[list(each.shape) for each in tables]},"
            f" expected {list(shape)} and {list(wanted)} from config.json"
        )
    if zeros_OG is not None and int(zeros_OG.max()) - half > 127:
        raise ConfigError(f"models: {name} has a zero point of {int(zeros_OG.max())}, expected at most {half + 127}")
    centred = None if zeros_OG is None or bool((zeros_OG == half).all()) else (zeros_OG - half).to(torch.int8)
    return QuantizedWeight(
        bits=bits,
        group=group,
        values_OI=(values_OI - half).to(torch.int8).contiguous(),
        scales_OG=scales_OG.float().contiguous(),
        zeros_OG=None if centred is None else centred.contiguous(),
    )


def _digits(packed: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Words of 32 bits become their digits along a dimension, int16; digit i of a word is element order[i] of it."""
    if packed.dtype != torch.int32:
        raise ConfigError(f"models: packed integers of {packed.dtype}, expected int32")
    count = 32 // bits
    digits = [(packed >> bits * i & (1 << bits) - 1).to(torch.int16) for i in range(count)]
    if order is not None:
        digits = [digits[order.index(i)] for i in range(count)]
    return torch.stack(digits, dim + 1).flatten(dim, dim + 1)


def _check_order(name: str, tensors: dict[str, Tensor], in_size: int, spec: QuantSpec) -> None:
    """Groups must be of neighbours."""
    for kind in ("g_idx", "weight_g_idx"):
        groups_I = tensors.get(kind)
        expected = torch.arange(in_size) // (spec.group or in_size)
        if groups_I is not None and not torch.equal(groups_I.long().cpu(), expected):
            raise ConfigError(
                f"models: {name}.{kind} gives neighbouring inputs different groups (act-order), expected none"
            )


def _fp8(name: str, tensors: dict[str, Tensor], shape: tuple[int, int], spec: QuantSpec) -> QuantizedWeight:
    """Scales are of the whole, of each output, or of blocks; the last blocks may be smaller."""
    weight_OI = tensors["weight"]
    if tuple(weight_OI.shape) != shape or weight_OI.dtype != torch.float8_e4m3fn:
        raise ConfigError(
            f"models: {name}.weight is {weight_OI.dtype} {list(weight_OI.shape)}, expected float8_e4m3fn {list(shape)}"
        )
    bytes_OI = weight_OI.view(torch.int8)
    if bool((bytes_OI & _FP8_NAN == _FP8_NAN).any()):
        raise ConfigError(f"models: {name}.weight has elements that are no numbers, expected none")
    kind = next(kind for kind in _FP8_SCALES if kind in tensors)
    scale = tensors[kind].float()
    scale = scale.reshape(1, 1) if scale.numel() == 1 else scale.reshape(-1, 1) if scale.dim() == 1 else scale
    blocks = [-(-size // FP8_BLOCK) for size in shape]
    if scale.dim() != 2 or scale.shape[0] not in (1, shape[0], blocks[0]) or scale.shape[1] not in (1, blocks[1]):
        raise ConfigError(
            f"models: {name}.{kind} has shape {list(scale.shape)}, expected a scale for all, for each output or for"
            f" blocks of 128 x 128 of {list(shape)}"
        )
    outs = 1 if len(scale) == shape[0] else shape[0] if len(scale) == 1 else FP8_BLOCK
    return QuantizedWeight(
        bits=8, group=shape[1] if scale.shape[1] == 1 else FP8_BLOCK, values_OI=bytes_OI, e4m3=True,
        scales_OG=scale.repeat_interleave(outs, 0)[: shape[0]].contiguous(), rounds_rows=spec.rounds_rows,
    )  # fmt: skip
