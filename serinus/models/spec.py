"""ModelSpec: a checkpoint's config.json, read and checked without torch and without transformers.

Both spellings are read: `rope_parameters`, `dtype` (transformers 5) and `rope_theta`, `rope_scaling`, `torch_dtype`
(before). Knows nothing of weights but their fingerprint, and nothing of devices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serinus.core.errors import ConfigError

__all__ = ["KNOWN_ARCHITECTURES", "TOY_ARCHITECTURE", "ModelSpec", "RopeSpec", "load_spec"]

TOY_ARCHITECTURE = "SerinusToyForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What an architecture implies beyond its config.json."""

    qkv_bias: bool | None = None
    """Bias of the q, k, v projections; None = `attention_bias` of the config says (also for the output projection)."""
    mlp_bias: bool | None = False
    """Bias of the MLP; None = `mlp_bias` of the config says."""
    qk_norm: bool = False
    """RMS norm of each q and k head."""
    head_size: int | None = None
    """Head size where the config has none; None = hidden_size / num_attention_heads."""
    kv_head_count: int | None = None
    """KV heads where the config has none; None = as many as query heads."""
    window_flag: bool = True
    """Whether `use_sliding_window` must be set for `sliding_window` to count."""


_FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(mlp_bias=None),
    "MistralForCausalLM": _Family(qkv_bias=False, window_flag=False, kv_head_count=8),
    "Qwen2ForCausalLM": _Family(qkv_bias=True),
    "Qwen3ForCausalLM": _Family(qk_norm=True, head_size=128),
}

KNOWN_ARCHITECTURES: tuple[str, ...] = (*sorted(_FAMILIES), TOY_ARCHITECTURE)
"""Values of `architectures` in config.json that can be served."""

_DTYPES = ("float32", "bfloat16", "float16")
_SAMPLE_BLOCKS = 32
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How positions turn queries and keys."""

    theta: float = 10000.0
    """Base of the wavelengths."""
    kind: str = "default"
    """default, linear or llama3."""
    factor: float = 1.0
    """Stretch of long wavelengths (linear: of all)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_context / this are stretched wholly."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_context / this stay."""
    original_context: int = 8192
    """llama3: context the model was first trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that shapes the model, its KV and its vocabulary."""

    path: str
    """Local directory of the checkpoint."""
    architecture: str
    """One of KNOWN_ARCHITECTURES."""
    layer_count: int
    """Decoder layers, each with its own KV."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the MLP."""
    head_count: int
    """Query heads."""
    kv_head_count: int
    """Key (and value) heads; divides head_count."""
    head_size: int
    """Elements of one head; even."""
    vocab_size: int
    """Rows of the embedding; token ids are below it."""
    context_length: int
    """Longest sequence: max_position_embeddings, or the sliding window where that is smaller."""
    rope: RopeSpec = RopeSpec()
    """Rotary embedding."""
    norm_eps: float = 1e-6
    """Epsilon of every RMS norm."""
    tied: bool = False
    """Whether the embedding serves as output head too."""
    qkv_bias: bool = False
    """Bias of the q, k, v projections."""
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    """Bias of the MLP's projections."""
    qk_norm: bool = False
    """RMS norm of each q and k head before the rotation."""
    dtype: str = "bfloat16"
    """Element type the checkpoint was saved in: float32, bfloat16 or float16."""
    eos_ids: tuple[int, ...] = ()
    """End-of-sequence ids, from config.json and generation_config.json together, sorted."""
    bos_id: int | None = None
    """Begin-of-sequence id, where named."""
    reserved_ids: int = 0
    """Toy only: ids below it are special and never generated."""
    signature: str = ""
    """Digest of all of the above but the path, and of samples of the weight files: equal = KV may be exchanged."""


