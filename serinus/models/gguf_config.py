"""What a GGUF file says of its model, as the config.json that its family reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from serinus.core.errors import ConfigError
from serinus.core.gguf_file import GgufFile, gguf_folder
from serinus.core.whole_file import write_whole

GGUF_ARCHITECTURES: Final[Mapping[str, str]] = {
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""llama.cpp's name of an architecture, and ours; Mixtral is a llama with experts."""
INTEGER_BITS: Final[Mapping[str, int]] = {"Q8_0": 8, "Q4_0": 4}
"""Types whose integers are multiplied with: one scale for 32 inputs, no zero point; and their bits."""
_FLOATS: Final = ("F32", "F16", "BF16")
_TYPES: Final = (*_FLOATS, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Types that are read."""
_MIXTURES: Final = ("qwen2moe", "qwen3moe")
_BY_WIDTH: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models: their scores are scaled by hidden_size / heads in place of a head's size. The file does not
say it; llama.cpp knows them by this too."""
_FACTORS: Final = "rope_freqs.weight"
"""By what wavelengths are stretched (Llama 3.1 and later)."""


def unpacked(file: Path) -> str:
    """The folder of a GGUF file (`gguf_folder`), with its config.json.

    Raises ConfigError: the file is cut short, of an architecture or with tensors of a type that is not read, or says
    something that config.json has no word for.
    Cost: as of GgufFile, once for a file.
    """
    folder = gguf_folder(file)
    if not (folder / "config.json").is_file():
        write_whole(folder / "config.json", json.dumps(_config(GgufFile(file)), indent=2).encode())
    return str(folder)


def _config(file: GgufFile) -> dict[str, Any]:
    own = _Own(file)
    _check(file, own)
    hidden, heads = own.need("embedding_length"), own.need("attention.head_count")
    size = own.get("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        own.want(name, own.get(name, size), size)
    is_mixtral = file.architecture == "llama" and own.get("expert_count", 0) > 0
    ids = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {
        "architectures": ["MixtralForCausalLM" if is_mixtral else GGUF_ARCHITECTURES[file.architecture]],
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": own.need("feed_forward_length"),
        "num_hidden_layers": own.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": size,
        "vocab_size": int(_tensor(file, "token_embd.weight").shape[-1]),
        "max_position_embeddings": own.need("context_length"),
        "rms_norm_eps": _short(own.need("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "rope_theta": own.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, own),
        **(_experts(file, own) if own.get("expert_count", 0) else {}),
        **(_gemma(file, own, hidden // heads) if file.architecture.startswith("gemma") else {}),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [each for each in ids if each is not None],
        **_quantization(file),
    }


class _Own:
    """The metadata of the file's own architecture."""

    def __init__(self, file: GgufFile) -> None:
        self._file, self._prefix = file, file.architecture

    def get(self, name: str, default: Any = None) -> Any:
        return self._file.get(f"{self._prefix}.{name}", default)

    def need(self, name: str) -> Any:
        found = self.get(name)
        if found is None:
            raise ConfigError(f"models: {self._file.path} has no metadata {self._prefix}.{name}, expected it")
        return found

    def want(self, name: str, value: Any, *allowed: Any) -> None:
        if value not in allowed:
            said = " or ".join(map(repr, allowed))
            raise ConfigError(f"models: {self._file.path}: {self._prefix}.{name} is {value!r}, expected {said}")


def _check(file: GgufFile, own: _Own) -> None:
    if file.architecture not in GGUF_ARCHITECTURES:
        raise ConfigError(
            f"models: {file.path} is of architecture {file.architecture!r}, expected one of"
            f" {', '.join(GGUF_ARCHITECTURES)}"
        )
    if file.architecture not in (*_MIXTURES, "llama"):
        own.want("expert_count", own.get("expert_count", 0), 0)
    own.want("attention.causal", own.get("attention.causal", True), True)
    odd = sorted(set(file.type_counts) - set(_TYPES))
    if odd:
        raise ConfigError(f"models: {file.path} has tensors of type {', '.join(odd)}, expected {', '.join(_TYPES)}")


def _tensor(file: GgufFile, name: str) -> Any:
    if name not in file.tensors:
        raise ConfigError(f"models: {file.path} has no tensor {name!r}, expected it")
    return file.tensors[name]


def _short(value: float) -> float:
    """The shortest number that rounds to the same float32: 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def _rope_scaling(file: GgufFile, own: _Own) -> dict[str, Any] | None:
    if _FACTORS in file.tensors:
        # One factor for each wavelength: LongRoPE with the same ones for all lengths, and scores as they are.
        factors = [_short(each) for each in _tensor(file, _FACTORS).data.reshape(-1).tolist()]
        return {"rope_type": "longrope", "long_factor": factors, "short_factor": factors, "attention_factor": 1.0}
    kind = own.get("rope.scaling.type", "none")
    own.want("rope.scaling.type", kind, "none", "linear", "yarn")
    own.want("rope.scale_linear", own.get("rope.scale_linear", 1.0), 1.0)
    if kind == "none":
        return None
    factor = own.need("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    own.want("rope.scaling.attn_factor", own.get("rope.scaling.attn_factor", 1.0), 1.0)
    original = own.need("rope.scaling.original_context_length")
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def _experts(file: GgufFile, own: _Own) -> dict[str, Any]:
    """Whether weights sum to 1 is known of architectures, as in llama.cpp; sizes are those of the tensors."""
    own.want("expert_gating_func", own.get("expert_gating_func", 1), 1)  # softmax
    own.want("expert_weights_scale", own.get("expert_weights_scale", 1.0), 0.0, 1.0)
    shared = file.tensors.get("blk.0.ffn_gate_shexp.weight")
    return {
        "num_experts": own.need("expert_count"),
        "num_experts_per_tok": own.need("expert_used_count"),
        "moe_intermediate_size": int(_tensor(file, "blk.0.ffn_gate_exps.weight").shape[1]),
        "shared_expert_intermediate_size": 0 if shared is None else int(shared.shape[1]),
        "norm_topk_prob": file.architecture != "qwen2moe",
    }


def _gemma(file: GgufFile, own: _Own, by_width: int) -> dict[str, Any]:
    name = file.architecture
    if name == "gemma":
        return {}
    size = by_width if own.need("block_count") == _BY_WIDTH[name] else own.need("attention.key_length")
    values = {"query_pre_attn_scalar": size, "sliding_window": own.need("attention.sliding_window")}
    if name == "gemma2":
        values["attn_logit_softcapping"] = own.get("attn_logit_softcapping", 50.0)
        values["final_logit_softcapping"] = own.get("final_logit_softcapping", 30.0)
    return values


def _quantization(file: GgufFile) -> dict[str, Any]:
    """The bits of what layers have most of; None where all are floats."""
    kinds = [kind for kind in file.type_counts if kind not in _FLOATS]
    if not kinds:
        return {}
    return {"quantization_config": {"quant_method": "gguf", "bits": INTEGER_BITS.get(kinds[0], 16)}}
