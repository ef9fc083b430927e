"""Mixtures of experts: how tokens choose, how checkpoints hold experts, and the whole engine around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serinus.core.errors import ConfigError
from serinus.core.sampling import SamplingParams
from serinus.engine import LLM
from serinus.models import load_spec
from serinus.models.experts import ExpertSpec
from serinus.models.mixture import choose_experts
from serinus.models.small_checkpoints import make_checkpoint
from serinus.parallel import Mesh
from serinus.selftest import EnginePair
from tests.models.parity import engine, random_ids, run_in_uneven_chunks, tied_tokens


def by_hand(logits: list[float], spec: ExpertSpec, correction: list[float]) -> dict[int, float]:
    """The weight of each expert of one token, as the papers have it."""
    row = torch.tensor(logits, dtype=torch.float64)
    scores = (1 / (1 + (-row).exp()) if spec.sigmoid else row.exp() / row.exp().sum()).tolist()
    ranked = [score + more for score, more in zip(scores, correction, strict=True)]
    size = spec.count // spec.groups
    groups = [sorted(ranked[first : first + size], reverse=True) for first in range(0, spec.count, size)]
    worth = [sum(group[:2]) if spec.corrected else group[0] for group in groups]
    kept = sorted(range(spec.groups), key=lambda group: -worth[group])[: spec.groups_chosen]
    able = [expert for expert in range(spec.count) if expert // size in kept]
    chosen = sorted(able, key=lambda expert: -ranked[expert])[: spec.chosen]
    total = sum(scores[expert] for expert in chosen) if spec.normalized else 1.0
    return {expert: scores[expert] / total * spec.scale for expert in chosen}


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"normalized": False},
        {"scale": 2.5},
        {"normalized": False, "groups": 4, "groups_chosen": 2, "scale": 16.0},
        {"sigmoid": True, "corrected": True, "groups": 4, "groups_chosen": 2, "scale": 2.5},
        {"sigmoid": True, "corrected": True, "normalized": False},
    ],
    ids=["mixtral", "qwen2", "scaled", "deepseek-v2", "deepseek-v3", "sigmoid"],
)
def test_experts_are_chosen_and_weighed_by_the_rule(rule: dict[str, Any]) -> None:
    spec = ExpertSpec(layers=(0,), count=16, chosen=3, size=8, **rule)
    generator = torch.Generator().manual_seed(4)
    logits_TX = torch.randn((40, 16), generator=generator)
    correction_X = torch.randn(16, generator=generator) * 0.5 if spec.corrected else None
    weights_TK, ids_TK = choose_experts(logits_TX, spec, correction_X)
    for logits, weights, ids in zip(logits_TX.tolist(), weights_TK.tolist(), ids_TK.tolist(), strict=True):
        expected = by_hand(logits, spec, [0.0] * 16 if correction_X is None else correction_X.tolist())
        assert dict(zip(ids, weights, strict=True)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "glm4_moe", "granitemoe"])
def test_experts_stored_as_stacks_or_one_by_one_are_the_same_model(tmp_path: Path, family: str) -> None:
    seen = []
    for stacked in (False, True):
        path = make_checkpoint(tmp_path / f"{stacked}", family, stacked=stacked, tokenizer=False)
        direct, model = engine(path, torch.float32)
        run_in_uneven_chunks(direct, random_ids(3, 100))
        seen.append(torch.cat(model.seen))
    names = [set(load_file(tmp_path / kind / "model.safetensors")) for kind in ("False", "True")]
    assert names[0] != names[1]
    assert torch.equal(seen[0], seen[1])


@pytest.mark.slow
def test_a_tie_between_experts_is_told_apart(tmp_path: Path) -> None:
    """Two experts that every token likes best, one as well as the other, of which one is chosen."""
    path = make_checkpoint(tmp_path, "mixtral", num_experts_per_tok=1, tokenizer=False, layers=1)
    assert tied_tokens(path, random_ids(5, 20)) == set()
    state = load_file(path / "model.safetensors")
    router = state["model.layers.0.block_sparse_moe.gate.weight"]
    router[1], router[2:] = router[0], 0.0
    router[3] = -router[0]
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    assert 0 < len(tied_tokens(path, random_ids(5, 20))) <= 20


@pytest.mark.slow
def test_layers_that_predict_several_tokens_are_left_out_and_strangers_are_not(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "glm4_moe", tokenizer=False, num_nextn_predict_layers=1)
    state = load_file(path / "model.safetensors")
    state["model.layers.2.eh_proj.weight"] = torch.ones(2, 2)
    save_file(state, path / "model.safetensors")
    engine(path, torch.float32)
    state["model.layers.1.mlp.experts.9.up_proj.weight"] = torch.ones(2, 2)
    save_file(state, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"experts\.9\.up_proj"):
        engine(path, torch.float32)


@pytest.mark.slow
def test_configs_that_make_no_sense_are_refused_by_field(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "glm4_moe", tokenizer=False)
    written = json.loads((path / "config.json").read_text())
    for field, value, more in (
        ("num_experts_per_tok", 9, {}), ("n_group", 3, {}), ("topk_group", 5, {}), ("n_group", 8, {"topk_group": 8}),
        ("moe_intermediate_size", 0, {}), ("norm_topk_prob", 1, {}), ("num_experts_per_tok", None, {}),
    ):  # fmt: skip
        (path / "config.json").write_text(json.dumps({**written, field: value, **more}))
        with pytest.raises(ConfigError, match=field):
            load_spec(path)
    (path / "config.json").write_text(json.dumps({**written, "moe_intermediate_size": 1, "n_shared_experts": 0}))
    with pytest.raises(ConfigError, match="tp_size is 2, expected at most 1, the inner width of an expert"):
        load_spec(path).shards(Mesh(tp=2))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_mixture_is_cached_on_all_tiers_handed_over_and_watched(tmp_path: Path, family: str) -> None:
    """The tokens of an engine that caches nothing, with a device that holds two of the prompts."""
    path = make_checkpoint(tmp_path, family, tokenizer=False)
    prompts = [[*range(20 + 50 * (turn // 2 % 3), 61 + 50 * (turn // 2 % 3)), 300 + turn] for turn in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    small = {"dtype": "float32", "page_size": 4, "chunked_prefill_size": 16, "skip_tokenizer_init": True}
    with LLM(str(path), max_total_tokens=512, disable_radix_cache=True, **small) as llm:
        expected = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
    both = EnginePair(
        path, max_total_tokens=128, enable_hierarchical_cache=True, hicache_ratio=4.0, kv_canary="raise",
        kv_canary_real_data="all", **small,
    )  # fmt: skip
    for turn, prompt in enumerate(prompts):
        both.add(str(turn), prompt, 6)
        both.run_until_idle()
    assert [both.tokens(str(turn)) for turn in range(8)] == expected
    usages = [both.deltas[str(turn)][-1].usage for turn in range(8)]
    assert all(usage is not None and usage.prefill_engine == "prefill-0" for usage in usages)
    assert any(usage is not None and usage.cached_tokens.get("host") for usage in usages)
    both.check()
