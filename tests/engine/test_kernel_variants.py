"""No request waits for a compiler: whatever kernel an engine on a GPU needs, its start has compiled.

That is asked of Triton itself, without a GPU (tests/engine/kernel_variants.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serinus.models.small_checkpoints import make_checkpoint

ROTATING = {"kv_canary": "raise", "kv_canary_coverage": "rotating:3"}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "qwen2": {},
    "gemma2": {"sliding_window": 600},
    "gemma3_text": {"sliding_window": 600, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "qwen3_moe": {"moe_intermediate_size": 256},
    "gpt_oss": {"sliding_window": 128, "intermediate": 256},
    "deepseek_v3": {"kv_lora_rank": 128, "qk_rope_head_dim": 64, "moe_intermediate_size": 256},
}
"""Of families, the settings that are not those of all."""


def told(folder: Path, family: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What such an engine compiles, in a process of its own: much of it is put in the place of what a GPU does."""
    make_checkpoint(
        folder, family, hidden=512, layers=3, heads=16, kv_heads=8, head_size=64, vocab=1 << 16, context=16384,
        dtype="bfloat16", **{"intermediate": 1536, **SHAPES[family]},
    )  # fmt: skip
    words = [sys.executable, "-m", "tests.engine.kernel_variants", str(folder), json.dumps(settings)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_start_compiles_what_requests_of_any_kind_need(tmp_path: Path) -> None:
    found = told(tmp_path, "qwen3", ROTATING)
    assert found["later"] == []
    assert found["launches"] > 2000
    assert found["started"] <= 64, "each takes a start a second where none is compiled"


@pytest.mark.proof
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"kv_canary": "none"}),
        ("qwen3", {"kv_canary": "heal", "kv_canary_coverage": "full", "disable_cuda_graph": True}),
        ("qwen3", {"kv_canary_real_data": "partial", "max_running_requests": 5}),
        ("qwen3", {"quantization": "int4"}),
        ("qwen3", {"quantization": "int8", **ROTATING}),
        ("qwen2", {"disable_radix_cache": True}),
        ("gemma2", ROTATING),
        ("gemma3_text", ROTATING),
        ("qwen3_moe", {}),
        ("gpt_oss", ROTATING),
        ("deepseek_v3", ROTATING),
    ],
)
def test_whatever_the_model_and_the_settings_are(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    found = told(tmp_path, family, settings)
    assert found["later"] == []
    assert found["launches"] > 1000
    assert found["started"] <= 80
