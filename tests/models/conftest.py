"""Checkpoints shared by the tests of this room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serinus.models.small_checkpoints import FAMILIES, make_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small random fp32 checkpoint per family, sharded and tied here and there."""
    root = tmp_path_factory.mktemp("checkpoints")
    extra: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": True, "mlp_bias": True},
        "llama3": {"shards": 3},
        "qwen2": {"tied": True},
        "qwen3": {"tied": True, "shards": 2, "head_size": 32},
        "mistral": {"heads": 8, "kv_heads": 2},
        "mistral_swa": {"layers": 3},
        "gemma": {"tied": True, "head_size": 32},
        "glm": {"attention_bias": True},
        "glm4": {"attention_bias": True, "kv_heads": 1},
        "granite": {"tied": True},
        "mixtral": {"spread": 1.5},
        "qwen2_moe": {"layers": 3, "mlp_only_layers": [1], "shards": 2},
        "qwen3_moe": {"tied": True, "attention_bias": True, "stacked": True},
        "glm4_moe": {"layers": 3, "attention_bias": True, "stacked": True},
        "dots1": {"layers": 3},
        "deepseek_v2": {"attention_bias": True, "shards": 2},
        "deepseek_v2_lite": {"layers": 3},
        "deepseek_v3": {"layers": 3, "attention_bias": True, "stacked": True},
        "cohere": {"tied": True, "layers": 3, "attention_bias": True},
        "cohere2": {"tied": True, "layers": 5},
        "olmo2": {"layers": 3, "attention_bias": True},
        "olmo3": {"layers": 5, "head_size": 16},
        "smollm3": {"layers": 5},
        "qwen2_yarn": {"layers": 3},
        "gemma2": {"tied": True, "layers": 4},
        "gemma3_text": {"tied": True, "layers": 7, "kv_heads": 1, "head_size": 32},
        "gpt_oss": {"layers": 3, "head_size": 32, "intermediate": 96, "shards": 2},
    }
    return {f: make_checkpoint(root / f, f, seed=i, **extra.get(f, {})) for i, f in enumerate(FAMILIES)}
