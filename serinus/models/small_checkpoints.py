"""Small checkpoints made on the spot: random Llama, Qwen, Mistral, Gemma (and the toy), with a real tokenizer.

Used by `serinus demo`, by the canary's self-test, by tests and by benchmarks. transformers writes config.json and names
the tensors, so the files are those of a real checkpoint; it is imported only when such a checkpoint is made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
_OLMO3_ROPE = {
    "full_attention": {**_YARN, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.08,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
_GPT_OSS_ROPE = {**_YARN, "rope_theta": 150000.0, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_DEEPSEEK = {
    **_GROUPED,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama3": ("LlamaForCausalLM", {"rope_parameters": _LLAMA3_ROPE}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral_swa": ("MistralForCausalLM", {"sliding_window": 24}),
    "gemma": ("GemmaForCausalLM", {}),
    "glm": ("GlmForCausalLM", {}),
    "glm4": ("Glm4ForCausalLM", {}),
    "granite": ("GraniteForCausalLM", _GRANITE),
    "phi3": ("Phi3ForCausalLM", {}),
    "qwen2_yarn": ("Qwen2ForCausalLM", {"rope_parameters": _YARN}),
    "mixtral": ("MixtralForCausalLM", _EXPERTS),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 96}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_QWEN_EXPERTS, "norm_topk_prob": True}),
    "glm4_moe": ("Glm4MoeForCausalLM", {**_GROUPED, "use_qk_norm": True}),
    "dots1": ("Dots1ForCausalLM", _GROUPED),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "norm_topk_prob": False, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v2_lite": (
        "DeepseekV2ForCausalLM",
        {
            **_DEEPSEEK,
            "norm_topk_prob": False,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_DEEPSEEK, "num_nextn_predict_layers": 0}),
    "granitemoe": ("GraniteMoeForCausalLM", {**_GRANITE, **_EXPERTS}),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", {**_GRANITE, **_EXPERTS, "shared_intermediate_size": 96}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {**_GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 24, "query_pre_attn_scalar": 20}),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {"sliding_window": 24, "query_pre_attn_scalar": 20, "rope_parameters": _GEMMA3_ROPE},
    ),
    "gpt_oss": ("GptOssForCausalLM", {**_EXPERTS, "sliding_window": 24, "rope_parameters": _GPT_OSS_ROPE}),
    "cohere": ("CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": ("Cohere2ForCausalLM", {"sliding_window": 24, "logit_scale": 0.25}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {"sliding_window": 24, "rope_parameters": _OLMO3_ROPE}),
}
"""Family -> architecture, fields unless the caller says otherwise."""

FAMILIES = tuple(_KINDS)
"""`llama3` is Llama with the llama3 rope scaling, phi3 has LongRoPE, qwen2_yarn, olmo3 and deepseek_v2_lite YaRN;
mistral_swa, gemma2, gemma3_text, cohere2, olmo3 and gpt_oss slide over 24 positions."""

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
"""Ids 0 to 4."""

_LAYER_TYPES = {"F": "full_attention", "S": "sliding_attention"}
_EOS_ID, _BOS_ID, _PAD_ID, _IM_END_ID = 2, 1, 0, 4

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SENTENCES = (
    "The canary sings while the air in the mine is good, and falls silent before the miners notice.",
    "A cache of keys and values remembers every token of the prompt, so that nothing is computed twice.",
    "Prefill reads the whole question at once; decode writes the answer, one token after the other.",
    "Der Girlitz ist der kleinste europäische Vertreter der Gattung Serinus; er zwitschert von früh bis spät.",
    "Le serin des Canaries chante au printemps, à l'aube, et l'on dit qu'il apprend d'autres mélodies.",
    "El canario silvestre vive en las islas; señala con su canto que la mañana será tranquila.",
    "カナリアは鉱山の空気を知らせる鳥です。小さな歌が人の命を守りました。",
    "金丝雀在矿井里歌唱，空气变坏时它最先沉默。缓存里的每一页都有主人。",
    "Канарейка поёт, пока воздух чист. Каждая страница памяти проверена на всём своём пути.",
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    '{"model": "serinus", "messages": [{"role": "user", "content": "Hello, how are you today?"}], "stream": true}',
    "What is the capital of France? The capital of France is Paris. What is seven times six? It is forty-two.",
    "Once upon a time there was a small yellow bird who lived in a cage by the window of a printing house. 🐤🎶",
)


def make_checkpoint(
    path: str | Path,
    family: str = "qwen3",
    *,
    hidden: int = 64,
    intermediate: int | None = None,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int | None = None,
    vocab: int = 512,
    context: int = 2048,
    tied: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    shards: int = 1,
    tokenizer: bool = True,
    spread: float = 1.0,
    stacked: bool = False,
    **config: Any,
) -> Path:
    """Write a random checkpoint of a family into the directory `path` and return it.

    Args:
        family: one of FAMILIES.
        hidden, intermediate, layers, heads, kv_heads, head_size, vocab, context, tied: sizes as in config.json;
            intermediate None = 3 * hidden, head_size None = hidden / heads.
        dtype: float32, bfloat16 or float16.
        seed: same seed, same bytes.
        shards: number of safetensors files; above 1 with an index.
        tokenizer: whether to train and write one (needs vocab >= 512).
        spread: matrices are normal with deviation spread / sqrt(columns), so that logits differ by about as much.
        stacked: experts as transformers holds them, two tensors a layer; else three of each, as most have them.
        config: more fields of config.json, e.g. attention_bias=True.
    Cost: a second or two, mostly the import of transformers.
    """
    import torch
    from safetensors.torch import save_file

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate or 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size or hidden // heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "bos_token_id": _BOS_ID,
        "eos_token_id": [_EOS_ID, _IM_END_ID],
        "pad_token_id": _PAD_ID,
        **config,
    }
    model = _skeleton(family, settings)
    chance = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in sorted(model.items()):
        if tied and name == "lm_head.weight":
            continue
        noise = torch.empty(shape).normal_(generator=chance)
        state[name] = _scaled(family, name, noise, spread).to(getattr(torch, dtype))
    state = _unstacked(family, state, stacked=stacked)
    _write_config(folder, family, settings, dtype)
    names = sorted(state)
    numbered = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    files = numbered if shards > 1 else ["model.safetensors"]
    weight_map = {name: files[i * shards // len(names)] for i, name in enumerate(names)}
    for file in files:
        part = {name: state[name].contiguous() for name in names if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    if shards > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    if tokenizer:
        make_tokenizer(folder, vocab=vocab, context=context)
    return folder


def make_toy(
    path: str | Path,
    *,
    vocab: int = 512,
    layers: int = 3,
    context: int = 1024,
    kv_heads: int = 1,
    head_size: int = 8,
    seed: int = 0,
    tokenizer: bool = True,
    window: int | None = None,
    layer_types: str = "",
    latent: bool = False,
) -> Path:
    """Write a toy checkpoint (models/toy.py): a config.json and, with `tokenizer` (vocab >= 512), a tokenizer.

    With a `window` (at least 2), layers slide: all of them, or those that `layer_types` calls S and not F, as "SFS".
    `latent`: each layer has one row of KV, which every rank holds.
    `seed` only tells two toys apart in their signature. With a tokenizer, the special ids are never generated.
    Cost: milliseconds; imports neither torch nor transformers.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    reserved = len(SPECIAL_TOKENS) if tokenizer else 0
    config = {
        "architectures": ["SerinusToyForCausalLM"],
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": context,
        "reserved_ids": reserved,
        "dtype": "bfloat16",
        "seed": seed,
        **({} if window is None else {"sliding_window": window}),
        **({"layer_types": [_LAYER_TYPES[letter] for letter in layer_types]} if layer_types else {}),
        **({"latent": True, "num_attention_heads": 4} if latent else {}),
        **({"eos_token_id": _EOS_ID, "bos_token_id": _BOS_ID} if tokenizer else {}),
    }
    _write_json(folder / "config.json", config)
    if tokenizer:
        make_tokenizer(folder, vocab=vocab, context=context)
    return folder


