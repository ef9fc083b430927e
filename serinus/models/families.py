"""The families of decoders: what each architecture makes of its config.json. No torch; knows no weights.

Both spellings are read: `rope_parameters`, `layer_types` (transformers 5) and `rope_theta`, `rope_scaling`,
`sliding_window_pattern`, `max_window_layers` (before).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from serinus.core.parts import Part
from serinus.models.config_fields import ConfigFields
from serinus.models.experts import ExpertFamily, ExpertSpec, expert_fields
from serinus.models.latent import latent_fields, rescaled
from serinus.models.rope_fields import RopeSpec, ropes_of


class Sliding(Enum):
    """Which layers slide where the config has a window but no layer_types."""

    ALL = "all"
    """Every layer has the window."""
    ASKED = "asked"
    """Every layer, and only with `use_sliding_window`."""
    ABOVE = "above"
    """Those from `max_window_layers` on, and only with `use_sliding_window`."""
    UPPER = "upper"
    """Those from `max_window_layers` on."""
    TURNS = "turns"
    """The first and every other one below `max_window_layers`, and only with `use_sliding_window`."""
    STILL = "still"
    """Those that do not rotate, and only with `use_sliding_window`."""
    PATTERN = "pattern"
    """All but each `sliding_window_pattern`-th."""


NormNames = tuple[str | None, str | None, str | None, str | None]
"""Names of a layer's norms: before attention, of what it adds, before the MLP, of what it adds; None = none."""
LLAMA_NORMS: NormNames = ("input_layernorm", None, "post_attention_layernorm", None)
"""Those of most families."""
_GEMMA_NORMS: NormNames = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_COHERE_NORMS: NormNames = ("input_layernorm", None, "input_layernorm", None)
_OLMO_NORMS: NormNames = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GLM4_NORMS: NormNames = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What an architecture implies beyond its config.json."""

    qkv_bias: bool | None = None
    """Bias of the q, k, v projections; None = `attention_bias` of the config says (also for the output projection)."""
    biased: bool = False
    """`attention_bias` where the config does not name it."""
    output_bias: bool | None = None
    """Bias of the output projection; None = as qkv_bias says where that is None, else none."""
    mlp_bias: bool | None = False
    """Bias of the MLP; None = `mlp_bias` of the config says."""
    qk_norm: bool = False
    """RMS norm of each q and k head."""
    qk_norm_whole: bool = False
    """RMS norm over all q heads, and over all k heads."""
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
    above: int = 28
    """`max_window_layers` where the config has none."""
    norms: NormNames = LLAMA_NORMS
    """Names of a layer's norms."""
    norm_eps: float = 1e-6
    """`rms_norm_eps` (Cohere's: `layer_norm_eps`) where the config does not name it."""
    tied: bool = False
    """`tie_word_embeddings` where the config does not name it; of Gemma and Cohere it is true."""
    gemma: bool = False
    """What all Gemmas have: norm weights stored less 1, scaled embedding, GELU, tied."""
    query_scalar: float | None = None
    """`query_pre_attn_scalar` where the config does not name it; None = the family scales scores by the head size."""
    fused_qkv: bool = False
    """Query, key and value projections are one tensor, `qkv_proj`."""
    fused_mlp: bool = False
    """Gate and up projections are one tensor, `gate_up_proj`."""
    rotated: float = 1.0
    """`partial_rotary_factor` where the config does not name it."""
    interleaved: bool = False
    """Neighbouring elements of a head turn together."""
    multipliers: bool = False
    """Granite's multipliers of embedding, scores, residual and logits."""
    plain_every: int = 0
    """Every so manieth layer does not rotate, where the config has no `no_rope_layers`; 0 = all do."""
    softcaps: tuple[float | None, float | None] = (None, None)
    """`attn_logit_softcapping` and `final_logit_softcapping` where the config does not name them."""
    local_rope: float | None = None
    """Base of the wavelengths of sliding layers where they have their own."""
    theta: float = 10000.0
    """Base of the wavelengths where the config has none."""
    scaling: Mapping[str, Any] | None = None
    """`rope_scaling` where the config has neither it nor `rope_parameters`."""
    experts: ExpertFamily | None = None
    """What its mixtures of experts imply; None = every MLP is dense."""
    sinks: bool = False
    """Each query head has a score that joins its softmax and weighs no value."""
    quantizations: tuple[str, ...] = ()
    """Values of `quant_method` that its weights may come in."""
    qk_norm_said: bool = False
    """`use_qk_norm` of the config says whether it has the norms of `qk_norm`."""
    latent: bool = False
    """Its attention is latent: one row of KV for all heads."""
    hybrid: bool = False
    """Layers may have states in place of attention, which is refused. Where there are no experts, the MLP is what other
    mixtures have as a shared expert; positions rotate where `position_embedding_type` says so."""
    cohere: bool = False
    """What all of Cohere's have: attention and MLP read one norm, which subtracts the mean; scaled logits, tied. Where
    some layers slide, the others do not rotate."""


