"""The families of decoders: what each architecture makes of its config.json. No torch; knows no weights.

Both spellings are read: `rope_parameters`, `layer_types` (transformers 5) and `rope_theta`, `rope_scaling`,
`sliding_window_pattern`, `max_window_layers` (before).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from serinus.core.errors import ConfigError
from serinus.core.parts import Part
from serinus.models.config_fields import ConfigFields

__all__ = ["FAMILIES", "Family", "RopeSpec", "family_fields", "toy_fields"]


class Sliding(Enum):
    """Which layers slide where the config has a window but no layer_types."""

    ALL = "all"
    """Every layer has the window."""
    ABOVE = "above"
    """Those from `max_window_layers` on, and only with `use_sliding_window`."""
    PATTERN = "pattern"
    """All but each `sliding_window_pattern`-th."""


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
class Family:
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
    sliding: Sliding | None = None
    """Which layers a window applies to; None = the family has no windows."""
    window: int | None = None
    """`sliding_window` where the config does not name it (null there means none)."""
    pattern: int = 0
    """`sliding_window_pattern` where the config has none."""
    gemma: bool = False
    """Gemma's block: norms after attention and MLP too, norm weights stored less 1, scaled embedding, GELU, tied."""
    softcaps: tuple[float | None, float | None] = (None, None)
    """`attn_logit_softcapping` and `final_logit_softcapping` where the config does not name them."""
    local_rope: float | None = None
    """Base of the wavelengths of sliding layers where they have their own."""
    theta: float = 10000.0
    """Base of the wavelengths where the config has none."""


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=None),
    "MistralForCausalLM": Family(qkv_bias=False, kv_head_count=8, sliding=Sliding.ALL, window=4096),
    "Qwen2ForCausalLM": Family(qkv_bias=True, sliding=Sliding.ABOVE, window=4096),
    "Qwen3ForCausalLM": Family(qk_norm=True, head_size=128, sliding=Sliding.ABOVE, window=4096),
    "Gemma2ForCausalLM": Family(
        gemma=True,
        head_size=256,
        kv_head_count=4,
        sliding=Sliding.PATTERN,
        window=4096,
        pattern=2,
        softcaps=(50.0, 30.0),
    ),
    "Gemma3ForCausalLM": Family(
        gemma=True,
        qk_norm=True,
        head_size=256,
        kv_head_count=4,
        sliding=Sliding.PATTERN,
        window=4096,
        pattern=6,
        local_rope=10000.0,
        theta=1e6,
    ),
}
"""By the name in `architectures`."""

_LAYER_TYPES = {"full_attention": Part.FULL, "sliding_attention": Part.SWA}