def make_tokenizer(folder: Path, *, vocab: int = 512, context: int = 2048) -> int:
    """Train a byte-level BPE on a few sentences and write its files; returns the number of its tokens (<= vocab).

    Every text survives the round trip: all 256 bytes are tokens. Raises ValueError for vocab < 512.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < 512:
        raise ValueError(f"models: a tokenizer for vocab {vocab}, expected at least 512 (256 bytes, specials, merges)")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab, 2048),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(_SENTENCES, trainer)
    trained.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": _BOS_ID, "eos_token_id": [_EOS_ID, _IM_END_ID], "pad_token_id": _PAD_ID},
    )
    return int(trained.get_vocab_size())


def _config_of(family: str, settings: dict[str, Any]) -> Any:
    """The transformers config object."""
    import transformers

    if family not in _KINDS:
        raise ValueError(f"models: family {family!r}, expected one of {', '.join(FAMILIES)}")
    architecture, extra = _KINDS[family]
    settings = {**extra, **settings}
    if family.startswith(("qwen2", "phi3", "dots1", "granitemoe", "deepseek")):
        settings.pop("head_dim")  # it is hidden / heads
    if family == "granitemoehybrid":
        settings.setdefault("layer_types", ["attention"] * settings["num_hidden_layers"])
        settings.setdefault("shared_intermediate_size", settings["intermediate_size"])
    if family.startswith("deepseek"):
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    if family == "phi3":
        settings.setdefault("rope_parameters", _longrope(settings["hidden_size"] // settings["num_attention_heads"]))
        settings.setdefault("original_max_position_embeddings", 64)  # as of 5.24 it wins over that of the rope
    return getattr(transformers, architecture).config_class(architectures=[architecture], **settings)


def _longrope(head_size: int) -> dict[str, Any]:
    """LongRoPE, of three quarters of a head's elements, from position 64 on."""
    pairs = head_size * 3 // 8
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.0 + 0.7 * i for i in range(pairs)],
        "original_max_position_embeddings": 64,
    }


