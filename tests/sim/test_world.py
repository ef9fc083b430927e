"""Clusters in one thread, seed by seed: whatever the adversary does, every answer is right or ends by name, and nothing
is left anywhere."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from serinus.core.rng import Rng
from serinus.sim import Options, Run, Scenario, calm_scenario, draw, run
from serinus.sim.options import Cancel
from tests.cells import some
from tests.sim.backend_mutants import outlasting
from tests.sim.hunting import unchecked

SEEDS = 50
"""In the default suite; the proof goes on to PROOF_SEEDS."""
PROOF_SEEDS = 2000
SHARE = 50


@cache
def _run(seed: int, canary: str | None = None) -> Run:
    """The run of a seed, once for all tests of this file: another one is the same, as one of them shows."""
    return run(draw(seed, canary=canary))


def _failures(seeds: range) -> str:
    found = []
    for seed in seeds:
        finding = _run(seed).finding
        if finding is not None:
            found.append(f"serinus sim --seed {seed}    {finding.kind} at {finding.at:.3f} s: {finding.text[:300]}")
    return "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, SHARE))
def test_clusters_come_to_rest_with_every_answer_right(first: int) -> None:
    found = _failures(range(first, first + SHARE))
    assert not found, f"\n{found}"


@pytest.mark.proof
@pytest.mark.parametrize("first", range(SEEDS, PROOF_SEEDS, SHARE))
def test_two_thousand_clusters_come_to_rest_with_every_answer_right(first: int) -> None:
    found = _failures(range(first, first + SHARE))
    assert not found, f"\n{found}"


@pytest.mark.slow
def test_requests_are_served_by_priority_and_end_at_their_deadlines() -> None:
    """I21 and I22, in worlds that are made for them; 15 of 100 others have priorities too."""
    counts: dict[str, int] = {}
    for seed in range(40):
        result = run(draw(seed, ranked=True))
        assert result.finding is None, f"seed {seed}: {result.finding}"
        for name, count in [*result.counts.items(), *result.ends.items()]:
            counts[name] = counts.get(name, 0) + count
    assert counts["deadlines"] > 10
    assert counts["length"] > 60


@pytest.mark.proof
@pytest.mark.parametrize("first", range(40, 440, SHARE))
def test_the_same_in_four_hundred_worlds(first: int) -> None:
    for seed in range(first, first + SHARE):
        finding = run(draw(seed, ranked=True)).finding
        assert finding is None, f"seed {seed}: {finding}"


@pytest.mark.proof
@pytest.mark.parametrize("backend", ["local", "shm", "tcp", "push", "pull", "ipc"])
def test_a_storm_of_aborts_leaves_nothing_behind(backend: str) -> None:
    """Every client hangs up, at any moment of its handoff, in the adversary's worlds: 250 ends for each way to move
    pages; at rest no gauge, no page and no table holds anything."""
    aborted, hung_up = 0, 0
    for seed in range(1000):
        scenario, rng = draw(seed, backend=backend), Rng(seed).split("storm")
        works = tuple(
            replace(work, rid=f"{work.rid}-{turn}", at=round(rng.random(), 3), new_tokens=8)
            for turn in range(8)
            for work in scenario.works
        )
        hang_ups = tuple(Cancel(rid=work.rid, at=round(work.at + rng.random() * 0.3, 4)) for work in works)
        result = run(replace(scenario, works=works, faults=hang_ups))
        assert result.finding is None, f"seed {seed}: {result.finding}"
        aborted, hung_up = aborted + result.ends.get("abort", 0), hung_up + result.counts.get("cancel", 0)
        if aborted >= 250:
            break
    assert aborted >= 250
    assert hung_up >= aborted


@pytest.mark.slow
@pytest.mark.parametrize("first", some([0, 12], 0))
def test_a_seed_is_always_the_same_run(first: int) -> None:
    for seed in range(first, first + 12):
        canary = "damaged" if seed < first + 2 else None
        once, again = _run(seed, canary), run(draw(seed, canary=canary))
        assert once == again, f"seed {seed} had two lives"


@pytest.mark.proof
def test_the_worlds_are_what_they_claim_to_be() -> None:
    """Otherwise two thousand clean seeds would prove nothing: everything that may happen does, somewhere."""
    counts: dict[str, int] = {}
    for seed in range(160):
        canary = "damaged" if seed < 20 else None
        scenario, result = draw(seed, canary=canary), _run(seed, canary)
        for kind, is_so in (("sliding", scenario.shape.window), ("latent", "L" in scenario.shape.slides)):
            counts[f"landed {kind}"] = counts.get(f"landed {kind}", 0) + result.counts["landed"] * bool(is_so)
        for name, count in [*result.counts.items(), *(("end " + end, n) for end, n in result.ends.items())]:
            counts[name] = counts.get(name, 0) + count
    expected = (
        "landed", "landed latent", "recomputed", "retracted", "cancel", "crash", "pause", "partition", "pieces lost",
        "frames sent again", "rejected crc",
        "rejected closed_grant", "decode failed: peer_gone", "prefill failed: aborted", "quarantined",
        "operations lost", "prefetched tokens",
        "damaged: stray", "damaged: flip", "damaged: page", "damaged: bit", "damaged: stamp", "damaged: row",
        "damaged: midway", "damaged: host", "damaged: copy", "violations", "decode failed: kv_canary",
        "end length", "end stop", "end abort", "end lost",
    )  # fmt: skip
    missing = [name for name in expected if not counts.get(name)]
    assert not missing, f"never happened: {missing}, in {counts}"
    assert counts["landed"] > 120
    assert counts["landed sliding"] > 20


def test_where_the_cache_is_said_to_have_no_room_requests_wait_until_it_has() -> None:
    calm = calm_scenario(draw(3, backend="local"), works=2)
    free, full = (run(replace(calm, options=Options(allocation=chance))) for chance in (0.0, 1.0))
    assert free.finding is None
    assert full.finding is None
    assert full.ends == free.ends
    assert full.seconds > free.seconds + 1.0, "they began before the adversary stopped"


def test_a_scenario_survives_being_written_down() -> None:
    for seed in range(40):
        scenario = draw(seed)
        assert Scenario.from_json(scenario.to_json()) == scenario
        assert any("r0" in line for line in scenario.describe())


@pytest.mark.slow
@pytest.mark.parametrize("canary", ["", pytest.param("damaged", marks=pytest.mark.proof)])
def test_prompt_chunks_are_computed_ahead_where_many_come_at_once(canary: str) -> None:
    """Under cancels, crashes, loads from the host and, where KV is damaged, heals: by an engine that begins steps
    before it has read the ones before."""
    chunks = 0
    for seed in range(8 if canary else 16):
        result = run(draw(seed, backend="tcp", crowded=True, canary=canary))
        assert result.finding is None, f"seed {seed}: {result.finding}"
        chunks += result.counts["chunks ahead"]
    assert chunks > 30


@pytest.mark.proof
@pytest.mark.parametrize("backend", ["ipc", "ipc, asked", "pull"])
def test_where_nothing_compares_what_was_read_a_hold_or_confirm_keeps_wrong_kv_out(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worlds of the mutants that have neither: reads outlast the connection."""
    if backend == "ipc, asked":
        monkeypatch.setattr("serinus.pd.backends.holds.SharedHolds.lasts", lambda self, hold: False)
    with unchecked():
        for seed in range(30):
            done = run(outlasting(seed, backend.partition(",")[0]))
            assert done.finding is None, f"{seed}: {done.finding}"
