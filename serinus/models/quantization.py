"""QuantSpec: how the weights of a model are quantized, from config.json and `--quantization`. No torch.

Read are what AutoAWQ (GEMM), AutoGPTQ and GPTQModel (without act-order), and compressed-tensors (integers that are
packed, floats of 8 bits) write, and FP8 as transformers has it. What else a `quantization_config` says is refused by
its field: to leave a word out would give a wrong model without a sign of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from serinus.core.errors import ConfigError
from serinus.models.config_fields import ConfigFields

AT_LOAD: Final = ("int8", "int4", "fp8")
"""What `--quantization` makes of a checkpoint that is not quantized."""


FP8_BLOCK: Final = 128
"""Inputs, and outputs, that share a scale of FP8 in blocks."""
_FP8_DEVICE: Final = "cuda"
"""Where kernels multiply with FP8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """The linears of attention, MLP and experts, and the output head; embedding, norms and router are as they were."""

    method: str
    """Of AT_LOAD where it is made at load; else the name that config.json gives (that of a GGUF file is ours)."""
    bits: int
    """Of the linears, in memory; 16 = they are dequantized as they are loaded, to the dtype of the model."""
    group: int
    """Inputs that share a scale; 0 = all of an output."""
    head_bits: int
    """Of the output head; 16 = as it is stored."""
    expert_bits: int = 16
    """Of the experts of a mixture, where kernels multiply with their integers; 16 = they are floats in memory."""
    at_load: bool = False
    """Made as it is loaded, of a checkpoint that is not quantized."""
    rounds_rows: bool = False
    """Of FP8: its maker rounds what goes into linears too."""

    @property
    def text(self) -> str:
        """In words, for people."""
        if self.bits == 16 and self.expert_bits < 16:
            return (
                f"{self.method}: experts of {self.expert_bits} bits where kernels multiply with them, else dequantized"
            )
        if self.bits == 16 and self.at_load:
            return (
                "fp8: linears rounded to FP8 (e4m3) with a scale for each output as they are loaded, floats in memory"
            )
        if self.bits == 16:
            return f"{self.method}: dequantized as it is loaded"
        if self.method == "fp8":
            scales = "with the scales of the file" if self.group else "with a scale for each output"
            made = (
                "fp8: linears rounded to FP8 (e4m3) as they are loaded"
                if self.at_load
                else "fp8: linears in FP8 (e4m3)"
            )
            return f"{made}, {scales}, head as it is"
        if self.method == "gguf":
            return f"gguf: linears of Q8_0 and Q4_0 as they are (most of {self.bits} bits), others dequantized"
        scales = f"a scale for {self.group} inputs" if self.group else "a scale for each output"
        head = "head as it is" if self.head_bits == 16 else f"head of {self.head_bits} bits"
        return f"{self.method}: linears of {self.bits} bits, {scales}, {head}"

    @property
    def as_stored(self) -> QuantSpec:
        """What tells models apart: not whether FP8 is kept in memory, which hangs on the device."""
        return replace(self, bits=16, expert_bits=16) if self.method == "fp8" else self

    def linear_bytes(self, count: int) -> float:
        """Of so many weights of linears, with their scales."""
        return count * self._bytes_of(self.bits)

    def expert_bytes(self, count: int, item_bytes: int) -> float:
        """Of so many weights of experts, with their scales; `item_bytes`: of a float."""
        return count * (item_bytes if self.expert_bits == 16 else self._bytes_of(self.expert_bits))

    def _bytes_of(self, bits: int) -> float:
        return bits / 8 + (4 / self.group if self.group else 0.0)


def quant_spec(
    config: ConfigFields, asked: str, architecture: str, known: tuple[str, ...] | None, device: str = "cpu"
) -> QuantSpec | None:
    """How the weights are quantized, and None where they are not.

    Args:
        asked: the setting, auto or one of AT_LOAD.
        known: methods of this architecture alone; None = no code of this package computes it.
        device: where they are multiplied with; on CUDA alone FP8 stays FP8.
    Raises ConfigError: nothing that can be served.
    """
    stored = config.get("quantization_config", config.get("compression_config"))
    if asked != "auto" and asked not in AT_LOAD:
        raise ConfigError(f"models: quantization is {asked!r}, expected auto or one of {', '.join(AT_LOAD)}")
    if known is None and (stored is not None or asked != "auto"):
        if stored is not None:
            raise config.fail("quantization_config", f"none for {architecture}, which no family computes")
        raise ConfigError(f"models: quantization is {asked!r} for {architecture}, which no family computes")
    if stored is None:
        return None if asked == "auto" else _at_load(asked, device)
    if asked != "auto":
        if isinstance(stored, dict) and stored.get("quant_method") == "gguf":
            return _at_load(asked, device)
        raise ConfigError(f"models: quantization is {asked!r}, expected auto: {config.source} is quantized already")
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    if method in (known or ()):
        return QuantSpec(method=str(method), bits=16, group=32, head_bits=16, expert_bits=4)  # all of these are MXFP4
    if known or not isinstance(method, str) or method not in _READERS:
        expected = f"none or quant_method {' or '.join(known or _READERS)} for {architecture}"
        raise config.fail("quantization_config", expected)
    found = _READERS[method](_Fields(config, stored))
    return replace(found, bits=8, expert_bits=8) if found.method == "fp8" and device == _FP8_DEVICE else found