def family_fields(config: ConfigFields, family: Family) -> dict[str, Any]:
    """The fields of a ModelSpec that the family decides. Raises ConfigError for missing, wrong or unknown ones."""
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", family.kv_head_count or heads)
    if heads % kv_heads:
        raise config.fail("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if config.get("head_dim") is None and family.head_size is None and hidden % heads:
        raise config.fail("hidden_size", f"a multiple of num_attention_heads = {heads}, or a head_dim")
    head_size = config.whole("head_dim", family.head_size or hidden // heads)
    if head_size % 2:
        raise config.fail("head_dim", "an even number")
    attention_bias = config.flag("attention_bias", False) if family.qkv_bias is None else family.qkv_bias
    layer_count = config.whole("num_hidden_layers")
    context = config.whole("max_position_embeddings")
    layer_parts, window = _windows(config, family, layer_count, context)
    rope, rope_swa = _ropes(config, family)
    return {
        "layer_count": layer_count,
        "layer_parts": layer_parts,
        "window": window,
        "hidden_size": hidden,
        "intermediate_size": config.whole("intermediate_size"),
        "head_count": heads,
        "kv_head_count": kv_heads,
        "head_size": head_size,
        "context_length": context,
        "rope": rope,
        "rope_swa": rope_swa,
        "norm_eps": config.real("rms_norm_eps", 1e-6),
        "tied": config.flag("tie_word_embeddings", family.gemma),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias and family.qkv_bias is None,
        "mlp_bias": config.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        "qk_norm": family.qk_norm,
        **_block_fields(config, family, hidden),
    }


def toy_fields(config: ConfigFields) -> dict[str, Any]:
    """The same fields for the toy model. Raises ConfigError for missing or wrong ones."""
    vocab = config.whole("vocab_size", low=2)
    reserved = config.whole("reserved_ids", 0, low=0)
    if reserved >= vocab:
        raise config.fail("reserved_ids", f"less than vocab_size = {vocab}")
    heads = config.whole("num_key_value_heads", 1)
    head_size = config.whole("head_dim", 8)
    if heads * head_size % 4:
        raise config.fail("head_dim", "num_key_value_heads * head_dim to be a multiple of 4 (rows of whole words)")
    layer_count = config.whole("num_hidden_layers")
    context = config.whole("max_position_embeddings")
    layer_parts, window = _windows(config, Family(sliding=Sliding.ALL), layer_count, context)
    if window == 1:
        raise config.fail("sliding_window", "at least 2: a toy layer continues from the position before")
    return {
        "layer_count": layer_count,
        "layer_parts": layer_parts,
        "window": window,
        "hidden_size": heads * head_size,
        "intermediate_size": heads * head_size,
        "head_count": heads,
        "kv_head_count": heads,
        "head_size": head_size,
        "context_length": context,
        "reserved_ids": reserved,
    }


def _block_fields(config: ConfigFields, family: Family, hidden: int) -> dict[str, Any]:
    """What Gemma's block has more than Llama's."""
    if not family.gemma:
        if config.get("hidden_act", "silu") != "silu":
            raise config.fail("hidden_act", "'silu'")
        return {}
    name = "hidden_activation" if config.get("hidden_activation") is not None else "hidden_act"
    if config.get(name, "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise config.fail(name, "'gelu_pytorch_tanh'")
    if config.get("use_bidirectional_attention", False) is not False:
        raise config.fail("use_bidirectional_attention", "false: only causal models are served")
    attention_cap, logit_cap = family.softcaps
    return {
        "gelu": True,
        "post_norms": True,
        "norm_plus_one": True,
        "embedding_scale": hidden**0.5,
        "attention_scale": config.real("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_softcap": _optional_real(config, "attn_logit_softcapping", attention_cap),
        "logit_softcap": _optional_real(config, "final_logit_softcapping", logit_cap),
    }


def _optional_real(config: ConfigFields, name: str, default: float | None) -> float | None:
    return None if config.given(name, default) is None else config.real(name, default or 1.0)


def _windows(
    config: ConfigFields, family: Family, layer_count: int, context: int
) -> tuple[tuple[Part, ...], int | None]:
    """The part of each layer, and the window of those that slide."""
    full = (Part.FULL,) * layer_count
    if family.sliding is None or config.given("sliding_window", family.window) is None:
        return full, None
    if family.sliding is Sliding.ABOVE and not config.flag("use_sliding_window", False):
        return full, None
    window = config.whole("sliding_window", family.window)
    parts = _layer_parts(config, family, layer_count)
    # Up to its window a sliding layer sees everything; where it has a rotation of its own, it stays one of its kind.
    if Part.SWA not in parts or (window >= context and family.local_rope is None):
        return full, None
    return parts, window


def _layer_parts(config: ConfigFields, family: Family, layer_count: int) -> tuple[Part, ...]:
    named = config.get("layer_types")
    if named is not None:
        known = isinstance(named, list) and len(named) == layer_count and all(kind in _LAYER_TYPES for kind in named)
        if not known:
            raise config.fail("layer_types", f"{layer_count} of {', '.join(_LAYER_TYPES)}")
        return tuple(_LAYER_TYPES[kind] for kind in named)
    if family.sliding is Sliding.ABOVE:
        first = config.whole("max_window_layers", 28, low=0)
        return tuple(Part.SWA if i >= first else Part.FULL for i in range(layer_count))
    if family.sliding is Sliding.PATTERN:
        every = config.whole("sliding_window_pattern", family.pattern)
        return tuple(Part.SWA if (i + 1) % every else Part.FULL for i in range(layer_count))
    return (Part.SWA,) * layer_count


def _ropes(config: ConfigFields, family: Family) -> tuple[RopeSpec, RopeSpec | None]:
    """The rotation of FULL layers, and that of sliding layers where they have their own."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise config.fail(name, "an object")
    theta = config.real("rope_theta", family.theta)
    if family.local_rope is None:
        return _rope(config, {**(old or {}), **(new or {})}, theta), None
    by_kind = {name: (new or {}).get(name) or {} for name in _LAYER_TYPES}
    if (new and not set(new) <= set(_LAYER_TYPES)) or not all(isinstance(v, dict) for v in by_kind.values()):
        raise config.fail("rope_parameters", f"objects named {', '.join(_LAYER_TYPES)}")
    local = config.real("rope_local_base_freq", family.local_rope)
    return (
        _rope(config, {**(old or {}), **by_kind["full_attention"]}, theta),
        _rope(config, by_kind["sliding_attention"], local),
    )


def _rope(config: ConfigFields, given: Mapping[str, Any], default_theta: float) -> RopeSpec:
    values = ConfigFields(given, {}, config.source)
    theta = values.real("rope_theta", default_theta)
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