def load_spec(
    path: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    load_format: str = "auto",
    seed: int = 0,
) -> ModelSpec:
    """Read and check `path/config.json`.

    Args:
        path: a local directory (see `models.resolve` for hub ids).
        overrides: fields laid over config.json (`--json-model-override-args`).
        load_format: `auto` reads weight files for the signature; `dummy` makes it from `seed`.
        seed: seed of dummy weights.
    Raises:
        ConfigError: no directory, no or broken config.json, unknown architecture, missing or wrong field.
    Cost: reads two small files and at most 128 KiB of each weight file.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"models: no checkpoint at {str(path)!r}, expected a directory with a config.json")
    config = _Fields(_read_json(folder / "config.json"), overrides or {}, folder / "config.json")
    generation = folder / "generation_config.json"
    extra = _read_json(generation) if generation.exists() else {}
    architecture = _architecture(config)
    toy = architecture == TOY_ARCHITECTURE
    fields = _toy_fields(config) if toy else _family_fields(config, _FAMILIES[architecture])
    spec = {
        **fields,
        "architecture": architecture,
        "vocab_size": config.whole("vocab_size"),
        "dtype": _dtype(config),
        "eos_ids": tuple(sorted({*_ids(config.get("eos_token_id")), *_ids(extra.get("eos_token_id"))})),
        "bos_id": config.get("bos_token_id") if isinstance(config.get("bos_token_id"), int) else None,
    }
    weights = f"dummy:{seed}" if load_format == "dummy" else _fingerprint(folder)
    if toy:
        weights = f"toy:{config.get('seed', 0)}"
    plain = ModelSpec(path="", **spec)
    signature = hashlib.blake2b(f"{asdict(plain)!r}|{weights}".encode(), digest_size=16).hexdigest()
    return ModelSpec(path=str(folder), signature=signature, **spec)


class _Fields:
    """config.json with the overrides on top; every read is checked and every complaint names file and field."""

    def __init__(self, values: Mapping[str, Any], overrides: Mapping[str, Any], source: Path) -> None:
        self.values = {**values, **overrides}
        self.source = source

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def fail(self, name: str, expected: str) -> ConfigError:
        shown = repr(self.values[name])[:120] if name in self.values else "nothing"
        return ConfigError(f"models: {self.source}: field {name!r} is {shown}, expected {expected}")

    def whole(self, name: str, default: int | None = None, low: int = 1) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.fail(name, f"an integer, at least {low}")
        return value

    def real(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.fail(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"models: {path} is missing, expected the checkpoint's {path.name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"models: {path} cannot be read ({error}), expected a JSON object") from None
    if not isinstance(values, dict):
        raise ConfigError(f"models: {path} holds a {type(values).__name__}, expected a JSON object")
    return values


def _architecture(config: _Fields) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise config.fail("architectures", f"a list with one of {', '.join(KNOWN_ARCHITECTURES)}")
    if named[0] not in KNOWN_ARCHITECTURES:
        raise ConfigError(
            f"models: architecture {named[0]!r} is not known, expected one of {', '.join(KNOWN_ARCHITECTURES)}"
        )
    if config.get("quantization_config") is not None:
        raise config.fail("quantization_config", "none: only unquantized checkpoints are served")
    return named[0]


def _family_fields(config: _Fields, family: _Family) -> dict[str, Any]:
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", family.kv_head_count or heads)
    if heads % kv_heads:
        raise config.fail("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if config.get("head_dim") is None and family.head_size is None and hidden % heads:
        raise config.fail("hidden_size", f"a multiple of num_attention_heads = {heads}, or a head_dim")
    head_size = config.whole("head_dim", family.head_size or hidden // heads)
    if head_size % 2:
        raise config.fail("head_dim", "an even number")
    if config.get("hidden_act", "silu") != "silu":
        raise config.fail("hidden_act", "'silu'")
    attention_bias = config.flag("attention_bias", False) if family.qkv_bias is None else family.qkv_bias
    return {
        "layer_count": config.whole("num_hidden_layers"),
        "hidden_size": hidden,
        "intermediate_size": config.whole("intermediate_size"),
        "head_count": heads,
        "kv_head_count": kv_heads,
        "head_size": head_size,
        "context_length": _context(config, family),
        "rope": _rope(config),
        "norm_eps": config.real("rms_norm_eps", 1e-6),
        "tied": config.flag("tie_word_embeddings", False),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias and family.qkv_bias is None,
        "mlp_bias": config.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        "qk_norm": family.qk_norm,
    }


def _context(config: _Fields, family: _Family) -> int:
    """Positions the model can serve. Up to its window, attention over a window is attention over everything."""
    context = config.whole("max_position_embeddings")
    active = config.get("use_sliding_window", False) is True or not family.window_flag
    if active and config.get("sliding_window") is not None:
        context = min(context, config.whole("sliding_window"))
    return context


def _rope(config: _Fields) -> RopeSpec:
    new = config.get("rope_parameters")
    old = config.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise config.fail(name, "an object")
    values = _Fields({**(old or {}), **(new or {})}, {}, config.source)
    theta = values.real("rope_theta", config.real("rope_theta", 10000.0))
    kind = values.get("rope_type", values.get("type", "default"))
    if values.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise config.fail("partial_rotary_factor", "1.0")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=values.real("factor", 0.0))
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=values.real("factor", 0.0),
            low_freq_factor=values.real("low_freq_factor", 0.0),
            high_freq_factor=values.real("high_freq_factor", 0.0),
            original_context=values.whole("original_max_position_embeddings", 0),
        )
    raise ConfigError(f"models: {config.source}: rope type {kind!r} is not known, expected default, linear or llama3")


def _toy_fields(config: _Fields) -> dict[str, Any]:
    vocab = config.whole("vocab_size", low=2)
    reserved = config.whole("reserved_ids", 0, low=0)
    if reserved >= vocab:
        raise config.fail("reserved_ids", f"less than vocab_size = {vocab}")
    heads = config.whole("num_key_value_heads", 1)
    head_size = config.whole("head_dim", 8)
    if heads * head_size % 4:
        raise config.fail("head_dim", "num_key_value_heads * head_dim to be a multiple of 4 (rows of whole words)")
    return {
        "layer_count": config.whole("num_hidden_layers"),
        "hidden_size": heads * head_size,
        "intermediate_size": heads * head_size,
        "head_count": heads,
        "kv_head_count": heads,
        "head_size": head_size,
        "context_length": config.whole("max_position_embeddings"),
        "reserved_ids": reserved,
    }


def _dtype(config: _Fields) -> str:
    name = config.get("dtype", config.get("torch_dtype", "float32"))
    if name not in _DTYPES:
        raise config.fail("dtype" if config.get("dtype") is not None else "torch_dtype", f"one of {', '.join(_DTYPES)}")
    return str(name)


def _ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id`: an integer, a list of them, or nothing."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def _fingerprint(folder: Path) -> str:
    """Names, sizes and evenly spread samples of the weight files: tells two fine-tunes of one config apart, cheaply."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            for block in range(_SAMPLE_BLOCKS):
                stream.seek(block * max(size - _SAMPLE_BYTES, 0) // max(_SAMPLE_BLOCKS - 1, 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
