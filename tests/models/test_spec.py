"""config.json in its old and new spellings, and what it means."""

from __future__ import annotations

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
from serinus.models import KNOWN_ARCHITECTURES, choose_dtype, load_spec
from serinus.models.rope import frequencies
from serinus.models.spec import RopeSpec
from serinus.testing.checkpoints import make_toy

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


def test_what_a_config_leaves_out_has_the_familys_default(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, BASE))
    assert (spec.kv_head_count, spec.head_size, spec.norm_eps) == (4, 16, 1e-6)
    assert spec.rope == RopeSpec(theta=10000.0)
    assert (spec.tied, spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.qk_norm) == (False,) * 5
    assert (spec.eos_ids, spec.bos_id, spec.dtype) == ((), None, "float32")


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


def test_eos_ids_of_both_files_count(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, {**BASE, "eos_token_id": 7, "bos_token_id": 1}, {"eos_token_id": [9, 7]}))
    assert (spec.eos_ids, spec.bos_id) == ((7, 9), 1)


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": 1000}, 1000),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": None}, 4096),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": 9000}, 4096),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1000, "use_sliding_window": True}, 1000),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1000, "use_sliding_window": False}, 4096),
        ({"architectures": ["Qwen3ForCausalLM"], "sliding_window": 1000}, 4096),
    ],
)
def test_the_context_ends_where_a_window_would_begin_to_slide(
    tmp_path: Path, changes: dict[str, Any], context: int
) -> None:
    assert load_spec(write(tmp_path, {**BASE, **changes})).context_length == context


def test_overrides_lie_over_the_file(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, BASE), overrides={"max_position_embeddings": 128})
    assert spec.context_length == 128


def test_llama3_rope_stretches_long_wavelengths_and_keeps_short_ones() -> None:
    rope = RopeSpec(
        theta=10000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=256
    )
    plain, scaled = frequencies(RopeSpec(theta=10000.0), 64), frequencies(rope, 64)
    wavelengths = 2 * math.pi / plain
    for w, before, after in zip(wavelengths.tolist(), plain.tolist(), scaled.tolist(), strict=True):
        if w <= 256 / 4:
            assert after == before
        elif w >= 256:
            assert after == pytest.approx(before / 8, rel=1e-6)
        else:
            assert before / 8 < after < before


def test_linear_rope_stretches_everything() -> None:
    plain, scaled = frequencies(RopeSpec(), 32), frequencies(RopeSpec(kind="linear", factor=4.0), 32)
    assert torch.equal(scaled, plain / 4)


def test_the_signature_tells_models_apart_and_does_not_depend_on_the_place(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    one = load_spec(checkpoints["qwen3"])
    copy = shutil.copytree(checkpoints["qwen3"], tmp_path / "copy")
    assert load_spec(copy).signature == one.signature
    file = sorted(copy.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert load_spec(copy).signature != one.signature
    assert len({load_spec(path).signature for path in checkpoints.values()}) == len(checkpoints)


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
    with pytest.raises(ConfigError, match="dtype 'float16', expected auto, float32, bfloat16"):
        choose_dtype(load_spec(checkpoints["llama"]), "float16")


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
