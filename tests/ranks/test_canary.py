"""The canary of several ranks: silent where all is well; what one rank's pools lost is found there, named, judged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from serinus.canary import CanaryLead
from serinus.core.errors import ConfigError
from serinus.core.request import FinishReason
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.selftest import EngineDriver
from serinus.testing.oracle import toy_continue
from tests.ranks.crew import Crew, crew
from tests.ranks.pair import pair

WATCHED: dict[str, Any] = {
    "kv_canary": "log", "kv_canary_real_data": "all", "kv_canary_coverage": "full", "kv_canary_sweep_interval": 3,
    "kv_canary_perturb_warmup_steps": 3, "max_running_requests": 4,
}  # fmt: skip
PROMPTS = [[*range(20 + i % 3 * 50, 60 + i % 3 * 50), 200 + i] for i in range(6)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), layers=4, kv_heads=2, tokenizer=False)


def served(engine: Crew, toy: Path, count: int = 12) -> dict[str, bool]:
    """All prompts together; which answers were wrong so far as they were sent."""
    spec = load_spec(toy)
    for i, prompt in enumerate(PROMPTS):
        engine.add(f"r{i}", prompt, count)
    engine.run()
    wrong = {}
    for i, prompt in enumerate(PROMPTS):
        found, expected = engine.tokens(f"r{i}"), toy_continue(spec, prompt, count)
        wrong[f"r{i}"] = found != expected[: len(found)]
    return wrong


def lead_of(engine: EngineDriver) -> CanaryLead:
    lead = engine.engine.canary
    assert lead is not None
    return lead


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.proof)])
def test_a_sound_engine_is_silent_and_every_rank_has_checked_all_that_was_due(toy: Path, tp: int, pp: int) -> None:
    tiers = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "max_total_tokens": 128}
    with crew(toy, tp_size=tp, pp_size=pp, **tiers, **WATCHED) as engine:
        assert not any(served(engine, toy).values())
        assert engine.built.cache.stats().loaded_tokens + engine.built.cache.stats().hit_tokens > 0
        view = lead_of(engine).view()
        assert view["violations"] == 0
        assert view["sweep_passes"] > 0
        assert len(view["ranks"]) == tp * pp
        assert len({rank["slots_due"] for rank in view["ranks"]}) == 1
        assert view["slots_due"] == view["slots_checked"] > 0
        for i in range(len(PROMPTS)):
            usage = engine.deltas[f"r{i}"][-1].usage
            assert usage is not None
            assert usage.kv_integrity is not None
            assert usage.kv_integrity.slots_checked == usage.kv_integrity.slots_due > 0
        lead_of(engine).refresh(engine.built.metrics)
        assert engine.built.metrics.get("kv_canary_slots", "checked") == view["slots_checked"]
        ratio = engine.built.metrics.get("kv_canary_coverage_ratio")
        assert 0 < ratio == view["slots_checked"] / view["slots_due"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "pp", "rank", "name"),
    [
        (2, 1, 0, "TP0 PP0"),
        (1, 2, 1, "TP0 PP1"),
        pytest.param(2, 1, 1, "TP1 PP0", marks=pytest.mark.proof),
        pytest.param(2, 2, 3, "TP1 PP1", marks=pytest.mark.proof),
    ],
)
def test_in_mode_raise_nothing_leaves_that_a_rank_computed_on_damaged_bytes(
    toy: Path, tp: int, pp: int, rank: int, name: str
) -> None:
    fault = {"kv_canary_perturb": "real_kv_used=0.1", "kv_canary_perturb_rank": rank}
    with crew(toy, tp_size=tp, pp_size=pp, **{**WATCHED, **fault, "kv_canary": "raise"}) as engine:
        assert not any(served(engine, toy).values())
        lead = lead_of(engine)
        failed = [rid for rid in engine.deltas if engine.finish(rid) is FinishReason.ERROR]
        assert lead.injections
        assert {injection.rank for injection in lead.injections} == {name}
        assert {injection.rid for injection in lead.injections} <= set(failed)
        for rid in failed:
            assert re.search(rf"of rank {name} \(TAIL_[KV]_FULL,", engine.deltas[rid][-1].error)
        for violation in lead.view()["incidents"]:
            assert violation["rank"] == name
            assert violation["owner"]
            assert violation["history"]
            assert violation["rid"] in violation["users"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "tag", "settings"),
    [
        ("req_to_token", "HEAD_K_FULL", {}),
        ("real_kv_post_forward", "TAIL_K_FULL", {}),
        ("real_kv_unused_cache", "SWEEP_K_FULL", {}),
        ("next_token_swap", "HEAD_K_FULL", {"sampling_backend": "token_oracle"}),
        (
            "tier_bytes",
            "TAIL_K_FULL",
            {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "max_total_tokens": 96},
        ),
    ],
)
def test_every_fault_on_a_rank_that_does_not_lead_is_found_by_its_check(
    toy: Path, fault: str, tag: str, settings: dict[str, Any]
) -> None:
    planted = {"kv_canary_perturb": f"{fault}=0.3", "kv_canary_perturb_rank": 1, **settings}
    with crew(toy, tp_size=2, **{**WATCHED, **planted}) as engine:
        served(engine, toy)
        lead = lead_of(engine)
        lead.view()
        assert {injection.mode for injection in lead.injections} == {fault}
        found = {(each["rank"], each["tag"]) for each in lead.view()["incidents"]}
        ranks = {"TP0 PP0", "TP1 PP0"} if fault == "next_token_swap" else {"TP1 PP0"}
        assert {rank for rank, _ in found} == ranks
        assert {(rank, tag) for rank in ranks} <= found


@pytest.mark.slow
def test_what_the_last_sweep_found_is_quarantined_when_the_engine_is_idle(toy: Path) -> None:
    fault = {"kv_canary_perturb": "real_kv_unused_cache=1.0", "kv_canary_perturb_rank": 1}
    with crew(toy, tp_size=2, **{**WATCHED, **fault, "kv_canary": "raise"}) as engine:
        assert not any(served(engine, toy).values())
        for _ in range(100):
            engine.turn()  # no step runs: the engine does its idle work
        pages = {each["page"] for each in lead_of(engine).view()["incidents"]}
        assert engine.built.cache.stats().pages.quarantined >= len(pages) > 0


def test_the_rank_of_a_fault_must_have_the_part(tmp_path: Path) -> None:
    halves = make_toy(tmp_path / "toy", layers=4, tokenizer=False, window=6, layer_types="SSFF")
    fault = {"kv_canary_perturb": "real_kv_used=0.1", "kv_canary_perturb_target": "full"}
    for rank in (0, 2):
        wanted = pytest.raises(ConfigError, match=f"perturb-rank is {rank}, expected one of 1 ")
        with wanted, crew(halves, pp_size=2, **WATCHED, **fault, kv_canary_perturb_rank=rank):
            pass


@pytest.mark.slow
def test_a_fault_without_a_named_rank_lands_on_one_that_has_the_part(tmp_path: Path) -> None:
    halves = make_toy(tmp_path / "toy", layers=4, tokenizer=False, window=6, layer_types="SSFF")
    for seed, target, name in ((0, "swa", "TP0 PP0"), (1, "full", "TP0 PP1")):
        fault = {"kv_canary_perturb": "real_kv_used=0.3", "kv_canary_perturb_target": target}
        with crew(halves, pp_size=2, **WATCHED, **fault, kv_canary_perturb_seed=seed) as engine:
            served(engine, halves)
            found = {(each["rank"], each["part"]) for each in lead_of(engine).view()["incidents"]}
            assert found == {(name, target.upper())}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "name", "backend"), [({"tp_size": 2}, "TP1 PP0", "shm"), ({"pp_size": 2}, "TP0 PP1", "tcp")]
)
def test_what_one_rank_damages_on_its_way_out_is_found_by_its_like_and_computed_again(
    toy: Path, mesh: dict[str, int], name: str, backend: str
) -> None:
    fault = {"kv_canary_perturb": "transfer_bytes=0.3", "kv_canary_perturb_rank": 1}
    watched = {**WATCHED, "kv_canary": "raise", "kv_canary_perturb_warmup_steps": 0}
    spec = load_spec(toy)
    with pair(toy, {**mesh, **fault}, mesh, backend, **watched) as engines:
        for i, prompt in enumerate(PROMPTS):
            engines.add(f"r{i}", prompt)
        engines.run()
        for i, prompt in enumerate(PROMPTS):
            assert engines.tokens(f"r{i}") == toy_continue(spec, prompt, 8), f"request {i}"
        (sent, arrived) = (lead_of(half).view() for half in (engines.prefill, engines.decode))
        assert {injection["rank"] for injection in sent["injected"]} == {name}
        assert sent["violations"] == 0
        assert {(each["rank"], each["tag"][:5]) for each in arrived["incidents"]} <= {(name, "TAIL_"), (name, "HEAD_")}
        assert arrived["incidents"]
        assert {each["rid"] for each in arrived["incidents"]} <= {f"r{i}" for i in range(len(PROMPTS))}
        assert arrived["slots_due"] == arrived["slots_checked"]
