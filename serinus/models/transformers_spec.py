"""What a ModelSpec says of a model that runs by transformers' own code.

Imported where a checkpoint has no family here: it takes transformers' second or two. Code that a checkpoint brings is
never run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serinus.core.errors import ConfigError
from serinus.core.parts import Part

_LAYER_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers whose state is KV of positions, which is what pages hold."""


def read_config(folder: Path) -> Any:
    """transformers' own reading of config.json. Raises ConfigError: it cannot, or would need the checkpoint's code."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"models: transformers cannot read {folder / 'config.json'}: {error}") from None


def transformers_fields(folder: Path, architecture: str) -> dict[str, Any]:
    """The fields of a ModelSpec that decide shapes. Raises ConfigError: the model is none that can run so, and why.

    All layers are of part FULL: those that slide keep what fell out of their windows, and do not read it.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise _refusal(architecture, "it is no text decoder of the installed transformers")
    config = read_config(folder)
    model = getattr(transformers, architecture)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    odd = sorted({str(kind) for kind in kinds} - set(_LAYER_KINDS))
    if odd or model._is_stateful or config.is_encoder_decoder:
        raise _refusal(architecture, f"its state is no paged KV ({', '.join(odd) or 'states, or an encoder'})")
    if not model._supports_attention_backend:
        raise _refusal(architecture, "its attention in transformers cannot be replaced (no attention interface)")
    _check_rope(config, architecture)
    heads, hidden = config.num_attention_heads, config.hidden_size
    try:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_size = getattr(config, "head_dim", None) or hidden // heads
    except RuntimeError:  # so newer versions say that layers differ
        kv_heads = head_size = None
    if head_size is None or getattr(config, "global_head_dim", None) not in (None, head_size):
        raise _refusal(architecture, "head_dim or num_key_value_heads differs between layers, expected one of all")
    if head_size % 2 or heads % kv_heads:
        raise _refusal(architecture, f"{heads} query and {kv_heads} KV heads of {head_size}: expected even groups")
    return {
        "layer_count": config.num_hidden_layers,
        "layer_parts": (Part.FULL,) * config.num_hidden_layers,
        "hidden_size": hidden,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * hidden,
        "head_count": heads,
        "kv_head_count": kv_heads,
        "head_size": head_size,
        "context_length": config.max_position_embeddings,
        "through_transformers": True,
    }


def _check_rope(config: Any, architecture: str) -> None:
    """Raises ConfigError: how a position rotates would depend on what else is in its step."""
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):
        if not isinstance(each, dict) or each.get("rope_type") != "longrope":
            continue
        original = each.get("original_max_position_embeddings") or config.max_position_embeddings
        if original < config.max_position_embeddings:
            raise _refusal(
                architecture,
                "rope_type is 'longrope', of which transformers chooses the factors by the longest sequence of a step,"
                f" and original_max_position_embeddings {original}, expected at least max_position_embeddings ="
                f" {config.max_position_embeddings}",
            )


def _refusal(architecture: str, reason: str) -> ConfigError:
    return ConfigError(f"models: architecture {architecture!r} cannot run through transformers: {reason}")
