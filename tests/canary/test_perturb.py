"""Faults on purpose: each mode does what it says, by its seed, after its warm-up, and its detector alone reports it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from serinus.canary.perturb import MODES, Perturber, PerturbPlan, parse_perturb
from serinus.core.errors import ConfigError
from serinus.core.parts import Part
from serinus.testing.direct import DirectEngine, DirectSeq

from .watched import decode, started, sweep, watched

PROMPTS = [list(range(20, 43)), list(range(60, 75))]
WARM = 8


def perturbed(
    path: Path, shape: str, mode: str, *, probability: float = 1.0, steps: int = 12, seed: int = 1
) -> tuple[DirectEngine, Perturber]:
    """An engine that ran so long under one mode, with a sequence asleep in its cache."""
    target = Part.FULL if shape == "full" else Part.SWA
    plan = PerturbPlan(probabilities={mode: probability}, target=target, warmup_steps=WARM, seed=seed)
    perturber = Perturber(plan)
    engine = watched(path, shape, perturber=perturber, token_oracle=True)
    assert engine.canary is not None
    seqs = started(engine, PROMPTS)
    asleep = engine.start(list(range(90, 110)), seqs[0].params, tokens=10, seed=9)
    engine.step([(asleep, 100)])
    for step in range(steps):
        for part in engine.canary.parts if step % 2 else ():
            sweep(engine, part, *resident(asleep, part))
        decode(engine, seqs, 1)
    return engine, perturber


def resident(seq: DirectSeq, part: Part) -> tuple[list[int], list[int]]:
    slots = seq.slots if part is Part.FULL else seq.swa_slots
    assert slots is not None
    return slots[12:20].tolist(), list(range(12, 20))


STEP_MODES = ["req_to_token", "real_kv_used", "real_kv_unused_cache", "real_kv_post_forward", "next_token_swap"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["full", "swa", "both"])
@pytest.mark.parametrize("name", STEP_MODES)
def test_a_fault_is_reported_by_its_detector_and_by_no_other(tmp_path: Path, shape: str, name: str) -> None:
    engine, perturber = perturbed(tmp_path, shape, name, probability=0.4)
    mode = MODES[name]
    assert perturber.injections
    assert all(injection.step > WARM for injection in perturber.injections)
    assert engine.violations
    for violation in engine.violations:
        assert violation.tag.split("_")[0] in mode.found_by.split("|"), violation.line()
        assert violation.reasons & mode.reasons, violation.line()
        assert not violation.reasons & ~mode.reasons, violation.line()
    first = perturber.injections[0]
    if mode.has_part:
        seen = {(v.slot, v.part.name) for v in engine.violations}
        assert (first.slot, first.part) in seen


@pytest.mark.slow
def test_the_same_seed_plants_the_same_faults(tmp_path: Path) -> None:
    runs = [
        perturbed(tmp_path / str(i), "full", "real_kv_used", probability=0.3, seed=s)[1]
        for i, s in enumerate((4, 4, 5))
    ]
    assert runs[0].injections == runs[1].injections
    assert runs[0].injections != runs[2].injections


def test_nothing_happens_before_the_gate_opens(tmp_path: Path) -> None:
    engine, perturber = perturbed(tmp_path, "full", "real_kv_used", steps=0)
    assert engine.canary is not None
    assert engine.canary.steps <= WARM
    assert perturber.injections == []


def test_pages_in_the_host_tier_and_on_their_way_are_changed_in_one_byte() -> None:
    host = np.zeros((6, 64), np.uint8)
    plan = PerturbPlan(probabilities={"tier_bytes": 1.0, "transfer_bytes": 1.0}, warmup_steps=0)
    perturber = Perturber(plan, host={Part.FULL: host})
    perturber.host_pages[Part.FULL] = np.array([3], np.int32)
    perturber.sent(Part.FULL, host)
    assert not host.any()
    assert perturber.injections == []


def test_plans_that_could_never_be_found_are_refused() -> None:
    def check(name: str, **settings: object) -> None:
        facts = {
            "parts": {Part.FULL}, "real_data": "all", "sweep_interval": 1, "has_host": True, "has_oracle": True,
            "sends": True,
        }  # fmt: skip
        PerturbPlan(probabilities={name: 0.5}).check(**{**facts, **settings})  # type: ignore[arg-type]

    for name in MODES:
        check(name)
    with pytest.raises(ConfigError, match="real-data is none"):
        check("real_kv_used", real_data="none")
    with pytest.raises(ConfigError, match="of part full, which this model has no layers of; expected swa"):
        check("req_to_token", parts={Part.SWA})
    with pytest.raises(ConfigError, match="without --kv-canary-sweep-interval"):
        check("real_kv_unused_cache", sweep_interval=0)
    with pytest.raises(ConfigError, match="without --sampling-backend token_oracle"):
        check("next_token_swap", has_oracle=False)
    with pytest.raises(ConfigError, match="without --enable-hierarchical-cache"):
        check("tier_bytes", has_host=False)
    check("req_to_token", real_data="none")


def test_words_that_are_no_plan_are_refused() -> None:
    assert parse_perturb("real_kv_used=0.1, req_to_token=1") == {"real_kv_used": 0.1, "req_to_token": 1.0}
    assert parse_perturb("") == {}
    for text in ("real_kv_used", "real_kv_used=often", "=1"):
        with pytest.raises(ConfigError, match="expected"):
            PerturbPlan(probabilities=parse_perturb(text))
    with pytest.raises(ConfigError, match="perturbation 'bits', expected one of req_to_token"):
        PerturbPlan(probabilities={"bits": 0.1})
    with pytest.raises(ConfigError, match="probability 2"):
        PerturbPlan(probabilities={"req_to_token": 2})
