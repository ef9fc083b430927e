"""QuantSpec: how the weights of a model are quantized, from config.json and `--quantization`. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from serinus.core.errors import ConfigError
from serinus.models.config_fields import ConfigFields

__all__ = ["AT_LOAD", "QuantSpec", "quant_spec"]

AT_LOAD: Final = ("int8", "int4")
"""What `--quantization` makes of a checkpoint that is not quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """The linears of attention and MLP, and the output head; embedding, norms, router and experts are as they were."""

    method: str
    """int8 or int4: made when it is loaded; else the name that config.json gives."""
    bits: int
    """Of the linears, in memory; 16 = they are dequantized as they are loaded, to the dtype of the model."""
    group: int
    """Inputs that share a scale; 0 = all of an output."""
    head_bits: int
    """Of the output head; 16 = as it is stored."""

    @property
    def text(self) -> str:
        """In words, for people."""
        if self.bits == 16:
            return f"{self.method}: dequantized as it is loaded"
        scales = f"a scale for {self.group} inputs" if self.group else "a scale for each output"
        head = "head as it is" if self.head_bits == 16 else f"head of {self.head_bits} bits"
        return f"{self.method}: linears of {self.bits} bits, {scales}, {head}"

    def linear_bytes(self, count: int) -> float:
        """Of so many weights of linears, with their scales."""
        return count * (self.bits / 8 + (4 / self.group if self.group else 0.0))


def quant_spec(config: ConfigFields, asked: str, architecture: str, known: tuple[str, ...] | None) -> QuantSpec | None:
    """How the weights are quantized, and None where they are not.

    Args:
        asked: the setting, auto or one of AT_LOAD.
        known: methods of this architecture alone; None = no code of this package computes it.
    Raises ConfigError: nothing that can be served.
    """
    stored = config.get("quantization_config")
    if asked != "auto" and asked not in AT_LOAD:
        raise ConfigError(f"models: quantization is {asked!r}, expected auto or one of {', '.join(AT_LOAD)}")
    if known is None and (stored is not None or asked != "auto"):
        if stored is not None:
            raise config.fail("quantization_config", f"none for {architecture}, which no family computes")
        raise ConfigError(f"models: quantization is {asked!r} for {architecture}, which no family computes")
    if stored is None:
        return None if asked == "auto" else _AT_LOAD[asked]
    if asked != "auto":
        raise ConfigError(f"models: quantization is {asked!r}, expected auto: {config.source} is quantized already")
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    if method not in (known or ()):
        raise config.fail(
            "quantization_config",
            f"none or quant_method {' or '.join(known)} for {architecture}" if known
            else "none: only unquantized checkpoints are served",
        )  # fmt: skip
    return QuantSpec(method=str(method), bits=16, group=0, head_bits=16)


_AT_LOAD: Final = {
    "int8": QuantSpec(method="int8", bits=8, group=0, head_bits=8),
    "int4": QuantSpec(method="int4", bits=4, group=128, head_bits=8),
}