class _Fields:
    """The fields of `quantization_config`."""

    def __init__(self, config: ConfigFields, values: Mapping[str, Any]) -> None:
        self._config, self.values = config, values

    def want(self, name: str, value: Any, *allowed: Any) -> Any:
        """The value, if it is one of those."""
        if value not in allowed:
            said = " or ".join(map(repr, allowed))
            raise ConfigError(
                f"models: {self._config.source}: field 'quantization_config.{name}' is {value!r}, expected {said}"
            )
        return value

    def group(self, name: str, value: Any) -> int:
        """Inputs that share a scale; 0 for -1."""
        if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or (value > 0 and value % 8 == 0)):
            self.want(name, value, -1, "a multiple of 8")
        return max(int(value), 0)


def _awq(fields: _Fields) -> QuantSpec:
    given = fields.values
    fields.want("version", str(given.get("version", "gemm")).lower(), "gemm")
    bits = fields.want("bits", given.get("bits", given.get("w_bit")), 4)
    group = fields.group("group_size", given.get("group_size", given.get("q_group_size", 128)))
    return QuantSpec(method="awq", bits=bits, group=group, head_bits=16, expert_bits=bits)


def _gptq(fields: _Fields) -> QuantSpec:
    given = fields.values
    group = fields.group("group_size", given.get("group_size", 128))
    fields.want("desc_act", bool(given.get("desc_act", False)), False)
    fields.want("dynamic", given.get("dynamic") or None, None)
    form = fields.want("checkpoint_format", given.get("checkpoint_format") or "gptq", "gptq", "gptq_v2")
    bits = fields.want("bits", given.get("bits"), 4, 8)
    return QuantSpec(method=form, bits=bits, group=group, head_bits=16, expert_bits=bits)


def _fp8(fields: _Fields) -> QuantSpec:
    given = fields.values
    fields.want("fmt", given.get("fmt", "e4m3"), "e4m3")
    group = FP8_BLOCK if given.get("weight_block_size") else 0
    rounds_rows = given.get("activation_scheme", "dynamic") in ("dynamic", "static")
    return QuantSpec(method="fp8", bits=16, group=group, head_bits=16, rounds_rows=rounds_rows)


def _compressed(fields: _Fields) -> QuantSpec:
    given = fields.values
    form = fields.want("format", given.get("format"), "pack-quantized", "float-quantized")
    _check_kv(fields)
    fields.want("sparsity_config.format", (given.get("sparsity_config") or {}).get("format", "dense"), "dense")
    groups = given.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    if not schemes or any(scheme.get("weights") != schemes[0].get("weights") for scheme in schemes):
        fields.want("config_groups", groups, "schemes with the same weights")
    weights = schemes[0]["weights"]
    if form == "float-quantized":
        fields.want("config_groups.weights.type", weights.get("type"), "float")
        fields.want("config_groups.weights.num_bits", weights.get("num_bits"), 8)
        group = FP8_BLOCK if weights.get("strategy") == "block" else 0
        rounds_rows = all(isinstance(scheme.get("input_activations"), dict) for scheme in schemes)
        return QuantSpec(method="fp8", bits=16, group=group, head_bits=16, rounds_rows=rounds_rows)
    for scheme in schemes:
        fields.want("config_groups.input_activations", scheme.get("input_activations"), None)
    fields.want("config_groups.weights.type", weights.get("type"), "int")
    fields.want("config_groups.weights.actorder", weights.get("actorder"), None, False, "weight", "static")
    strategy = fields.want("config_groups.weights.strategy", weights.get("strategy"), "group", "channel")
    bits = fields.want("config_groups.weights.num_bits", weights.get("num_bits"), 4, 8)
    group = fields.group("config_groups.weights.group_size", weights.get("group_size")) if strategy == "group" else 0
    return QuantSpec(method="compressed-tensors", bits=bits, group=group, head_bits=16, expert_bits=bits)


def _check_kv(fields: _Fields) -> None:
    """Raises ConfigError where KV is to be another than FP8 with one scale for keys of a layer, and one for values."""
    scheme = fields.values.get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        fields.want("kv_cache_scheme", scheme, None)
        return
    for name, wanted in (("num_bits", 8), ("type", "float"), ("strategy", "tensor"), ("dynamic", False)):
        fields.want(f"kv_cache_scheme.{name}", scheme.get(name), wanted)


def _gguf(fields: _Fields) -> QuantSpec:
    bits = fields.want("bits", fields.values.get("bits"), 4, 8, 16)
    return QuantSpec(method="gguf", bits=bits, group=32 if bits < 16 else 0, head_bits=16, expert_bits=bits)


_READERS: Final[Mapping[str, Callable[[_Fields], QuantSpec]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gguf": _gguf,
}


def _at_load(asked: str, device: str) -> QuantSpec:
    """Raises ConfigError: FP8 where neither a CPU nor a kernel for it is."""
    kept = 8 if device == _FP8_DEVICE else 16
    experts = {"int8": 8, "int4": 4, "fp8": kept}[asked]
    if asked == "int8":
        return QuantSpec(method="int8", bits=8, group=0, head_bits=8, expert_bits=experts, at_load=True)
    if asked == "int4":
        return QuantSpec(method="int4", bits=4, group=128, head_bits=8, expert_bits=experts, at_load=True)
    if device not in ("cpu", _FP8_DEVICE):
        raise ConfigError(f"models: quantization is 'fp8' on {device}, expected {_FP8_DEVICE} or a CPU")
    return QuantSpec(
        method="fp8", bits=kept, group=0, head_bits=16, expert_bits=experts, at_load=True, rounds_rows=True
    )  # fmt: skip
