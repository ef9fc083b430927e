"""A whole engine under its canary: silent through eviction, tiers and retraction; what is wrong never leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serinus.cache import PageState
from serinus.core.clock import ManualClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.errors import ConfigError
from serinus.core.parts import Part
from serinus.core.request import FinishReason, TokenDelta
from serinus.engine import build_engine
from serinus.models.small_checkpoints import make_toy
from serinus.pool.tier_pools import TierPools
from serinus.selftest import EngineDriver
from serinus.testing.oracle import toy_continue
from tests.cells import diagonal

KINDS: dict[str, dict[str, Any]] = {
    "full": {}, "mixed": {"window": 6, "layer_types": "SFS"}, "sliding": {"window": 9},
    "latent": {"latent": True},
}  # fmt: skip
SHARED = [list(range(first, first + 41)) for first in (20, 70, 120)]
SMALL = {"page_size": 4, "max_total_tokens": 120, "max_running_requests": 3, "chunked_prefill_size": 16,
         "decode_log_interval": 0, "kv_canary": "log", "kv_canary_real_data": "all", "kv_canary_coverage": "full",
         "kv_canary_sweep_interval": 3}  # fmt: skip
TIERED = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("toys")
    return {name: make_toy(home / name, tokenizer=False, **kind) for name, kind in KINDS.items()}


class Watched(EngineDriver):
    """One engine under a canary."""

    def __init__(self, toy: Path, **settings: Any) -> None:
        super().__init__(
            build_engine(from_names(ServeConfig, {"model_path": str(toy), **SMALL, **settings}), ManualClock())
        )
        assert self.engine.canary is not None
        assert self.built.canary is not None
        self.lead, self.rank = self.engine.canary, self.built.canary

    def end_of(self, rid: str) -> TokenDelta:
        return self.deltas[rid][-1]

    @property
    def part(self) -> Part:
        return max(self.rank.parts)

    def flip(self, rid: str, back: int = 2) -> int:
        """Damage the keys of a running request's position so far from its end; the slot."""
        state = self.built.engine.scheduler._states[rid]
        row = self.built.line.body._runner._runner._tables[self.part].table[state.row]
        slot = int(row[state.computed - back])
        lane = self.built.pools[self.part].k[0]
        lane.view(len(lane), -1).view(torch.uint8)[slot, 0] ^= 1
        return slot


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "policy"), diagonal(KINDS, ["write_through", "write_back"]))
def test_eviction_tiers_and_retraction_are_no_violations(toys: dict[str, Path], kind: str, policy: str) -> None:
    engine = Watched(toys[kind], **TIERED, hicache_write_policy=policy)
    for turn in range(12):
        engine.add(f"r{turn}", [*SHARED[turn // 2 % 3], 200 + turn], count=20)
        engine.add(f"s{turn}", [*SHARED[(turn + 1) % 3], 230 + turn], count=6)
        engine.run()
        assert engine.tokens(f"r{turn}") == toy_continue(engine.built.spec, [*SHARED[turn // 2 % 3], 200 + turn], 20)
    assert engine.built.cache.stats().loaded_tokens > 0
    view = engine.lead.view()
    assert view["violations"] == 0
    assert view["slots_due"] == view["slots_checked"] > 0
    assert view["sweep_passes"] > 0
    engine.built.close()


@pytest.mark.parametrize("kind", KINDS)
def test_in_mode_raise_the_damaged_request_ends_and_nothing_wrong_leaves(toys: dict[str, Path], kind: str) -> None:
    engine = Watched(toys[kind], kv_canary="raise")
    first, other = [*SHARED[0], 201], [*SHARED[1][:20], 202]
    engine.add("first", first, count=30)
    engine.add("other", other, count=30)
    while len(engine.tokens("first")) < 4:
        engine.turn()
    before = engine.tokens("first")
    slot = engine.flip("first")
    engine.run()
    end = engine.end_of("first")
    assert (end.finish, end.error_status) == (FinishReason.ERROR, 500)
    assert f"verify_real_kv_hash at slot {slot}" in end.error
    answer = engine.tokens("first")
    assert answer == toy_continue(engine.built.spec, first, len(answer))
    assert len(answer) <= len(before) + 1, "the step after the damage was answered"
    assert engine.tokens("other") == toy_continue(engine.built.spec, other, 30)
    engine.add("again", first, count=10)
    engine.run()
    assert engine.tokens("again") == toy_continue(engine.built.spec, first, 10)


@pytest.mark.parametrize("kind", KINDS)
def test_in_mode_log_every_request_goes_on_and_the_view_names_the_one_concerned(
    toys: dict[str, Path], kind: str
) -> None:
    engine = Watched(toys[kind])
    engine.add("mine", [*SHARED[0], 201], count=20)
    while len(engine.tokens("mine")) < 4:
        engine.turn()
    slot = engine.flip("mine")
    engine.run()
    assert len(engine.tokens("mine")) == 20
    first = engine.lead.view()["incidents"][0]
    assert (first["slot"], first["rid"], first["users"]) == (slot, "mine", ["mine"])
    assert first["reasons"] == ["verify_real_kv_hash"]
    assert "mine" in first["owner"] or "TREE" in first["owner"].upper()
    engine.lead.refresh(engine.built.metrics)
    counted = engine.built.metrics.get("kv_canary_violations", "verify_real_kv_hash", f"TAIL_K_{engine.part.name}")
    assert counted >= 1


def test_what_was_damaged_in_the_host_tier_is_found_when_it_comes_back(toys: dict[str, Path]) -> None:
    engine = Watched(toys["full"], **TIERED, kv_canary="raise", kv_canary_sweep_interval=0)
    prompt = [*SHARED[0], 201]
    engine.add("one", prompt)
    engine.run()
    for turn in range(3):
        engine.add(f"fill{turn}", [*SHARED[1 + turn % 2], 220 + turn], count=30)
        engine.run()
    tiers, cache = engine.built.tiers, engine.built.cache
    assert tiers is not None
    for page in cache.host_pages(Part.FULL):
        tiers.host[Part.FULL].data_PY[int(page), 0] ^= 1
    engine.add("two", prompt)
    engine.run()
    assert engine.end_of("two").finish is FinishReason.ERROR
    engine.add("three", prompt)
    engine.run()
    assert engine.tokens("three") == toy_continue(engine.built.spec, prompt, 8)
    engine.built.close()


@pytest.mark.parametrize("mode", ["raise", "heal"])
@pytest.mark.parametrize("tokens", [33, 901], ids=["some", "more than the ring has rows for"])
def test_what_never_came_from_the_host_is_no_violation_and_touches_no_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, tokens: int
) -> None:
    toy = make_toy(tmp_path, tokenizer=False, context=2048)
    engine = Watched(toy, **TIERED, kv_canary=mode, kv_canary_sweep_interval=0, max_total_tokens=1400)
    prompt, load = [20 + place % 400 for place in range(tokens)], TierPools.load_layers
    for rid, first in (("one", prompt), ("others", [*range(40, 440), *range(30, 430), *range(50, 450)])):
        engine.add(rid, first)
        engine.run()
        while engine.built.cache.poll().in_flight:
            engine.built.line.pump(0.01)
        engine.built.cache.evict(1 << 20)
    engine.add("neighbour", SHARED[2], count=60)
    while len(engine.tokens("neighbour")) < 4:
        engine.turn()

    def fails(self: TierPools, *given: Any) -> None:
        monkeypatch.setattr(TierPools, "load_layers", load)
        raise MemoryError("none left")

    monkeypatch.setattr(TierPools, "load_layers", fails)
    engine.add("again", prompt)
    engine.run()
    assert TierPools.load_layers is load, "nothing was loaded"
    for rid, first, count in (("again", prompt, 8), ("neighbour", SHARED[2], 60)):
        assert engine.tokens(rid) == toy_continue(engine.built.spec, first, count)
        usage = engine.end_of(rid).usage
        assert usage is not None
        assert usage.kv_integrity is not None
        assert usage.kv_integrity.heals == 0
    view = engine.lead.view()
    assert (view["violations"], view["incidents_total"], view["counts"]) == (0, 0, [])
    assert engine.built.cache.stats().pages.quarantined == 0
    engine.built.close()


def test_quarantined_pages_are_released_before_a_request_waits_for_ever(toys: dict[str, Path]) -> None:
    engine = Watched(toys["full"], kv_canary="raise", kv_canary_sweep_interval=0)
    cache = engine.built.cache
    for turn, shared in enumerate(SHARED):
        engine.add(f"r{turn}", [*shared, 201])
        engine.run()
        cached = np.flatnonzero(cache.ledger.owner_P % 8 == PageState.TREE)
        cache.condemn(Part.FULL, cached[: len(cached) // 2].astype(np.int32))
    assert cache.stats().pages.quarantined >= 10
    long = list(range(20, 100))
    engine.add("long", long, count=20)
    engine.run()
    assert engine.tokens("long") == toy_continue(engine.built.spec, long, 20)
    assert cache.stats().pages.quarantined == 0


def test_a_canary_that_cannot_be_is_refused_at_start(toys: dict[str, Path]) -> None:
    for words, settings in (
        ("with --kv-canary none", {"kv_canary": "none"}),
        ("real-data is none", {"kv_canary_real_data": "none", "kv_canary_perturb": "real_kv_used=1"}),
        ("expected full or rotating:N", {"kv_canary_coverage": "some"}),
        ("no layers of", {"kv_canary_perturb": "req_to_token=1", "kv_canary_perturb_target": "swa"}),
        ("without --enable-hierarchical-cache", {"kv_canary_perturb": "tier_bytes=1"}),
        ("expected one of", {"kv_canary_perturb": "bits=1"}),
    ):
        with pytest.raises(ConfigError, match=words):
            Watched(toys["full"], **settings)
    with pytest.raises(ConfigError, match="expected --kv-canary-perturb-target"):
        Watched(toys["mixed"], kv_canary_perturb="req_to_token=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    diagonal(KINDS, ["req_to_token", "real_kv_used", "real_kv_unused_cache", "real_kv_post_forward"]),
)
def test_faults_planted_by_the_settings_are_found_by_the_engine(toys: dict[str, Path], kind: str, name: str) -> None:
    target = {"kv_canary_perturb_target": kind if kind in ("full", "latent") else "swa"}
    engine = Watched(toys[kind], kv_canary_perturb=f"{name}=0.2", kv_canary_perturb_warmup_steps=5, **target)
    for turn in range(3):
        engine.add(f"r{turn}", [*SHARED[turn], 200], count=30)
        engine.add(f"s{turn}", [*SHARED[turn][:9], 201], count=30)
        engine.run()
    view = engine.lead.view()
    assert view["injected"]
    assert view["violations"]
