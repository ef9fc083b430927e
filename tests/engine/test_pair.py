"""Decode and prefill engines in one thread over the `local` backend, with the toy model: wrong KV is a wrong token."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serinus.core.grammar import Grammar
from serinus.core.request import FinishReason
from serinus.engine.deadlines import Deadlines
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.pd import Send
from serinus.selftest import EnginePair
from serinus.testing.builders import make_request
from serinus.testing.oracle import toy_continue
from serinus.wire.messages import Data
from tests.cells import some


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), vocab=64, context=256, tokenizer=False)


def pair(toy: Path, **settings: Any) -> EnginePair:
    return EnginePair(toy, **{"page_size": 4, "max_total_tokens": 256, "chunked_prefill_size": 16, **settings})


def test_a_prompt_computed_elsewhere_goes_on_as_if_it_had_been_computed_here(toy: Path) -> None:
    both = pair(toy)
    prompt = list(range(1, 38))
    both.add("a", prompt, 6)
    both.run_until_idle()
    assert both.tokens("a") == toy_continue(load_spec(toy), prompt, 6)
    usage = both.deltas["a"][-1].usage
    assert usage is not None
    assert (usage.prefill_engine, usage.handoff_tokens, usage.handoff_pages) == ("prefill-0", 37, 10)
    both.check()


def test_the_second_request_brings_only_what_decode_lacks(toy: Path) -> None:
    both = pair(toy)
    prompt = list(range(1, 42))
    for rid in ("a", "b"):
        both.add(rid, prompt, 6)
        both.run_until_idle()
    usage = both.deltas["b"][-1].usage
    assert usage is not None
    assert (usage.handoff_tokens, dict(usage.cached_tokens)) == (1, {"device": 40})
    assert both.tokens("b") == toy_continue(load_spec(toy), prompt, 6)


def test_the_priority_of_a_request_is_known_to_the_caches_of_both_sides(toy: Path) -> None:
    both = pair(toy, max_total_tokens=64, radix_eviction_policy="priority")
    kept = list(range(1, 22))
    both.send(replace(make_request("kept", kept, max_new_tokens=6), priority=-7, prefill_address="local://prefill"))
    both.run_until_idle()
    for first in range(2, 6):
        both.add(f"later-{first}", list(range(first, first + 21)), 6)
        both.run_until_idle()
    for built in (both.decode.built, both.prefill.built):
        assert built.cache.stats().evicted_pages > 0
        assert built.cache.probe("", np.asarray(kept, np.int32)).device == 20


def test_equal_prompts_wait_for_the_first_of_them_also_where_engines_give_seldom_a_sign_of_life(toy: Path) -> None:
    both = pair(toy, keepalive_s=10.0)
    both.add("before", [9] * 9, 1)
    both.run_until_idle()
    for _ in range(32):  # 8 s without a word
        both.clock.advance(0.25)
        both.turn_decode()
        both.turn_prefill()
    for rid in ("a", "b", "c"):
        both.add(rid, list(range(1, 42)), 1)
    both.run_until_idle()
    came = [usage.handoff_tokens for rid in ("a", "b", "c") if (usage := both.deltas[rid][-1].usage) is not None]
    assert came == [41, 1, 1]


def test_metrics_say_where_the_pages_are_and_how_many_went(toy: Path) -> None:
    both = pair(toy, max_total_tokens=64)
    for rid, first in (("a", 1), ("b", 2)):
        both.add(rid, list(range(first, first + 41)), 6)
        both.run_until_idle()
    built = both.decode.built
    built.engine.metrics.refresh(built.engine.scheduler, built.cache, built.engine.turns, 0.0)
    metrics, kept = built.metrics, built.cache.stats()
    assert kept.evicted_pages > 0
    assert metrics.get("evicted_tokens") == kept.evicted_pages * 4
    said = [metrics.get("pages", state, "device", "full") for state in ("tree", "free")]
    assert said == [kept.pages.tree, kept.pages.free]
    assert kept.pages.tree + kept.pages.free == 16


def test_chunks_travel_while_later_ones_are_computed(toy: Path) -> None:
    both = pair(toy)
    both.add("a", list(range(1, 61)), 6)
    staged_while_computing = 0
    while not both.tokens("a"):
        both.turn_decode()
        both.turn_prefill()
        if both.prefill.engine.scheduler.stats().num_running_reqs:
            staged_while_computing += both.port_of(both.prefill).machine.staged_count
    assert staged_while_computing == 3  # of four chunks: each is staged before the next step, the last ends the prompt
    both.run_until_idle()


def test_a_row_that_a_step_gave_back_goes_to_the_oldest_wherever_it_is_computed(toy: Path) -> None:
    """A step is committed and the next one planned before a remote request may take the row. Prompts whose
    log-probabilities are wanted are computed by decode."""
    both = pair(toy, max_running_requests=1)
    ends: list[str] = []
    both.add("runs", list(range(1, 22)), 6)
    for number in range(3):
        both.send(make_request(f"older-{number}", [30 + number] * 5, max_new_tokens=3, prompt_logprobs=0))
    while not both.tokens("runs"):
        both.turn_decode()
        both.turn_prefill()
    both.add("remote", list(range(2, 23)), 3)
    for number in range(3):
        both.send(make_request(f"younger-{number}", [40 + number] * 5, max_new_tokens=3, prompt_logprobs=0))
    for _ in range(200):
        both.turn_decode()
        both.turn_prefill()
        both.clock.advance(0.01)
        ends += [rid for rid, told in both.deltas.items() if rid not in ends and told and told[-1].finish is not None]
    order = [f"older-{number}" for number in range(3)] + ["remote"] + [f"younger-{number}" for number in range(3)]
    assert ends == ["runs", *order]


@pytest.mark.slow
def test_peers_hear_of_a_piece_before_the_next_is_staged_and_no_step_begins_before_the_last(tmp_path: Path) -> None:
    wide = make_toy(tmp_path, vocab=64, context=256, kv_heads=64, head_size=128, tokenizer=False)  # pieces: 84 tokens
    both = pair(wide, chunked_prefill_size=100)
    both.add("a", list(range(1, 61)) * 2, 6)
    engine, built = both.prefill.engine, both.prefill.built
    assert built.peers is not None
    turns: list[tuple[int, bool]] = []
    while not both.tokens("a"):
        both.turn_decode()
        both.clock.advance(0.01)
        output = engine.turn(both.clock.now(), (), built.peers.receive())
        sent = sum(isinstance(action, Send) and isinstance(action.message, Data) for action in output.peers)
        if sent:
            turns.append((sent, engine.line.under_way > 0))
        built.deliver(output)
        engine.line.flush()
    assert turns == [(1, False), (1, False), (1, True), (1, False)], "pieces of 20, 40 and 40 tokens, after a step 20"
    assert both.tokens("a")[:1] == toy_continue(load_spec(wide), list(range(1, 61)) * 2, 1)
    both.run_until_idle()
    both.check()


def test_a_prefill_engine_in_a_long_step_is_waited_for(toy: Path) -> None:
    both = pair(toy)
    both.add("a", list(range(1, 10)), 6)
    both.run_until_idle()
    both.clock.advance(40.0)  # a step of 40 s, seen by no other engine
    both.turn_prefill()
    prompt = list(range(2, 30))
    both.add("b", prompt, 6)
    for _ in range(100):
        both.clock.advance(1.0)
        both.turn_decode()
    assert not both.tokens("b")
    both.run_until_idle()
    usage = both.deltas["b"][-1].usage
    assert usage is not None
    assert (usage.prefill_engine, usage.local_reason) == ("prefill-0", "")


def test_a_draining_prefill_engine_finishes_what_it_has_and_sends_the_rest_home(toy: Path) -> None:
    both = pair(toy)
    prompts = {"a": list(range(1, 61)), "b": list(range(3, 40))}
    both.add("a", prompts["a"], 6)
    while not both.prefill.engine.handoffs.asked_by_peers():
        both.turn_decode()
        both.turn_prefill()
    both.prefill.engine.handoffs.drain(both.clock.now())
    both.prefill.engine.handoffs.drain(both.clock.now())
    both.decode.engine.handoffs.drain(both.clock.now())
    both.add("b", prompts["b"], 6)
    both.run_until_idle()
    reasons = {}
    for rid, prompt in prompts.items():
        usage = both.deltas[rid][-1].usage
        assert usage is not None
        reasons[rid] = (usage.prefill_engine, usage.local_reason)
        assert both.tokens(rid) == toy_continue(load_spec(toy), prompt, 6)
    assert reasons == {"a": ("prefill-0", ""), "b": ("", "shutdown")}


def test_a_prompt_for_which_no_prefill_engine_is_known_says_so(toy: Path) -> None:
    both = pair(toy)
    both.add("a", list(range(1, 20)), 6, remote=False)
    both.run_until_idle()
    usage = both.deltas["a"][-1].usage
    assert usage is not None
    assert (usage.prefill_engine, usage.local_reason) == ("", "no_prefill_engine")
    assert both.decode.built.metrics.get("num_local_prompts", "no_prefill_engine") == 1


@pytest.mark.parametrize(
    ("optimistic", "counter"), [(True, "num_bootstrap_failed_reqs"), (False, "num_transfer_failed_reqs")]
)
def test_decode_counts_a_failure_by_whether_it_had_granted_its_pages(toy: Path, optimistic: bool, counter: str) -> None:
    both = pair(toy, decode_settings={"max_total_tokens": 64, "optimistic_prefill": optimistic}, park_tokens=4096)
    long = list(range(1, 41))
    if optimistic:  # it asks at once, and has no page to grant while this one runs
        both.add("stays", [1] * 30, 30)
        while not both.tokens("stays"):
            both.turn_decode()
            both.turn_prefill()
    both.add("a", long, 4)
    while not both.prefill.engine.handoffs.asked_by_peers():
        both.turn_decode()
        both.turn_prefill()
    for xid in both.prefill.engine.handoffs.asked_by_peers():
        both.prefill.abort(xid)
    both.run_until_idle()
    assert both.tokens("a") == toy_continue(load_spec(toy), long, 4)
    names = ("num_bootstrap_failed_reqs", "num_transfer_failed_reqs")
    counts = {name: both.decode.built.metrics.get(name, "aborted") for name in names}
    assert counts == {name: float(name == counter) for name in names}


@pytest.mark.parametrize("where", ["in the queue", "before its grant", "in a handoff", "while it decodes"])
def test_a_request_that_reaches_its_deadline_ends_with_504_and_leaves_nothing(toy: Path, where: str) -> None:
    both = pair(toy, decode_settings={"max_running_requests": 1 if where == "in the queue" else 8})
    both.add("other", list(range(2, 20)), 60, remote=False)
    remote = where in ("before its grant", "in a handoff")
    address = both.prefill.built.pd_address if remote else ""
    request = make_request("late", list(range(1, 61)), max_new_tokens=150)
    both.send(replace(request, timeout_s=0.3, prefill_address=address, stream=True))
    begun = both.clock.now()
    while both.decode.finish("late") is None:
        both.turn_decode()
        if where == "in a handoff" and both.port_of(both.decode).machine.landed_pages("late") < 8:
            both.turn_prefill()
        assert both.clock.now() < begun + 0.4
    (last,) = both.deltas["late"][-1:]
    assert (last.finish, last.error_status) == (FinishReason.ERROR, 504)
    assert f"with {len(both.tokens('late'))} tokens generated" in last.error
    assert bool(both.tokens("late")) == (where == "while it decodes")
    both.run_until_idle()
    both.check()
    assert both.tokens("other") == toy_continue(load_spec(toy), list(range(2, 20)), 60)
    assert [driver.engine.scheduler.stats().used_tokens for driver in (both.decode, both.prefill)] == [0, 0]
    assert both.decode.built.metrics.get("num_timed_out_requests") == 1


@pytest.mark.parametrize(("told", "seconds"), [("when it comes", 0.05), ("when its turn does", 0.1)])
def test_a_prompt_too_late_for_prefill_is_computed_by_decode_for_that_reason(
    toy: Path, told: str, seconds: float
) -> None:
    both = pair(toy, prefill_settings={"request_s_max": seconds, "max_running_requests": 1})
    both.add("measure", [9] * 17, 1)
    both.run_until_idle()  # prefill knows how fast it is
    prompts = {rid: [first, *range(1, 60)] for first, rid in enumerate(("first", "second"))}
    for rid, prompt in prompts.items():
        both.add(rid, prompt, 4)
    both.run_until_idle()
    for rid, prompt in prompts.items():
        assert both.tokens(rid) == toy_continue(load_spec(toy), prompt, 4)
    count = 2 if told == "when it comes" else 1
    assert both.decode.built.metrics.get("num_recomputed_requests", "timeout") == count
    for driver in (both.decode, both.prefill):
        names = ("num_bootstrap_failed_reqs", "num_transfer_failed_reqs")
        counts = [driver.built.metrics.get(name, "timeout") for name in names]
        assert counts == [0, count], "pages were granted, and each is counted once"
    both.check()


@pytest.mark.parametrize(("why", "status"), [("timeout", 504), ("grammar", 400)])
def test_a_request_that_ends_at_prefill_for_its_own_sake_is_no_failed_handoff(toy: Path, why: str, status: int) -> None:
    both = pair(toy, decode_settings={"on_failure": "error"}, prefill_settings={"request_s_max": 0.05})
    both.add("measure", [9] * 17, 1)
    both.run_until_idle()  # prefill knows how fast it is
    both.add(
        "one",
        [1] * (60 if why == "timeout" else 8),
        4,
        **({"grammar": Grammar(kind="regex", text="a")} if why == "grammar" else {}),
    )
    both.run_until_idle()
    (last,) = both.deltas["one"]
    assert (last.finish, last.error_status) == (FinishReason.ERROR, status)
    assert "handoff" not in last.error
    both.check()


def test_the_servers_timeout_bounds_every_request_and_an_id_may_be_used_again(toy: Path) -> None:
    both = pair(toy, decode_settings={"request_s_max": 0.2})
    both.add("a", [1, 2, 3], 2, remote=False)
    both.run_until_idle()
    both.clock.advance(0.15)
    both.add("a", [1, 2, 3], 200, remote=False)
    begun = both.clock.now()
    both.run_until_idle()
    assert both.deltas["a"][-1].error_status == 504
    assert 0.15 < both.clock.now() - begun < 0.3


def test_deadlines_of_requests_that_ended_are_not_kept() -> None:
    deadlines, live = Deadlines(), {f"r{i}" for i in range(5)}
    for i in range(10_000):
        deadlines.add(f"r{i}", 1000.0 + i, live)
        assert len(deadlines) < 1100
    assert deadlines.over(999.0) == []
    assert set(deadlines.over(1e9)) >= live


def test_bad_frames_of_peers_are_counted_beside_those_of_fronts(toy: Path) -> None:
    both = pair(toy)
    metrics, port = both.prefill.built.metrics, both.port_of(both.prefill)
    metrics.add("wire_bad_frames", 1, "crc")  # what the loop does for a front's frame
    both.prefill.built.peers.mailbox.rejects["crc"] += 2
    port.machine.rejects["no_hello"] += 1
    both.prefill.built.peers.mailbox.resent_count = 3
    for _ in range(2):
        both.prefill.engine.handoffs.refresh(metrics)
        both.prefill.built.peers.refresh(metrics)
    assert [metrics.get("wire_bad_frames", reason) for reason in ("crc", "no_hello")] == [3, 1]
    assert metrics.get("wire_retransmits") == 3
    both.port_of(both.decode).machine.rejects["closed_grant"] += 4
    both.decode.engine.handoffs.refresh(both.decode.built.metrics)
    assert both.decode.built.metrics.get("kv_transfer_late_frames") == 4
    assert both.decode.built.metrics.get("wire_bad_frames", "closed_grant") == 0


@pytest.mark.parametrize("seed", some(range(40), *range(10)))
def test_any_mix_of_arrivals_turns_and_aborts_gives_right_tokens_and_leaves_nothing(toy: Path, seed: int) -> None:
    rng = random.Random(seed)
    both = pair(toy, max_total_tokens=rng.choice((96, 160, 256)), max_running_requests=rng.choice((2, 5, 16)))
    prompts: dict[str, list[int]] = {}
    shared = [rng.randrange(64) for _ in range(30)]
    aborted: set[str] = set()
    for step in range(160):
        roll = rng.random()
        if roll < 0.12 and len(prompts) < 14:
            rid = f"r{step}"
            prompts[rid] = shared[: rng.randint(0, 30)] + [rng.randrange(64) for _ in range(rng.randint(1, 12))]
            both.add(rid, prompts[rid], rng.randint(1, 9), remote=rng.random() < 0.8)
        elif roll < 0.15 and prompts:
            rid = rng.choice(list(prompts))
            if both.decode.finish(rid) is None:
                aborted.add(rid)
                both.abort(rid)
        elif roll < 0.55:
            both.turn_decode()
        else:
            both.turn_prefill()
        both.check()
    both.run_until_idle()
    both.check()
    spec = load_spec(toy)
    for rid, prompt in prompts.items():
        deltas = both.deltas[rid]
        assert [delta.finish is not None for delta in deltas].count(True) == 1, rid
        want = toy_continue(spec, prompt, 9)
        assert both.tokens(rid) == want[: len(both.tokens(rid))], rid
        assert (deltas[-1].finish is FinishReason.ABORT) == (rid in aborted)
    for built in (both.decode.built, both.prefill.built):
        assert built.engine.scheduler.stats().used_tokens == 0


def test_a_configured_address_that_does_not_answer_is_warned_of_once(
    toy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = pair(toy)
    both.turn_decode()
    assert not caplog.records, "it may be on its way"
    for _ in range(80):  # also when it is given up, and greeted anew
        both.clock.advance(2.0)
        both.turn_decode()
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.getMessage().startswith("prefill engine ? at local://prefill is connecting: no answer for 1")
