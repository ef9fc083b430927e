"""The canary in two engines that hand KV over: sound KV is never accused, damage is told by its next reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from serinus.canary.perturb import Injection
from serinus.core.parts import Part
from serinus.core.request import FinishReason
from serinus.kernels import Reason
from serinus.pd import Backend, LocalBackend, ShmBackend, TcpBackend
from serinus.selftest import CANARY_SHAPES, CanaryPDFixture, make_canary_toy
from serinus.testing.oracle import toy_continue
from tests.canary.traffic import mixed_traffic
from tests.cells import diagonal, some

CASES = [("full", Part.FULL), ("swa", Part.SWA), ("both", Part.FULL), ("both", Part.SWA), ("latent", Part.LATENT)]
"""(model, the part that is damaged)."""
TIERED = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}
MINE = {
    "req_to_token": Reason.VERIFY_CHAIN_HASH | Reason.VERIFY_POSITION,
    "real_kv_used": Reason.VERIFY_REAL_KV_HASH,
    "real_kv_post_forward": Reason.VERIFY_REAL_KV_HASH,
}


def _half(injection: Injection) -> str:
    """Which half of KV it damaged: the only one whose digest differs."""
    assert injection.place is not None
    return injection.place.half


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("toys")
    return {shape: make_canary_toy(home / shape, shape) for shape in CANARY_SHAPES}


@pytest.mark.parametrize("shape", CANARY_SHAPES)
def test_a_shared_prompt_whose_duplicates_are_freed_is_clean_on_both_sides(toys: dict[str, Path], shape: str) -> None:
    pair = CanaryPDFixture(toys[shape], kv_canary_sweep_interval=2)
    pair.send_parallel_short_requests(1, distinct_prompts=True)
    pair.run()
    before = pair.built("prefill").cache.stats().pages.tree
    rids = pair.send_parallel_short_requests(4, distinct_prompts=False, prompt_tokens=16)
    pair.run()
    pair.assert_no_violation()
    spec = pair.pair.decode.built.spec
    assert {tuple(pair.tokens(rid)) for rid in rids} == {tuple(toy_continue(spec, pair.prompts[rids[0]], 8))}
    tree = pair.built("prefill").cache.stats().pages.tree
    assert tree - before == 16 // 4, "expected one copy of the prompt in prefill's tree: its duplicates are freed"


def test_engines_that_begin_no_step_are_told_with_what_they_hold(
    toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = CanaryPDFixture(toys["full"])
    pair.send_parallel_short_requests(1, distinct_prompts=True)
    monkeypatch.setattr(pair, "turn", lambda: None)
    with pytest.raises(
        AssertionError, match=r"neither happened nor idle: prefill after step 0: .* decode after step 0"
    ):
        pair.run_until(lambda: False, turns_max=3)


@pytest.mark.parametrize(("shape", "part"), CASES)
def test_what_prefill_damages_after_stamping_is_reported_by_decode_alone(
    toys: dict[str, Path], shape: str, part: Part
) -> None:
    pair = CanaryPDFixture(toys[shape], perturb_prefill="real_kv_post_forward=1.0", target=part)
    pair.send_parallel_short_requests(3, distinct_prompts=True)
    pair.run()
    planted = pair.injections("prefill")
    assert planted
    found = pair.assert_violation_reported(fail_reason="verify_real_kv_hash", part=part, side="decode")
    assert {v.position for v in found} == {injection.position for injection in planted}
    assert {v.reasons for v in pair.violations("decode")} == {Reason.VERIFY_REAL_KV_HASH}
    assert {v.tag for v in pair.violations("decode")} == {f"TAIL_{_half(i)}_{part.name}" for i in planted}
    pair.assert_no_violation(side="prefill")


@pytest.mark.parametrize(("shape", "part"), CASES)
def test_in_mode_raise_a_damaged_handoff_is_computed_again_and_the_answer_is_right(
    toys: dict[str, Path], shape: str, part: Part
) -> None:
    pair = CanaryPDFixture(toys[shape], perturb_prefill="transfer_bytes=1.0", target=part, kv_canary="raise")
    rids = pair.send_parallel_short_requests(3, distinct_prompts=True)
    pair.run()
    assert pair.injections("prefill")
    found = pair.violations("decode")
    assert {v.part for v in found} == {part}
    assert {v.position % 4 for v in found} >= {injection.slot for injection in pair.injections("prefill")}
    pair.assert_no_violation(side="prefill")
    for rid in rids:
        assert pair.tokens(rid) == toy_continue(pair.pair.decode.built.spec, pair.prompts[rid], 8)


@pytest.mark.parametrize("mode", ["raise", "heal"])
def test_a_prompt_that_the_canary_of_prefill_ends_is_told_to_decode_as_kv_canary_and_computed_there(
    toys: dict[str, Path], mode: str
) -> None:
    """Damaged between its first chunk and its second, which reads it: prefill itself finds that."""
    pair = CanaryPDFixture(
        toys["full"], perturb_prefill="real_kv_used=1.0", kv_canary=mode, chunked_prefill_size=8
    )  # fmt: skip
    (rid,) = pair.send_parallel_short_requests(1, distinct_prompts=True)
    pair.run()
    pair.assert_violation_reported(fail_reason="verify_real_kv_hash", part=Part.FULL, side="prefill")
    pair.assert_no_violation(side="decode")
    assert pair.tokens(rid) == toy_continue(pair.pair.decode.built.spec, pair.prompts[rid], 8)
    usage = pair.pair.deltas[rid][-1].usage
    assert usage is not None
    assert usage.local_reason == "kv_canary"
    for side in ("prefill", "decode"):
        causes = pair.built(side).metrics.by_labels("num_transfer_failed_reqs")
        assert list(causes) == [("kv_canary",)], side
    assert pair.built("prefill").metrics.get("kv_canary_heals", "handed_back") == (mode == "heal")


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [("full", {}), ("both", {}), pytest.param("full", {"tp_size": 2, "pp_size": 2}, marks=pytest.mark.proof)],
)
def test_in_mode_heal_a_decode_engine_computes_what_it_damaged_again(
    toys: dict[str, Path], shape: str, ranks: dict[str, int]
) -> None:
    pair = CanaryPDFixture(
        toys[shape], perturb_decode="real_kv_used=0.3", target=Part.FULL, kv_canary="heal", kv_canary_heals_max=99,
        kv_canary_coverage="full", **ranks,
    )  # fmt: skip
    rids = pair.send_parallel_short_requests(3, distinct_prompts=True)
    pair.run()
    assert pair.injections("decode")
    metrics = pair.built("decode").metrics
    assert metrics.get("kv_canary_heals", "recomputed") + metrics.get("kv_canary_heals", "asked_again") >= 1
    for rid in rids:
        assert pair.tokens(rid) == toy_continue(pair.pair.decode.built.spec, pair.prompts[rid], 8)
    pair.close()


def test_a_wrong_page_that_came_by_handoff_names_its_sender_which_is_told(toys: dict[str, Path]) -> None:
    pair = CanaryPDFixture(toys["full"], perturb_prefill="transfer_bytes=1.0", seed=1)  # hits KV, not a stamp
    (rid,) = pair.send_parallel_short_requests(1, distinct_prompts=True)
    pair.run()
    pair.run_until(lambda: bool(pair.lead("prefill").view()["told"]), turns_max=10)
    incident, again = pair.lead("decode").view()["incidents"]
    assert (incident["owner"], again["owner"]) == (f"REQUEST({rid})", "TREE(1)"), "published after it was checked"
    handoff = incident["handoff"]
    assert (handoff["from"], handoff["rid"]) == ("prefill-0", rid)
    assert handoff["pieces"] == "piece 0 of rank 0"
    assert f"filled by prefill-0, handoff {handoff['xid']}, request {rid}, piece 0 of rank 0" in incident["history"]
    (told,) = pair.lead("prefill").view()["told"]
    assert (told["by"], told["xid"], told["rid"]) == ("decode-0", handoff["xid"], rid)
    assert (told["part"], told["position"]) == ("FULL", incident["position"])
    assert "verify_real_kv_hash" in told["reason"]
    assert pair.lead("decode").view()["told"] == []


def test_a_page_of_prefill_that_was_handed_over_and_is_found_wrong_later_is_told_to_decode(
    toys: dict[str, Path],
) -> None:
    pair = CanaryPDFixture(toys["full"], prefill_settings={"kv_canary_sweep_interval": 1})
    (rid,) = pair.send_parallel_short_requests(1, distinct_prompts=True)
    pair.run()
    prefill = pair.built("prefill")
    slot = int(prefill.cache.walk(0, 1 << 20).slots[0])
    with torch.inference_mode():
        prefill.pools[Part.FULL].layers[0][0][slot] += 1
    pair.send_parallel_short_requests(1, distinct_prompts=True)
    pair.run()
    (incident,) = pair.lead("prefill").view()["incidents"]
    assert (incident["slot"], incident["handoff"]["to"], incident["handoff"]["rid"]) == (slot, "decode-0", rid)
    (told,) = pair.lead("decode").view()["told"]
    assert (told["by"], told["rid"], told["xid"]) == ("prefill-0", rid, incident["handoff"]["xid"])
    pair.assert_no_violation(side="decode")


def test_a_prompt_that_prefill_convicts_is_called_as_its_client_calls_it(toys: dict[str, Path]) -> None:
    pair = CanaryPDFixture(
        toys["full"], perturb_prefill="real_kv_used=1.0", kv_canary="raise", chunked_prefill_size=8
    )  # fmt: skip
    (rid,) = pair.send_parallel_short_requests(1, distinct_prompts=True)
    pair.run()
    incident = pair.lead("prefill").view()["incidents"][0]
    assert incident["rid"] != rid
    assert incident["client"] == rid
    (told,) = pair.lead("decode").view()["told"]
    assert (told["by"], told["xid"], told["rid"]) == ("prefill-0", incident["rid"], rid)


@pytest.mark.parametrize(("shape", "part"), CASES)
@pytest.mark.parametrize("mode", MINE)
def test_what_is_damaged_in_decode_is_reported_there_by_its_detector_and_by_no_other(
    toys: dict[str, Path], shape: str, part: Part, mode: str
) -> None:
    pair = CanaryPDFixture(
        toys[shape], perturb_decode=f"{mode}=1.0", target=part, armed=False, kv_canary="raise",
        kv_canary_sweep_interval=3,
    )  # fmt: skip
    rids = pair.send_parallel_short_requests(3, distinct_prompts=True, new_tokens=24)
    assert pair.run_until(lambda: all(len(pair.tokens(rid)) >= 3 for rid in rids))
    pair.arm("decode")
    pair.run()
    (injection,) = pair.injections("decode")
    found = pair.violations("decode")
    assert found
    assert not [v.line() for v in found if v.reasons & ~MINE[mode] or v.rid != injection.rid or v.part is not part]
    assert not [v.line() for v in found if v.tag.startswith("SWEEP")]
    assert min(v.step for v in found) - injection.step == (mode == "real_kv_post_forward")
    pair.assert_no_violation(side="prefill")
    assert [rid for rid in rids if pair.finish(rid) is FinishReason.ERROR] == [injection.rid]
    for rid in rids:
        answer = pair.tokens(rid)
        assert answer == toy_continue(pair.pair.decode.built.spec, pair.prompts[rid], 24)[: len(answer)]


@pytest.mark.parametrize(("shape", "part"), CASES)
def test_what_sleeps_in_the_cache_is_reported_by_the_sweep_alone(toys: dict[str, Path], shape: str, part: Part) -> None:
    pair = CanaryPDFixture(
        toys[shape], perturb_decode="real_kv_unused_cache=1.0", target=part, armed=False,
        decode_settings={"kv_canary_sweep_interval": 2},
    )  # fmt: skip
    pair.send_parallel_short_requests(3, distinct_prompts=True)
    pair.run()
    pair.arm("decode")
    pair.send_parallel_short_requests(1, distinct_prompts=True, new_tokens=12)
    pair.run()
    (injection,) = pair.injections("decode")
    found = pair.violations("decode")
    assert {(v.tag, v.slot) for v in found} == {(f"SWEEP_{_half(injection)}_{part.name}", injection.slot)}
    assert min(v.step for v in found) == injection.step, "all pages of this pool are swept at once"
    pair.assert_no_violation(side="prefill")


@pytest.mark.parametrize("shape", CANARY_SHAPES)
def test_exchanged_tokens_are_reported_by_the_oracle_alone(toys: dict[str, Path], shape: str) -> None:
    pair = CanaryPDFixture(
        toys[shape], perturb_decode="next_token_swap=1.0", armed=False, sampling_backend="token_oracle",
        target=dict(CASES)[shape],
    )  # fmt: skip
    rids = pair.send_parallel_short_requests(3, distinct_prompts=True, new_tokens=20)
    assert pair.run_until(lambda: all(len(pair.tokens(rid)) >= 3 for rid in rids))
    pair.arm("decode")
    pair.run()
    (injection,) = pair.injections("decode")
    found = pair.violations("decode")
    assert {v.tag.split("_")[0] for v in found} == {"HEAD"}
    assert {v.reasons for v in found} == {Reason.WRITE_TOKEN}
    assert {v.step for v in found} == {injection.step + 1}
    assert len({v.rid for v in found}) == 2
    pair.assert_no_violation(side="prefill")


@pytest.mark.parametrize("victim", ["kept", "freed"])
@pytest.mark.parametrize("shape", CANARY_SHAPES)
def test_a_duplicate_that_is_freed_before_the_handoff_may_be_wrong_and_is_not_reported(
    toys: dict[str, Path], shape: str, victim: str
) -> None:
    """Of two equal prompts the second computes their last page once more, and gives it back for the first one's."""
    part = dict(CASES)[shape]
    pair = CanaryPDFixture(toys[shape], perturb_prefill="real_kv_post_forward=1.0", target=part, armed=False)
    pair.send_parallel_short_requests(1, distinct_prompts=True)
    pair.run()  # the engines know each other now: what is sent together is asked for together
    before = pair.canary("prefill").steps
    if victim == "kept":
        pair.arm("prefill")
    first, second = pair.send_parallel_short_requests(2, distinct_prompts=False, prompt_tokens=16)
    assert pair.run_until(lambda: pair.canary("prefill").steps == before + 1)
    if victim == "freed":
        pair.arm("prefill")
    pair.run()
    (injection,) = pair.injections("prefill")
    assert injection.position == 15
    if victim == "freed":
        pair.assert_no_violation()
        assert (
            pair.tokens(first)
            == pair.tokens(second)
            == toy_continue(pair.pair.decode.built.spec, pair.prompts[first], 8)
        )
    else:
        found = pair.assert_violation_reported(fail_reason="verify_real_kv_hash", part=part, side="decode")
        assert {v.rid for v in found} == {first, second}
        pair.assert_no_violation(side="prefill")


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "part"), CASES)
def test_bytes_damaged_in_the_host_tier_are_reported_when_they_come_back(
    toys: dict[str, Path], shape: str, part: Part
) -> None:
    pair = CanaryPDFixture(
        toys[shape], perturb_decode="tier_bytes=1.0", target=part, armed=False, kv_canary="raise",
        decode_settings={**TIERED, "max_total_tokens": 96, "max_running_requests": 2},
    )  # fmt: skip
    prompts = [pair.random_prompt(41) for _ in range(4)]
    for prompt in prompts:
        pair.send(prompt, new_tokens=2)
        pair.run()
    pair.arm("decode")
    for prompt in 2 * prompts:  # what was loaded a moment before the damage comes back in the second round
        pair.send(prompt, new_tokens=2)
        pair.run()
        if pair.canary("decode").violation_count:
            break
    assert len(pair.injections("decode")) == 1
    (place,) = [injection.place for injection in pair.injections("decode")]
    found = pair.violations("decode")
    assert {v.part for v in found} == {part}
    assert {v.tag[:4] for v in found} == {(place.lane or "TAIL")[:4], "HOST"}, place
    assert len({v.rid for v in found if v.rid}) == 1
    pair.assert_no_violation(side="prefill")
    pair.close()


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "policy"), diagonal(CANARY_SHAPES, ["write_through", "write_back"]))
def test_aborts_eviction_write_back_and_reload_are_clean_on_both_sides(
    toys: dict[str, Path], shape: str, policy: str
) -> None:
    small: dict[str, Any] = {**TIERED, "hicache_ratio": 8.0, "hicache_write_policy": policy, "max_total_tokens": 120}
    pair = CanaryPDFixture(
        toys[shape], prefill_settings=small, decode_settings=small, kv_canary_sweep_interval=3,
        max_running_requests=4,
    )  # fmt: skip
    mixed_traffic(pair, prompts=3, turns=8)
    pair.assert_no_violation()
    stats = pair.built("decode").cache.stats()
    assert stats.evicted_pages > 0
    assert stats.loaded_tokens > 0
    pair.close()