_GLM = Family(
    norm_eps=1.5625e-07,
    qkv_bias=None,
    biased=True,
    output_bias=False,
    fused_mlp=True,
    head_size=128,
    kv_head_count=2,
    rotated=0.5,
    interleaved=True,
)
_GPT_OSS_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
FAMILIES: Mapping[str, Family] = {
    "CohereForCausalLM": Family(norm_eps=1e-5, cohere=True, norms=_COHERE_NORMS, interleaved=True, theta=500000.0),
    "Cohere2ForCausalLM": Family(
        norm_eps=1e-5,
        cohere=True,
        norms=_COHERE_NORMS,
        interleaved=True,
        sliding=Sliding.PATTERN,
        window=4096,
        pattern=4,
    ),
    "GemmaForCausalLM": Family(gemma=True, qkv_bias=None, head_size=256, kv_head_count=16),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, norms=_GLM4_NORMS),
    "GptOssForCausalLM": Family(
        norm_eps=1e-5,
        biased=True,
        head_size=64,
        kv_head_count=8,
        sliding=Sliding.PATTERN,
        window=128,
        pattern=2,
        theta=150000.0,
        scaling=_GPT_OSS_SCALING,
        sinks=True,
        quantizations=("mxfp4",),
        experts=ExpertFamily(biased=True, gate="swiglu_oai"),
    ),
    "GraniteForCausalLM": Family(mlp_bias=None, multipliers=True),
    "LlamaForCausalLM": Family(mlp_bias=None),
    "MistralForCausalLM": Family(qkv_bias=False, kv_head_count=8, sliding=Sliding.ALL, window=4096),
    "Qwen2ForCausalLM": Family(qkv_bias=True, sliding=Sliding.ABOVE, window=4096),
    "Qwen3ForCausalLM": Family(qk_norm=True, head_size=128, sliding=Sliding.ABOVE, window=4096),
    "MixtralForCausalLM": Family(
        norm_eps=1e-5, qkv_bias=False, kv_head_count=8, sliding=Sliding.ALL, theta=1e6, experts=ExpertFamily()
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias=True,
        sliding=Sliding.TURNS,
        window=4096,
        experts=ExpertFamily(normalized=False, shared_gate=True),
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=True, qkv_bias=None, sliding=Sliding.ASKED, window=4096, experts=ExpertFamily(normalized=False)
    ),
    "Glm4MoeForCausalLM": Family(
        norm_eps=1e-5,
        qkv_bias=None,
        output_bias=False,
        qk_norm=True,
        qk_norm_said=True,
        rotated=0.5,
        experts=ExpertFamily(sigmoid=True, corrected=True, dense_first=1),
    ),
    "Dots1ForCausalLM": Family(
        qkv_bias=None,
        qk_norm=True,
        sliding=Sliding.UPPER,
        window=4096,
        above=62,
        experts=ExpertFamily(sigmoid=True, corrected=True, normalized=False),
    ),
    "DeepseekV2ForCausalLM": Family(
        qkv_bias=None, latent=True, interleaved=True, experts=ExpertFamily(normalized=False, method_said=True)
    ),
    "DeepseekV3ForCausalLM": Family(
        qkv_bias=None,
        latent=True,
        interleaved=True,
        experts=ExpertFamily(sigmoid=True, corrected=True, dense_first=3, scale=2.5, groups=8, groups_chosen=4),
    ),
    "GraniteMoeForCausalLM": Family(multipliers=True, experts=ExpertFamily()),
    "GraniteMoeSharedForCausalLM": Family(multipliers=True, experts=ExpertFamily()),
    "GraniteMoeHybridForCausalLM": Family(multipliers=True, hybrid=True, experts=ExpertFamily()),
    "Olmo2ForCausalLM": Family(norm_eps=1e-5, qkv_bias=None, qk_norm_whole=True, norms=_OLMO_NORMS),
    "Olmo3ForCausalLM": Family(
        norm_eps=1e-5,
        qkv_bias=None,
        qk_norm_whole=True,
        norms=_OLMO_NORMS,
        sliding=Sliding.PATTERN,
        window=4096,
        pattern=4,
        theta=500000.0,
        local_rope=500000.0,
    ),
    "Phi3ForCausalLM": Family(norm_eps=1e-5, qkv_bias=False, fused_qkv=True, fused_mlp=True, sliding=Sliding.ALL),
    "SmolLM3ForCausalLM": Family(
        tied=True, mlp_bias=None, kv_head_count=4, sliding=Sliding.STILL, theta=2e6, plain_every=4
    ),
    "Gemma2ForCausalLM": Family(
        gemma=True,
        norms=_GEMMA_NORMS,
        query_scalar=256.0,
        head_size=256,
        kv_head_count=4,
        sliding=Sliding.PATTERN,
        window=4096,
        pattern=2,
        softcaps=(50.0, 30.0),
    ),
    "Gemma3ForCausalLM": Family(
        gemma=True,
        norms=_GEMMA_NORMS,
        query_scalar=256.0,
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

_LAYERS_MAX = 10_000
"""Far more than any model has; a spec names the part of each."""
_OPTIONAL = (Sliding.ASKED, Sliding.ABOVE, Sliding.TURNS, Sliding.STILL)
_LAYER_TYPES = {"full_attention": Part.FULL, "sliding_attention": Part.SWA}


def family_fields(config: ConfigFields, family: Family) -> dict[str, Any]:
    """The fields of a ModelSpec that the family decides. Raises ConfigError for missing, wrong or unknown ones."""
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    attention_bias = config.flag("attention_bias", family.biased) if family.qkv_bias is None else family.qkv_bias
    if family.qkv_bias and family.experts is not None:  # Qwen2-MoE: the dense ones always have it
        attention_bias = config.flag("qkv_bias", True)
    layer_count = config.whole("num_hidden_layers", high=_LAYERS_MAX)
    context = config.whole("max_position_embeddings")
    layer_parts, window = _windows(config, family, layer_count, context)
    rope, rope_swa = ropes_of(
        config,
        family.theta,
        family.local_rope,
        rotated=family.rotated,
        interleaved=family.interleaved,
        scaling=family.scaling,
    )
    experts = _experts(config, family, layer_count)
    shared_mlp = family.hybrid and experts is None
    return {
        "layer_count": layer_count,
        "layer_parts": layer_parts,
        "window": window,
        "hidden_size": hidden,
        "intermediate_size": config.whole("shared_intermediate_size" if shared_mlp else "intermediate_size"),
        "head_count": heads,
        **_heads(config, family, hidden, heads, rope),
        "context_length": context,
        "rope": rope,
        "rope_swa": rope_swa,
        "norm_eps": config.real("layer_norm_eps" if family.cohere else "rms_norm_eps", family.norm_eps),
        "tied": config.flag("tie_word_embeddings", family.tied or family.gemma or family.cohere),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias and family.qkv_bias is None if family.output_bias is None else family.output_bias,
        "mlp_bias": config.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        "sinks": family.sinks,
        "qk_norm": family.qk_norm and config.flag("use_qk_norm", not family.qk_norm_said),
        "qk_norm_whole": family.qk_norm_whole,
        "qk_norm_each": family.cohere and config.flag("use_qk_norm", False),
        "experts": experts,
        "extra_layers": config.whole("num_nextn_predict_layers", 0, low=0),
        "norm_names": family.norms,
        "fused_qkv": family.fused_qkv,
        "fused_mlp": family.fused_mlp or shared_mlp,
        "shared_mlp": shared_mlp,
        "plain_layers": _plain_layers(config, family, layer_count),
        **_block_fields(config, family, hidden),
    }


def _experts(config: ConfigFields, family: Family, layer_count: int) -> ExpertSpec | None:
    """The mixtures, if there are any; and of a hybrid that all layers are attention."""
    if family.hybrid:
        kinds = config.get("layer_types", config.get("layers_block_type"))
        if not isinstance(kinds, list) or len(kinds) != layer_count or set(kinds) - {"attention", "full_attention"}:
            raise config.fail("layer_types", f"{layer_count} of attention: the state of other layers is no paged KV")
        if not config.whole("num_local_experts", 8, low=0):
            return None
    return None if family.experts is None else expert_fields(config, family.experts, layer_count)


def _heads(config: ConfigFields, family: Family, hidden: int, heads: int, rope: RopeSpec) -> dict[str, Any]:
    """What a head is, and how many there are of KV."""
    if family.latent:
        found = latent_fields(config)
        return {**found, "attention_scale": rescaled(found["latent"], rope.given)}
    kv_heads = config.whole("num_key_value_heads", family.kv_head_count or heads)
    if heads % kv_heads:
        raise config.fail("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if config.get("head_dim") is None and family.head_size is None and hidden % heads:
        raise config.fail("hidden_size", f"a multiple of num_attention_heads = {heads}, or a head_dim")
    head_size = config.whole("head_dim", family.head_size or hidden // heads)
    if head_size % 2:
        raise config.fail("head_dim", "an even number")
    return {"kv_head_count": kv_heads, "head_size": head_size}


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
    layer_count = config.whole("num_hidden_layers", high=_LAYERS_MAX)
    context = config.whole("max_position_embeddings")
    is_latent = config.flag("latent", False)
    layer_parts, window = _windows(config, Family(sliding=Sliding.ALL, latent=is_latent), layer_count, context)
    if is_latent and (heads != 1 or window is not None):
        raise config.fail("latent", "one KV head and no sliding_window")
    if window == 1:
        raise config.fail("sliding_window", "at least 2: a toy layer continues from the position before")
    return {
        "layer_count": layer_count,
        "layer_parts": layer_parts,
        "window": window,
        "hidden_size": heads * head_size,
        "intermediate_size": heads * head_size,
        "head_count": config.whole("num_attention_heads", heads),
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
        if family.cohere:
            return {"is_parallel": True, "is_centred": True, "logit_scale": config.real("logit_scale", 0.0625)}
        return _multipliers(config) if family.multipliers else {}
    name = "hidden_activation" if config.get("hidden_activation") is not None else "hidden_act"
    legacy = ("gelu",) if family.query_scalar is None else ()  # the first Gemma's configs mean the tanh form by it
    if config.get(name, "gelu_pytorch_tanh") not in ("gelu_pytorch_tanh", *legacy):
        raise config.fail(name, "'gelu_pytorch_tanh'")
    if config.get("use_bidirectional_attention", False) is not False:
        raise config.fail("use_bidirectional_attention", "false: only causal models are served")
    attention_cap, logit_cap = family.softcaps
    return {
        "gelu": True,
        "norm_plus_one": True,
        "embedding_scale": hidden**0.5,
        "attention_scale": (
            None if family.query_scalar is None else config.real("query_pre_attn_scalar", family.query_scalar) ** -0.5
        ),
        "attention_softcap": _optional_real(config, "attn_logit_softcapping", attention_cap),
        "logit_softcap": _optional_real(config, "final_logit_softcapping", logit_cap),
    }


def _multipliers(config: ConfigFields) -> dict[str, Any]:
    """Granite's: of what is embedded, of scores, of what blocks add, and what logits are divided by."""
    return {
        "embedding_scale": config.real("embedding_multiplier", 1.0),
        "attention_scale": config.real("attention_multiplier", 1.0),
        "residual_scale": config.real("residual_multiplier", 1.0),
        "logit_scale": 1.0 / config.real("logits_scaling", 1.0),
    }


def _plain_layers(config: ConfigFields, family: Family, layer_count: int) -> tuple[int, ...]:
    """The layers that do not rotate."""
    if family.cohere and family.sliding is not None:
        slides = config.given("sliding_window", family.window) is not None
        parts = _layer_parts(config, family, layer_count)
        return tuple(i for i, part in enumerate(parts) if part is Part.FULL or not slides)
    if family.hybrid and config.get("position_embedding_type") != "rope":
        return tuple(range(layer_count))
    if not family.plain_every:
        return ()
    every = config.whole("no_rope_layer_interval", family.plain_every)
    named = config.get("no_rope_layers", [int((i + 1) % every != 0) for i in range(layer_count)])
    if not isinstance(named, list) or len(named) != layer_count or not all(value in (0, 1) for value in named):
        raise config.fail("no_rope_layers", f"{layer_count} of 0 (does not rotate) and 1")
    return tuple(i for i, rotates in enumerate(named) if not rotates)


def _optional_real(config: ConfigFields, name: str, default: float | None) -> float | None:
    return None if config.given(name, default) is None else config.real(name, default or 1.0)


def _windows(
    config: ConfigFields, family: Family, layer_count: int, context: int
) -> tuple[tuple[Part, ...], int | None]:
    """The part of each layer, and the window of those that slide."""
    full = (Part.LATENT if family.latent else Part.FULL,) * layer_count
    if family.sliding is None or config.given("sliding_window", family.window) is None:
        return full, None
    named = config.get("layer_types")
    slides = family.sliding not in _OPTIONAL or (isinstance(named, list) and "sliding_attention" in named)
    if family.sliding is not Sliding.UPPER and not config.flag("use_sliding_window", slides):
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
    if family.sliding in (Sliding.ABOVE, Sliding.UPPER, Sliding.TURNS):
        first = config.whole("max_window_layers", family.above, low=0)
        if family.sliding is not Sliding.TURNS:
            return tuple(Part.SWA if i >= first else Part.FULL for i in range(layer_count))
        return tuple(Part.SWA if i < first and i % 2 == 0 else Part.FULL for i in range(layer_count))
    if family.sliding is Sliding.STILL:
        still = _plain_layers(config, family, layer_count)
        return tuple(Part.SWA if i in still else Part.FULL for i in range(layer_count))
    if family.sliding is Sliding.PATTERN:
        every = config.whole("sliding_window_pattern", family.pattern)
        return tuple(Part.SWA if (i + 1) % every else Part.FULL for i in range(layer_count))
    return (Part.SWA,) * layer_count
