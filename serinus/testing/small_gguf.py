"""A checkpoint as a GGUF file, as llama.cpp's conversion writes it; for tests and benchmarks.

The `gguf` package quantizes; types that it only reads (those with superblocks of 256) get random blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GgufWeights = dict[str, NDArray[np.float32]]
"""Weights by transformers' names, in fp32."""
_PERMUTED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the scales of a superblock lie, in float16."""


def write_gguf(
    checkpoint: Path, path: Path, kind_of: Callable[[str], str], *, parts_of: int = 0, **metadata: Any
) -> GgufWeights:
    """Write a checkpoint of a family that GGUF files are read of; returns what its weights have become.

    Args:
        checkpoint: config.json and safetensors files, and a byte-level tokenizer.json, or none.
        path: of the file.
        kind_of: gives for transformers' name of a matrix its type, as Q8_0; other tensors are F32.
        parts_of: tensors of a part, where the file is cut into several; 0 = it is not.
        metadata: numbers that replace those made of config.json, by their keys less the architecture, "." as "__".
    """
    import gguf
    from safetensors.torch import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    name = config["model_type"].removesuffix("_text")
    kinds = {arch: kind for kind, arch in gguf.MODEL_ARCH_NAMES.items()}
    name = "llama" if name in ("mistral", "mixtral") else name.replace("_moe", "moe")
    names = gguf.get_tensor_name_map(kinds[name], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, name, split_max_tensors=parts_of)
    for key, value in {**_metadata(config, name), **metadata}.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        (writer.add_float32 if isinstance(value, float) else add)(f"{name}.{key.replace('__', '.')}", value)
    _add_tokenizer(writer, checkpoint)
    chance = np.random.default_rng(0)
    written: GgufWeights = {}
    tensors: dict[str, Any] = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors |= load_file(file)
    for ours, values in sorted(_stacked(tensors).items()):
        order = _order(config, ours, len(values)) if name == "llama" else np.arange(len(values))
        values = values[order] + (1.0 if name.startswith("gemma") and ours.endswith("norm.weight") else 0.0)
        kind = gguf.GGMLQuantizationType["F32" if values.ndim == 1 or len(values) == 1 else kind_of(ours)]
        is_random = kind.name in _HALVES
        values = values.reshape(-1) if len(values) == 1 else values
        data = _blocks(chance, values.shape, kind.name) if is_random else gguf.quantize(values, kind)
        stored = names.get_name(ours.replace(".*", ""), try_suffixes=(".weight", ".bias"))
        assert stored, f"testing: no name in GGUF for {ours}"
        writer.add_tensor(stored, data, raw_dtype=kind)
        found = gguf.dequantize(data, kind)
        found = found if len(order) > 1 else found[None]
        whole = np.empty_like(found)
        whole[order] = found
        stack = ".experts." in ours
        written |= {ours.replace("*", str(i)): each for i, each in enumerate(whole)} if stack else {ours: whole}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _stacked(tensors: dict[str, Any]) -> GgufWeights:
    """With all experts of a layer as one, by the name of one with a star for its number."""
    found = {name: tensor.float().numpy() for name, tensor in tensors.items() if ".experts." not in name}
    stars = sorted({re.sub(r"experts\.\d+", "experts.*", name) for name in tensors if ".experts." in name})
    for star in stars:
        count = sum(re.sub(r"experts\.\d+", "experts.*", name) == star for name in tensors)
        found[star] = np.stack([tensors[star.replace("*", str(i))].float().numpy() for i in range(count)])
    return found


def _metadata(config: dict[str, Any], name: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    size = config.get("head_dim") or hidden // heads
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": config["intermediate_size"],
        "attention__head_count": heads,
        "attention__head_count_kv": config["num_key_value_heads"],
        "attention__key_length": size,
        "attention__value_length": size,
        "attention__layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope__freq_base": float(config.get("rope_theta") or rope["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        values |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    if config.get("sliding_window"):
        values["attention__sliding_window"] = config["sliding_window"]
    if name == "gemma2":
        values["attn_logit_softcapping"] = config["attn_logit_softcapping"]
        values["final_logit_softcapping"] = config["final_logit_softcapping"]
    if rope.get("rope_type") in ("linear", "yarn"):
        values |= {"rope__scaling__type": rope["rope_type"], "rope__scaling__factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        values["rope__scaling__original_context_length"] = rope["original_max_position_embeddings"]
    return values


def _add_tokenizer(writer: Any, checkpoint: Path) -> None:
    if not (checkpoint / "tokenizer.json").exists():
        writer.add_tokenizer_model("none")
        return
    described = json.loads((checkpoint / "tokenizer.json").read_text())
    about = json.loads((checkpoint / "tokenizer_config.json").read_text())
    vocab = dict(described["model"]["vocab"])
    special = {token["content"]: token["id"] for token in described["added_tokens"]}
    vocab |= special
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
    writer.add_chat_template(about["chat_template"])
    writer.add_bos_token_id(vocab[about["bos_token"]])
    writer.add_eos_token_id(vocab[about["eos_token"]])
    writer.add_pad_token_id(vocab[about["pad_token"]])


def _order(config: dict[str, Any], name: str, count: int) -> NDArray[np.int64]:
    """Which row comes where: those that rotate together become neighbours."""
    heads = _PERMUTED.get(name.split(".")[-2])
    rows = np.arange(count)
    return rows if heads is None else rows.reshape(config[heads], 2, -1).swapaxes(1, 2).reshape(-1)


def _blocks(chance: np.random.Generator, shape: tuple[int, ...], kind: str) -> NDArray[np.uint8]:
    """Random superblocks with small scales."""
    import gguf

    size, byte_count = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = chance.integers(0, 256, (*shape[:-1], shape[-1] // size, byte_count), dtype=np.uint8)
    for at in _HALVES[kind]:
        scale = (chance.uniform(0.5, 1.0, blocks.shape[:-1]) / (4000 if kind == "Q6_K" else 16000)).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
