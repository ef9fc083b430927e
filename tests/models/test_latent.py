"""Latent attention in a pair of engines against transformers, and the configs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from serinus.core.errors import ConfigError
from serinus.core.parts import Part
from serinus.engine.step_floor import read_bytes
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_checkpoint
from tests.models.parity import check_handed_over_with_a_prefix

pytestmark = pytest.mark.slow


@pytest.mark.proof
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3"])
def test_prefill_here_and_decode_there_give_the_log_probabilities_of_transformers_over_700_tokens(
    tmp_path: Path, family: str
) -> None:
    """In chunks, with 400 tokens of a prefix that is cached, past YaRN's first context, watched."""
    path = make_checkpoint(tmp_path, family, layers=3, tokenizer=False, seed=3)
    check_handed_over_with_a_prefix(path)


def test_a_row_of_kv_is_one_head_of_part_latent_and_scores_have_the_temperature_of_yarn(tmp_path: Path) -> None:
    spec = load_spec(make_checkpoint(tmp_path, "deepseek_v2_lite", tokenizer=False))
    assert (spec.kv_head_count, spec.head_size) == (1, 64 + 16)
    assert spec.parts == (Part.FULL, Part.LATENT)
    assert set(spec.layer_parts) == {Part.LATENT}
    assert spec.attention_scale == pytest.approx(40**-0.5 * (0.1 * 0.707 * 1.3862943611 + 1) ** 2)


@pytest.mark.parametrize("family", ["deepseek_v2_lite", "deepseek_v3"])
def test_a_decode_step_reads_the_weights_that_the_checkpoint_has(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path, family, layers=2, tokenizer=False, first_k_dense_replace=2)
    with safe_open(path / "model.safetensors", framework="pt") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    matrices = [shape for name, shape in shapes.items() if len(shape) == 2 and "embed_tokens" not in name]
    assert read_bytes(load_spec(path), 1) == sum(rows * columns for rows, columns in matrices)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"norm_topk_prob": True}, "field 'norm_topk_prob' is True, expected false"),
        ({"topk_method": "noaux_tc"}, "field 'topk_method' is 'noaux_tc', expected greedy or group_limited_greedy"),
        ({"attention_bias": True}, "field 'attention_bias' is True, expected false where q_lora_rank is null"),
        ({"qk_rope_head_dim": 15}, "field 'qk_rope_head_dim' is 15, expected an even number"),
        ({"kv_lora_rank": None}, "field 'kv_lora_rank' is None, expected an integer"),
    ],
)
def test_a_config_that_would_be_computed_otherwise_is_refused_by_its_field(
    tmp_path: Path, override: dict[str, Any], words: str
) -> None:
    path = make_checkpoint(tmp_path, "deepseek_v2_lite", tokenizer=False)
    with pytest.raises(ConfigError, match=words):
        load_spec(path, overrides=override)