@pytest.mark.slow
@pytest.mark.parametrize("shape", some(CANARY_SHAPES, "both", "latent"))
def test_requests_that_must_give_way_and_come_again_are_clean(toys: dict[str, Path], shape: str) -> None:
    pair = CanaryPDFixture(
        toys[shape], kv_canary_sweep_interval=7, kv_canary_coverage="rotating:4",
        decode_settings={**TIERED, "max_total_tokens": 640},
    )  # fmt: skip
    rids = pair.send_parallel_short_requests(3, distinct_prompts=True, new_tokens=300)
    pair.run()
    assert pair.built("decode").engine.scheduler.stats().totals.retracted > 0
    pair.assert_no_violation()
    for rid in rids:
        assert pair.tokens(rid) == toy_continue(pair.pair.decode.built.spec, pair.prompts[rid], 300)
    pair.close()


BACKENDS: dict[str, Callable[[], Backend]] = {"local": LocalBackend, "shm": ShmBackend, "tcp": TcpBackend}


@pytest.mark.parametrize(("case", "backend"), diagonal([("full", (4, 8)), ("both", (8, 4)), ("swa", (8, 4))], BACKENDS))
def test_stamps_hold_where_pages_of_another_size_are_cut_anew_and_damage_in_flight_shows(
    toys: dict[str, Path], case: tuple[str, tuple[int, int]], backend: str
) -> None:
    shape, sizes = case
    part = Part.SWA if shape == "swa" else Part.FULL
    pair = CanaryPDFixture(
        toys[shape], perturb_prefill="transfer_bytes=1.0", target=part, armed=False, backend=BACKENDS[backend](),
        prefill_settings={"page_size": sizes[0]}, decode_settings={"page_size": sizes[1]}, kv_canary="raise",
    )  # fmt: skip
    rids = pair.send_parallel_short_requests(3, distinct_prompts=True, prompt_tokens=29)
    pair.run()
    pair.assert_no_violation()
    assert pair.built("prefill").engine.scheduler.stats().totals.finished >= 3, "prompts were not handed over"
    pair.arm("prefill")
    rids += pair.send_parallel_short_requests(2, distinct_prompts=True, prompt_tokens=29)
    pair.run()
    (injection,) = pair.injections("prefill")
    found = pair.violations("decode")
    assert {v.part for v in found} == {part}, f"not reported: {injection.line()}"
    assert len({v.rid for v in found}) == 1
    pair.assert_no_violation(side="prefill")
    for rid in rids:
        assert pair.tokens(rid) == toy_continue(pair.pair.decode.built.spec, pair.prompts[rid], 8)
