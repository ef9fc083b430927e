"""config.json in its old and new spellings, and what it means."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from serinus.core.errors import ConfigError
from serinus.core.parts import Part
from serinus.models import KNOWN_ARCHITECTURES, choose_dtype, load_spec
from serinus.models.families import FAMILIES
from serinus.models.rope import frequencies
from serinus.models.rope_fields import RopeSpec
from serinus.models.small_checkpoints import make_checkpoint, make_toy

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_a_hybrid_is_served_where_all_layers_are_attention_and_refused_for_its_states(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "granitemoehybrid", layers=2, tokenizer=False)
    written = json.loads((path / "config.json").read_text())
    assert load_spec(path).plain_layers == ()
    (path / "config.json").write_text(json.dumps({**written, "position_embedding_type": None}))
    assert load_spec(path).plain_layers == (0, 1)
    for kinds in (["mamba", "attention"], ["attention"], None):
        (path / "config.json").write_text(json.dumps({**written, "layer_types": kinds}))
        with pytest.raises(ConfigError, match="2 of attention: the state of other layers is no paged KV"):
            load_spec(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen3Next", "Mamba", "Mamba2", "Jamba", "FalconH1", "Bamba"])
def test_models_with_states_are_refused_for_them(tmp_path: Path, kind: str) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")()
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{kind}ForCausalLM' cannot run through transformers: its state is no paged"):
        load_spec(tmp_path)


def test_what_a_config_leaves_out_has_the_familys_default(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, BASE))
    assert (spec.kv_head_count, spec.head_size, spec.norm_eps) == (4, 16, 1e-6)
    assert spec.rope == RopeSpec(theta=10000.0)
    assert (spec.tied, spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.qk_norm) == (False,) * 5
    assert (spec.eos_ids, spec.bos_id, spec.dtype) == ((), None, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_norms_ties_and_scales_that_a_config_leaves_out_are_those_of_transformers(
    tmp_path: Path, architecture: str
) -> None:
    import transformers

    theirs = getattr(transformers, architecture).config_class()
    small = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "qk_rope_head_dim"), 16)
    small |= {"num_experts_per_tok": 2, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    layers = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    config = {**BASE, **small, **layers, "num_key_value_heads": 2, "architectures": [architecture]}
    spec = load_spec(write(tmp_path, config))
    assert spec.norm_eps == getattr(theirs, "rms_norm_eps", getattr(theirs, "layer_norm_eps", None))
    assert spec.tied == theirs.tie_word_embeddings
    if FAMILIES[architecture].qkv_bias is None:
        assert spec.qkv_bias == theirs.attention_bias
    if spec.experts is not None:
        assert spec.experts.groups == (getattr(theirs, "n_group", None) or 1)
        assert spec.experts.groups_chosen == (getattr(theirs, "topk_group", None) or 1)
        assert spec.experts.scale == getattr(theirs, "routed_scaling_factor", 1.0)
        assert spec.experts.normalized == getattr(theirs, "norm_topk_prob", True)
    if isinstance(theirs.default_theta, float):
        assert spec.rope.theta == theirs.default_theta


@pytest.mark.parametrize(
    ("architecture", "qkv_bias", "output_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", True, True, False),
        ("MistralForCausalLM", False, False, False),
        ("Qwen2ForCausalLM", True, False, False),
        ("Qwen3ForCausalLM", True, True, True),
    ],
)
def test_attention_bias_means_what_the_family_makes_of_it(
    tmp_path: Path, architecture: str, qkv_bias: bool, output_bias: bool, qk_norm: bool
) -> None:
    config = {**BASE, "architectures": [architecture], "attention_bias": True, "num_key_value_heads": 2}
    spec = load_spec(write(tmp_path, config))
    assert (spec.qkv_bias, spec.output_bias, spec.qk_norm) == (qkv_bias, output_bias, qk_norm)


def test_old_and_new_spellings_of_rope_and_dtype_are_the_same_model(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    old = {
        **BASE,
        "rope_theta": 5e5,
        "rope_scaling": {"type": "llama3", **scaling},
        "torch_dtype": "bfloat16",
    }
    new = {**BASE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}, "dtype": "bfloat16"}
    one, two = load_spec(write(tmp_path / "old", old)), load_spec(write(tmp_path / "new", new))
    assert one.rope == RopeSpec(
        theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=512
    )
    assert (one.rope, one.dtype, one.signature) == (two.rope, two.dtype, two.signature)


def test_rope_scaling_wins_over_what_a_file_says_in_rope_parameters(tmp_path: Path) -> None:
    new = {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    scaling, other = {"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    path = write(tmp_path, {**new, "rope_scaling": scaling})
    assert load_spec(path).rope == RopeSpec(theta=5e5, kind="linear", factor=4.0)
    assert load_spec(path, overrides={"rope_parameters": other}).rope == RopeSpec(kind="linear", factor=2.0)
    path = write(tmp_path, new)
    assert load_spec(path, overrides={"rope_scaling": scaling}).rope == RopeSpec(theta=5e5, kind="linear", factor=4.0)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"rope_scaling": None, "rope_theta": 5e5}])
def test_gpt_oss_stretches_its_wavelengths_where_the_config_says_nothing_of_it(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    import transformers

    config = {**BASE, "architectures": ["GptOssForCausalLM"], "num_key_value_heads": 2, "num_local_experts": 8, **given}
    theirs = transformers.GptOssConfig(**given).rope_parameters
    rope = load_spec(write(tmp_path, {**config, "num_experts_per_tok": 2})).rope
    assert (rope.kind, rope.theta) == (theirs["rope_type"], theirs["rope_theta"])
    assert rope.original_context == theirs["original_max_position_embeddings"]
    found = {**dict(rope.given), "beta_fast": 32.0, "beta_slow": 1.0}  # which yarn has where they are not named
    assert {name: theirs[name] for name in found} == found


def test_eos_ids_are_those_of_the_config(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, {**BASE, "eos_token_id": [9, 7, 9], "bos_token_id": 1}, {"eos_token_id": 3}))
    assert (spec.eos_ids, spec.bos_id) == ((7, 9), 1)


F, S = Part.FULL, Part.SWA
MISTRAL = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1000}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"]}
ON = {"use_sliding_window": True}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 1000}
GEMMA3 = {**GEMMA2, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}
MIXED = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "parts", "window"),
    [
        ({**MISTRAL, "sliding_window": 1000}, (S, S), 1000),
        ({**MISTRAL, "sliding_window": None}, (F, F), None),
        ({**MISTRAL, "max_position_embeddings": 9000}, (S, S), 4096),
        ({**MISTRAL, "sliding_window": 9000}, (F, F), None),
        ({**QWEN2, **ON}, (F, F), None),
        ({**QWEN2, **ON, "max_window_layers": 1}, (F, S), 1000),
        ({**QWEN2, **ON, "max_window_layers": 0}, (S, S), 1000),
        ({**QWEN2, "use_sliding_window": False, "max_window_layers": 1}, (F, F), None),
        ({**QWEN3, "max_window_layers": 1}, (F, F), None),
        ({**QWEN3, **ON, "layer_types": MIXED}, (F, S), 1000),
        (GEMMA2, (S, F, S, F), 1000),
        ({**GEMMA2, "layer_types": MIXED * 2}, (F, S, F, S), 1000),
        (GEMMA3, (S, S, S, S, S, F, S), 1000),
        ({**GEMMA3, "sliding_window_pattern": 2}, (S, F, S, F, S, F, S), 1000),
        ({**GEMMA3, "max_position_embeddings": 1000}, (S, S, S, S, S, F, S), 1000),
        ({"sliding_window": 1000}, (F, F), None),
    ],
)
def test_which_layers_slide_is_read_as_the_family_means_it(
    tmp_path: Path, changes: dict[str, Any], parts: tuple[Part, ...], window: int | None
) -> None:
    spec = load_spec(write(tmp_path, {**BASE, **changes}))
    assert (spec.layer_parts, spec.window) == (parts, window)
    assert spec.parts == ((F, S) if window else (F,))
    assert spec.layers_of(F) == tuple(i for i, part in enumerate(parts) if part is F)
    assert spec.context_length == {**BASE, **changes}["max_position_embeddings"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "given", "parts"),
    [
        ("SmolLM3ForCausalLM", ON, (F, F, F, S, F)),
        ("SmolLM3ForCausalLM", {}, (F,) * 5),
        ("Dots1ForCausalLM", {"max_window_layers": 3}, (F, F, F, S, S)),
        ("Dots1ForCausalLM", {}, (F,) * 5),
        ("Qwen2MoeForCausalLM", {**ON, "max_window_layers": 3}, (S, F, S, F, F)),
        ("Qwen2MoeForCausalLM", {"max_window_layers": 3}, (F,) * 5),
        ("Qwen2ForCausalLM", {**ON, "max_window_layers": 3}, (F, F, F, S, S)),
        ("Qwen3ForCausalLM", {**ON, "max_window_layers": 3}, (F, F, F, S, S)),
        ("Qwen3MoeForCausalLM", ON, (S,) * 5),
        ("Qwen3MoeForCausalLM", {}, (F,) * 5),
    ],
)
def test_without_layer_types_those_layers_slide_that_do_in_transformers(
    tmp_path: Path, architecture: str, given: dict[str, Any], parts: tuple[Part, ...]
) -> None:
    import transformers

    experts = {"num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
    sizes = {"num_hidden_layers": 5, "num_key_value_heads": 2, "sliding_window": 16, **given}
    config = {**BASE, **experts, **sizes, "architectures": [architecture]}
    theirs = getattr(transformers, architecture).config_class(**sizes)
    assert load_spec(write(tmp_path, config)).layer_parts == parts
    kinds = getattr(theirs, "layer_types", None)
    slides = (
        [theirs.sliding_window is not None] * 5 if kinds is None else [kind == "sliding_attention" for kind in kinds]
    )
    assert slides == [part is S for part in parts]


def test_gemma_3_turns_its_sliding_layers_by_another_base(tmp_path: Path) -> None:
    old = {**GEMMA3, "rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": {"type": "linear", "factor": 8.0}}
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    new = {**GEMMA3, "rope_parameters": kinds}
    one = load_spec(write(tmp_path / "old", {**BASE, **old}))
    assert one.rope == RopeSpec(theta=1e6, kind="linear", factor=8.0)
    assert one.rope_swa == RopeSpec(theta=2e4)
    assert load_spec(write(tmp_path / "new", {**BASE, **new})) == dataclasses.replace(one, path=str(tmp_path / "new"))
    bare = load_spec(write(tmp_path / "bare", {**BASE, **GEMMA3}))
    assert (bare.rope, bare.rope_swa) == (RopeSpec(theta=1e6), RopeSpec(theta=1e4))


@pytest.mark.parametrize("window", [24, 4096, None])
def test_layers_of_cohere_2_that_do_not_slide_do_not_rotate_however_long_the_window(
    tmp_path: Path, window: int | None
) -> None:
    config = {**BASE, "architectures": ["Cohere2ForCausalLM"], "num_hidden_layers": 5, "sliding_window": window}
    spec = load_spec(write(tmp_path, config))
    assert spec.plain_layers == ((0, 1, 2, 3, 4) if window is None else (3,))
    assert (spec.window, spec.norm_eps, spec.tied, spec.logit_scale) == (
        24 if window == 24 else None,
        1e-5,
        True,
        1 / 16,
    )


def test_gemma_caps_its_scores_unless_the_config_says_null(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, {**BASE, **GEMMA2}))
    assert (spec.attention_softcap, spec.logit_softcap, spec.attention_scale) == (50.0, 30.0, 1 / 16)
    assert (spec.embedding_scale, spec.gelu, spec.tied, spec.head_size) == (8.0, True, True, 256)
    bare = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 144}
    spec = load_spec(write(tmp_path, {**BASE, **GEMMA2, **bare}))
    assert (spec.attention_softcap, spec.logit_softcap, spec.attention_scale) == (None, None, 1 / 12)


def test_of_a_multimodal_gemma_the_text_model_is_read_with_and_without_a_vision_model(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**BASE, **GEMMA3}}
    assert load_spec(write(tmp_path, config)).architecture == "Gemma3ForCausalLM"
    assert load_spec(write(tmp_path, {**config, "vision_config": {"hidden_size": 8}})).prefix == "language_model."


def test_overrides_lie_over_what_the_text_model_of_a_multimodal_checkpoint_says(tmp_path: Path) -> None:
    text = {**BASE, **GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "tie_word_embeddings": True}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "tie_word_embeddings": True}
    path, kinds = write(tmp_path, whole), {"full_attention": {"rope_type": "linear", "factor": 2.0}}
    changes: dict[str, Any] = {"max_position_embeddings": 128, "rope_parameters": kinds, "tie_word_embeddings": False}
    for overrides in (changes, {"text_config": changes}):
        spec = load_spec(path, overrides=overrides)
        assert (spec.context_length, spec.rope.factor, spec.tied, spec.window) == (128, 2.0, False, 1000)
    with pytest.raises(ConfigError, match="'text_config' is 3, expected an object"):
        load_spec(path, overrides={"text_config": 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**MISTRAL, "sliding_window": 0}, "'sliding_window' is 0"),
        ({**GEMMA2, "layer_types": MIXED}, "'layer_types'"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "'no_rope_layers'"),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "su"}}, "long_factor and short_factor"),
        ({"architectures": ["GlmForCausalLM"], "partial_rotary_factor": 1.5}, "at most 1"),
        ({"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0}, "'residual_multiplier' is 0"),
        (
            {**MISTRAL, "rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "'llama_4_scaling_beta' is 0.1, expected 0 or none",
        ),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "ministral3"}},
            "'model_type' is 'ministral3', expected 'mistral' in text_config of Mistral3ForConditionalGeneration",
        ),
        ({"rope_scaling": {"rope_type": "alibi"}}, "rope type 'alibi' is not known"),
        ({**GEMMA2, "layer_types": ["chunked_attention"] * 4}, "'layer_types'"),
        ({**GEMMA2, "hidden_activation": "gelu"}, "'hidden_activation' is 'gelu'"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "only causal"),
        ({**BASE, "is_causal": False}, "'is_causal' is False, expected true: only models whose"),
        ({**GEMMA3, "rope_parameters": {"rope_type": "default"}}, "objects named full_attention, sliding_attention"),
    ],
)
def test_a_window_or_a_layer_that_makes_no_sense_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_spec(write(tmp_path, {**BASE, **changes}))


def test_overrides_lie_over_the_file(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, BASE), overrides={"max_position_embeddings": 128})
    assert spec.context_length == 128


def test_llama3_rope_stretches_long_wavelengths_and_keeps_short_ones() -> None:
    rope = RopeSpec(
        theta=10000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=256
    )
    plain, scaled = frequencies(RopeSpec(theta=10000.0), 64, 8192)[0], frequencies(rope, 64, 8192)[0]
    wavelengths = 2 * math.pi / plain
    for w, before, after in zip(wavelengths.tolist(), plain.tolist(), scaled.tolist(), strict=True):
        if w <= 256 / 4:
            assert after == before
        elif w >= 256:
            assert after == pytest.approx(before / 8, rel=1e-6)
        else:
            assert before / 8 < after < before


def test_linear_rope_stretches_everything() -> None:
    plain, scaled = frequencies(RopeSpec(), 32, 64)[0], frequencies(RopeSpec(kind="linear", factor=4.0), 32, 64)[0]
    assert torch.equal(scaled, plain / 4)


def test_the_signature_tells_models_apart_and_does_not_depend_on_the_place(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    one = load_spec(checkpoints["qwen3"])
    copy = shutil.copytree(checkpoints["qwen3"], tmp_path / "copy")
    assert one.signature == "", "it is known when the weights are loaded"
    assert load_spec(copy).signed("w").signature == one.signed("w").signature != one.signed("v").signature
    assert one.signed("w").signed("w") == one.signed("w")
    assert len({load_spec(path).signed("w").signature for path in checkpoints.values()}) == len(checkpoints)
    scaled = load_spec(
        copy, overrides={"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    )
    assert scaled.signed("w").signature != one.signed("w").signature
    dummies = [load_spec(copy, load_format="dummy", seed=seed).signature for seed in (0, 0, 1)]
    assert dummies[0] == dummies[1] != dummies[2]


def test_two_toys_differ_by_seed(tmp_path: Path) -> None:
    signatures = [load_spec(make_toy(tmp_path / str(s), seed=s, tokenizer=False)).signature for s in (0, 1)]
    assert signatures[0] != signatures[1]


def test_bf16_is_the_default_where_the_cpu_has_it(checkpoints: dict[str, Path]) -> None:
    spec = load_spec(checkpoints["llama"])
    has = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert choose_dtype(spec) == (torch.bfloat16 if has else torch.float32)
    assert choose_dtype(spec, "float32") == torch.float32
    assert choose_dtype(spec, "bfloat16") == torch.bfloat16


def test_another_dtype_is_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="dtype 'float8', expected auto, float32, bfloat16, float16"):
        choose_dtype(load_spec(checkpoints["llama"]), "float8")


def test_float16_is_for_gpus_and_not_for_gemma(checkpoints: dict[str, Path]) -> None:
    assert choose_dtype(load_spec(checkpoints["llama"]), "float16", "cuda") == torch.float16
    with pytest.raises(ConfigError, match="'float16' on a CPU, expected auto, float32 or bfloat16"):
        choose_dtype(load_spec(checkpoints["llama"]), "float16")
    with pytest.raises(ConfigError, match="'float16' for Gemma2ForCausalLM"):
        choose_dtype(load_spec(checkpoints["gemma2"]), "float16", "cuda")


def test_every_known_architecture_has_a_name_people_find_in_config_files() -> None:
    assert all(name.endswith("ForCausalLM") for name in KNOWN_ARCHITECTURES)


@pytest.mark.slow
def test_reading_a_config_imports_neither_torch_nor_transformers(checkpoints: dict[str, Path]) -> None:
    code = (
        "import sys; from serinus.models import load_spec, resolve; "
        f"load_spec(resolve({str(checkpoints['qwen2'])!r})); "
        "print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