def _skeleton(family: str, settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the family's tensors, as transformers has them."""
    import torch
    import transformers

    config = _config_of(family, settings)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _scaled(family: str, name: str, noise: Any, spread: float) -> Any:
    """What a tensor holds, made of normal noise; sinks are apart as much as scores are."""
    if name.endswith(".sinks"):
        return noise * 2.0
    if noise.dim() > 1 and not name.endswith("norm.weight"):
        return noise * (spread * noise.shape[-1] ** -0.5)
    return noise * 0.1 + (1.0 if name.endswith("norm.weight") and "gemma" not in family else 0.0)


_OLD_NAMES = {
    "granitemoe": (
        (".experts.gate_up_proj", ".input_linear.weight"),
        (".experts.down_proj", ".output_linear.weight"),
        (".router.", ".router.layer."),
    ),
    "mixtral": (
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    ),
}
"""What families call their experts in the checkpoints that people have, where that differs."""


def _unstacked(family: str, state: dict[str, Any], *, stacked: bool) -> dict[str, Any]:
    """With three tensors of each expert in place of stacks, and other names as in `_OLD_NAMES`; or as it is (`gpt_oss`
    always: its checkpoints have stacks)."""
    if stacked or family == "gpt_oss":
        return state
    single = {}
    for name, tensor in state.items():
        base = name.removesuffix(".gate_up_proj").removesuffix(".down_proj")
        is_stack = base.endswith(".mlp.experts")
        for i, expert in enumerate(tensor if is_stack else ()):
            if name.endswith(".down_proj"):
                single[f"{base}.{i}.down_proj.weight"] = expert
            else:
                single[f"{base}.{i}.gate_proj.weight"], single[f"{base}.{i}.up_proj.weight"] = expert.chunk(2)
        if not is_stack:
            single[name] = tensor
    for new, old in _OLD_NAMES.get(family.removesuffix("shared"), ()):
        single = {name.replace(new, old): tensor for name, tensor in single.items()}
    return single


def _write_config(folder: Path, family: str, settings: dict[str, Any], dtype: str) -> None:
    config = _config_of(family, settings)
    config.dtype = dtype
    config.save_pretrained(folder)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
