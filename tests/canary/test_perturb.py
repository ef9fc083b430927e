"""Faults on purpose: each mode does what it says, by its seed, after its warm-up, and its detector alone reports it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from serinus.canary.perturb import MODES, Perturber, PerturbPlan, Place, parse_perturb
from serinus.canary.perturb.damage import PageShape, flip_bit
from serinus.core.errors import ConfigError
from serinus.core.parts import Part
from serinus.kernels import StampLane
from serinus.testing.direct import DirectEngine, DirectSeq

from .watched import decode, started, sweep, watched

PROMPTS = [list(range(20, 43)), list(range(60, 75))]
WARM = 8
Bytes = list[NDArray[np.uint8]]


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


STEP_MODES = [
    "req_to_token",
    "foreign_page",
    "real_kv_used",
    "real_kv_unused_cache",
    "real_kv_post_forward",
    "next_token_swap",
]


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


PAGE_MODES = ["tier_bytes", "transfer_bytes"]


def page_faults(path: Path, mode: str, count: int, *, partial: bool = False) -> tuple[DirectEngine, Perturber, Bytes]:
    """Faults of pages in a buffer, one after the other; the buffer as it is after each."""
    host: NDArray[np.uint8]
    perturber = Perturber(PerturbPlan(probabilities={mode: 1.0}, warmup_steps=WARM), host=(rows := {}))
    engine = watched(path, "full", perturber=perturber, real_data="partial" if partial else "all")
    host = rows[Part.FULL] = np.zeros((6, engine.pool.page_bytes), np.uint8)
    perturber.cached["host", Part.FULL] = np.array([3], np.int32)
    seqs = started(engine, PROMPTS)
    decode(engine, seqs, WARM + 1)
    seen = [host.copy()]
    while len(seen) <= count:
        if mode == "tier_bytes":
            perturber.injections.clear()  # a page that was damaged is spared else
            decode(engine, seqs, 1)
        else:
            perturber.sent(Part.FULL, host[2:5])
        seen.append(host.copy())
    return engine, perturber, seen


@pytest.mark.parametrize("mode", PAGE_MODES)
def test_of_pages_in_the_host_tier_and_on_their_way_one_bit_is_changed(tmp_path: Path, mode: str) -> None:
    _, perturber, seen = page_faults(tmp_path, mode, 24)
    for before, after in pairwise(seen):
        (changed,) = np.argwhere(before != after)
        assert changed[0] == 3 if mode == "tier_bytes" else 2 <= changed[0] < 5
        assert int(before[tuple(changed)] ^ after[tuple(changed)]).bit_count() == 1
    last = perturber.injections[-1]
    assert last.mode == mode
    assert (last.before, last.after) == (int(seen[-2][tuple(changed)]), int(seen[-1][tuple(changed)]))


def test_the_last_page_on_its_way_may_be_half_empty_and_is_hit_in_its_first_slot_alone(tmp_path: Path) -> None:
    _, perturber, _ = page_faults(tmp_path, "transfer_bytes", 60)
    assert {done.slot for done in perturber.injections if done.page == 2} == {0}
    assert {done.slot for done in perturber.injections if done.page < 2} == {0, 1, 2, 3}


@pytest.mark.parametrize("partial", [False, True])
def test_each_layer_half_head_and_stamp_field_is_hit_once_before_any_twice(tmp_path: Path, partial: bool) -> None:
    engine, perturber, _ = page_faults(tmp_path, "transfer_bytes", 1, partial=partial)
    spec = engine.model.spec
    heads = 1 if partial else spec.kv_head_count
    count = spec.layer_count * 2 * heads + 4 * 4
    perturber.injections.clear()
    perturber.replan(perturber.plan)
    decode(engine, started(engine, [list(range(5, 9))]), 1)
    for _ in range(2 * count):
        perturber.sent(Part.FULL, np.zeros((2, engine.pool.page_bytes), np.uint8))
    places = [done.place.at(byte=0, bit=0) for done in perturber.injections if done.place]
    assert len(set(places[:count])) == len(set(places[count:])) == count
    hit = [done.place for done in perturber.injections if done.place and not done.place.lane]
    assert max(place.byte for place in hit) < (16 if partial else 1 << 16)
    assert len({place.bit for place in hit}) > 4


def test_a_place_is_the_same_byte_in_the_pool_and_in_the_page_that_leaves_it(tmp_path: Path) -> None:
    engine, perturber = perturbed(tmp_path, "full", "real_kv_used", steps=6)
    shape = PageShape.of(engine.canary.parts[Part.FULL], 4)  # type: ignore[union-attr]
    assert perturber.injections
    lanes = engine.canary.parts[Part.FULL]  # type: ignore[union-attr]
    for done in perturber.injections:
        assert done.place is not None
        assert done.page == done.slot // 4
        page = np.array([done.page])
        before = engine.pool.read_pages(page)
        flip_bit(lanes, done.slot, done.place)
        ((_, at),) = np.argwhere(engine.pool.read_pages(page) != before)
        assert at == shape.offset(done.place, done.slot % 4)
    for lane in StampLane:
        for number, field in enumerate(("token", "position", "hash", "digest")):
            place, before = Place(lane=lane.name, field=field, byte=0), engine.pool.read_pages(np.array([5]))
            lanes.stamps_LS4[lane, 5 * 4 + 2, number] ^= 1
            ((_, at),) = np.argwhere(engine.pool.read_pages(np.array([5])) != before)
            assert at == shape.offset(place, 2)


def test_a_fault_that_finds_no_victim_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    perturber = Perturber(PerturbPlan(probabilities={"real_kv_unused_cache": 1.0}, warmup_steps=0))
    engine = watched(tmp_path, "full", perturber=perturber)
    seqs = started(engine, PROMPTS)
    for _ in range(3):
        perturber.sweep(Part.FULL, 1)
        decode(engine, seqs, 1)
    said = [record.getMessage() for record in caplog.records if "not injected" in record.getMessage()]
    assert len(said) == 1
    assert "mode=real_kv_unused_cache" in said[0]
    assert said[0].endswith("because no undamaged page is cached and free of requests now; later steps are tried")


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
