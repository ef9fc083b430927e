"""No request waits for a compiler: whatever kernel an engine on a GPU needs, its start has compiled.

That is asked of Triton itself, without a GPU (tests/engine/kernel_variants.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

ROTATING = {"kv_canary": "raise", "kv_canary_coverage": "rotating:3"}


def told(family: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What such an engine compiles, in a process of its own: much of it is put in the place of what a GPU does."""
    words = [sys.executable, "-m", "tests.engine.kernel_variants", family, json.dumps(settings)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_start_compiles_what_requests_of_any_kind_need() -> None:
    found = told("qwen3", ROTATING)
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
def test_whatever_the_model_and_the_settings_are(family: str, settings: dict[str, Any]) -> None:
    found = told(family, settings)
    assert found["later"] == []
    assert found["launches"] > 1000
    assert found["started"] <= 80
