"""Both sides of a handoff, as the scheduler sees them: reservations, chunks, holds, and every way it can go wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest

from serinus.core.request import FinishReason
from serinus.sched import HandoffSpec
from serinus.testing.builders import make_request
from serinus.testing.fake_runner import fake_continue
from serinus.testing.handoff_pair import Handoff, HandoffPair
from serinus.testing.tiny_engine import TinyEngine

PROMPT = list(range(10, 32))


def started(pair: HandoffPair, prompt: list[int] = PROMPT, **sampling: Any) -> Handoff:
    """A remote request with reserved pages, after its prefill was asked for."""
    pair.add(make_request("a", prompt, **{"max_new_tokens": 6, **sampling}), remote=True)
    pair.reserve()
    handoff = next(iter(pair.handoffs.values()))
    pair.ask(handoff)
    return handoff


def test_a_prompt_computed_elsewhere_is_continued_here() -> None:
    """Its first token, which came with the prompt, is one that penalties count: the fake runner checks that."""
    pair = HandoffPair(chunked_prefill_size=8)
    started(pair, repetition_penalty=1.2)
    pair.calm()
    pair.check_answers()
    pair.check_drained()
    usage = pair.decode.answers["a"].last.usage  # type: ignore[union-attr]
    assert usage is not None
    assert (usage.prefill_engine, usage.handoff_tokens, usage.handoff_pages) == ("prefill-0", 22, 6)
    assert pair.decode.runner.token_count == 5  # six tokens, the first of which came with the prompt
    assert pair.prefill.runner.token_count == 22


def test_a_reservation_covers_what_the_own_cache_lacks() -> None:
    pair = HandoffPair()
    pair.decode.add("warm", PROMPT[:14], max_new_tokens=1)
    pair.decode.run()
    handoff = started(pair)
    assert handoff.reservation.held == 12
    assert len(handoff.reservation.pages) == 3  # positions 12 to 21, the last page half used
    assert np.array_equal(handoff.reservation.prompt, PROMPT)
    pair.calm()
    pair.check_drained()


def test_chunks_travel_as_they_are_computed_and_the_last_one_brings_the_token() -> None:
    pair = HandoffPair(chunked_prefill_size=8)
    handoff = started(pair)
    pair.prefill.run()
    told = [(c.spans[0].first, len(c.pages), c.last) for c in pair.prefill.chunks]
    assert told == [(0, 2, False), (2, 2, False), (4, 2, True)]
    assert [c.token is not None for c in pair.prefill.chunks] == [False, False, True]
    assert pair.prefill.chunks[-1].token == fake_continue(handoff.reservation.request, 1, 1000)[0]
    assert pair.prefill.scheduler.stats().num_prefill_inflight_queue_reqs == 1


def test_the_first_chunk_brings_what_prefill_had_cached_beyond_what_decode_holds() -> None:
    engine = TinyEngine(chunked_prefill_size=8)
    engine.add("warm", PROMPT[:17], max_new_tokens=1)
    engine.run()
    engine.scheduler.add(make_request("h", PROMPT), handoff=HandoffSpec(xid="x", held=8))
    engine.run()
    assert [(c.spans[0].first, len(c.pages), c.last) for c in engine.chunks] == [(2, 4, True)]
    assert engine.chunks[0].cached_tokens == {"device": 8}  # of 16, decode held 8


def test_nothing_that_decode_holds_is_announced_even_if_prefill_must_compute_it() -> None:
    engine = TinyEngine(chunked_prefill_size=4)
    engine.scheduler.add(make_request("h", PROMPT), handoff=HandoffSpec(xid="x", held=12))
    engine.run()
    assert [(c.spans[0].first, len(c.pages)) for c in engine.chunks] == [(3, 1), (4, 1), (5, 1)]
    assert engine.runner.token_count == 22


def test_announced_pages_are_canonical_when_another_request_published_the_same_prompt_first() -> None:
    engine = TinyEngine(chunked_prefill_size=-1)
    engine.add("local", [*PROMPT[:8], *range(300, 330)], max_new_tokens=5)
    engine.scheduler.add(make_request("h", [*PROMPT[:8], *range(400, 420)]), handoff=HandoffSpec(xid="x", held=0))
    engine.step()
    assert engine.cache.stats().duplicate_pages == 2
    prefix = engine.cache.match_prefix("", np.array(PROMPT[:8], np.int32), 8)
    assert engine.chunks[0].pages[:2].tolist() == prefix.pages.tolist()


def test_announced_pages_stay_until_they_are_drained_whatever_happens_to_their_request() -> None:
    engine = TinyEngine(page_count=9, chunked_prefill_size=8)
    engine.scheduler.add(make_request("h", PROMPT), handoff=HandoffSpec(xid="x", held=0))
    engine.step()
    chunk = engine.chunks[0]
    before = engine.runner.content_S.copy()
    assert engine.scheduler.abort("h", "operator") is None
    engine.add("big", list(range(500, 522)), max_new_tokens=1)
    engine.run()
    slots = (chunk.pages[:, None] * 4 + np.arange(4)).reshape(-1)
    assert np.array_equal(engine.runner.content_S[slots], before[slots])
    assert engine.scheduler.stats().num_prefill_inflight_queue_reqs == 1
    assert engine.scheduler.chunk_drained("h", chunk.spans)
    engine.check_drained()


def test_draining_a_chunk_twice_changes_nothing() -> None:
    pair = HandoffPair(chunked_prefill_size=8)
    handoff = started(pair)
    pair.step_prefill()
    chunk = handoff.chunks[0]
    assert pair.prefill.scheduler.chunk_drained(chunk.rid, chunk.spans)
    assert not pair.prefill.scheduler.chunk_drained(chunk.rid, chunk.spans)
    assert not pair.prefill.scheduler.chunk_drained("nobody", chunk.spans)


def test_a_handoff_that_ends_takes_its_request_out_of_every_state() -> None:
    for steps in range(4):  # waiting, two chunks in, nearly done, in flight
        engine = TinyEngine(chunked_prefill_size=8)
        engine.scheduler.add(make_request("h", PROMPT), handoff=HandoffSpec(xid="x", held=0))
        for _ in range(steps):
            engine.step()
        assert engine.scheduler.handoff_ended("h")
        assert not engine.scheduler.handoff_ended("h")
        engine.check_drained()


def test_only_a_request_in_flight_can_be_drained() -> None:
    engine = TinyEngine(chunked_prefill_size=8)
    engine.scheduler.add(make_request("h", PROMPT), handoff=HandoffSpec(xid="x", held=0))
    engine.step()
    assert not engine.scheduler.handoff_drained("h")
    engine.run()
    assert engine.scheduler.handoff_drained("h")
    engine.check_drained()
    assert engine.scheduler.stats().totals.finished == 1


def test_a_prompt_that_never_lands_is_computed_here_at_the_place_of_its_age() -> None:
    pair = HandoffPair(max_running_requests=1)
    handoff = started(pair)
    pair.decode.add("later", [7, 8, 9], max_new_tokens=2)
    pair.recompute(handoff)
    pair.decode.run()
    assert not pair.decode.scheduler.recompute("a", "again")
    usage = pair.decode.answers["a"].last.usage  # type: ignore[union-attr]
    assert usage is not None
    assert (usage.local_reason, usage.handoff_pages) == ("peer_gone", 0)
    assert usage.first_token_seconds < pair.decode.answers["later"].last.usage.first_token_seconds  # type: ignore[union-attr]
    pair.calm()
    pair.check_drained()


def test_what_lands_after_an_abort_changes_nothing() -> None:
    pair = HandoffPair()
    started(pair)
    pair.abort("a")
    assert pair.decode.scheduler.landed("a", 5, None, 0.0) is None
    pair.calm()
    pair.check_drained()


def test_reserved_pages_belong_to_no_other_request_until_the_request_ends() -> None:
    pair = HandoffPair(page_count=9)
    handoff = started(pair)
    reserved = set(handoff.reservation.pages.tolist())
    pair.decode.add("local", [1, 2, 3], max_new_tokens=9)
    pair.decode.run()
    assert "local" not in pair.decode.answers or not reserved & _pages_used(pair.decode)
    pair.check()
    pair.calm()
    pair.check_answers()


def _pages_used(engine: TinyEngine) -> set[int]:
    return set((np.unique(engine.runner.table_RC) // engine.settings.page_size).tolist())


def test_a_remote_request_waits_for_pages_and_counts_as_prealloc() -> None:
    pair = HandoffPair(page_count=9)
    pair.decode.add("hog", list(range(40, 60)), max_new_tokens=9)
    pair.step_decode()
    pair.add(make_request("a", PROMPT, max_new_tokens=2), remote=True)
    pair.reserve()
    stats = pair.decode.scheduler.stats()
    assert (stats.num_decode_prealloc_queue_reqs, stats.num_decode_transfer_queue_reqs) == (1, 0)
    pair.decode.run()
    pair.reserve()
    stats = pair.decode.scheduler.stats()
    assert (stats.num_decode_prealloc_queue_reqs, stats.num_decode_transfer_queue_reqs) == (0, 1)
    pair.calm()
    pair.check_drained()


def test_requests_in_transfer_count_as_running_so_that_each_has_a_row_when_it_lands() -> None:
    pair = HandoffPair(max_running_requests=2)
    pair.decode.add("local", [7] * 5, max_new_tokens=9)
    pair.step_decode()
    for rid in ("a", "b"):
        pair.add(make_request(rid, [ord(rid)] * 9, max_new_tokens=2), remote=True)
    pair.reserve()
    assert [handoff.rid for handoff in pair.handoffs.values()] == ["a"]
    pair.decode.add("more", [8] * 5, max_new_tokens=1)
    pair.step_decode()
    assert "more" not in pair.decode.answers
    pair.calm()
    pair.check_answers()


def test_a_younger_remote_request_does_not_overtake_a_local_one_that_waits_for_room() -> None:
    pair = HandoffPair(page_count=13, growth_tokens=0)
    pair.decode.add("hog", list(range(40, 68)), max_new_tokens=12)
    pair.step_decode()
    pair.decode.add("old", PROMPT, max_new_tokens=2)
    pair.step_decode()
    pair.add(make_request("young", [1, 2], max_new_tokens=2), remote=True)
    pair.reserve()
    assert not pair.handoffs
    assert pair.decode.scheduler.abort("old", "client gone") is not None
    pair.reserve()
    assert [handoff.rid for handoff in pair.handoffs.values()] == ["young"]


def test_a_younger_local_request_does_not_overtake_a_remote_one_that_waits_for_room() -> None:
    pair = HandoffPair(page_count=13, growth_tokens=0)
    pair.decode.add("hog", list(range(40, 68)), max_new_tokens=12)
    pair.step_decode()
    pair.add(make_request("a", PROMPT, max_new_tokens=2), remote=True)
    pair.decode.add("young", [1, 2], max_new_tokens=2)
    pair.step_decode()
    assert "young" not in pair.decode.answers
    pair.abort("a")
    pair.step_decode()
    assert "young" in pair.decode.answers


def test_a_row_that_a_step_gave_back_goes_to_the_oldest_remote_or_local() -> None:
    """The row is free when the next step is planned, and the remote one is asked about it before that step is."""
    pair = HandoffPair(max_running_requests=1)
    pair.decode.add("runs", [7] * 5, max_new_tokens=3)
    for number in range(3):
        pair.decode.add(f"local-{number}", [8 + number] * 5, max_new_tokens=2)
    pair.step_decode()
    pair.add(make_request("remote", PROMPT, max_new_tokens=2), remote=True)
    for number in range(3, 6):
        pair.decode.add(f"local-{number}", [8 + number] * 5, max_new_tokens=2)
    while not pair.handoffs:
        pair.step_decode()
        pair.reserve()
    assert list(pair.decode.answers) == ["runs", "local-0", "local-1", "local-2"]
    pair.calm()
    pair.check_answers()


def test_a_prompt_that_lacks_little_is_computed_here() -> None:
    pair = HandoffPair(min_remote_tokens=8)
    pair.decode.add("warm", PROMPT, max_new_tokens=1)
    pair.decode.run()
    pair.add(make_request("a", PROMPT, max_new_tokens=2), remote=True)
    pair.calm()
    assert pair.decode.answers["a"].last.usage.local_reason == "short"  # type: ignore[union-attr]
    pair.check_answers()


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [({"prompt_logprobs": 0}, "prompt_logprobs"), ({"hidden_state": True, "pooling": "mean"}, "pooling")],
)
def test_what_is_wanted_of_each_prompt_token_keeps_a_request_at_home(wanted: dict[str, Any], reason: str) -> None:
    pair = HandoffPair()
    pair.add(make_request("a", PROMPT, max_new_tokens=2, **wanted), remote=True)
    assert pair.decode.scheduler.take_reservations(0.0) == ()
    pair.calm()
    assert pair.decode.answers["a"].last.usage.local_reason == reason  # type: ignore[union-attr]
    pair.check_answers()


def test_copies_of_one_prompt_are_transferred_once() -> None:
    pair = HandoffPair()
    for rid in ("a", "b", "c"):
        pair.add(make_request(rid, PROMPT, max_new_tokens=3), remote=True)
    pair.calm()
    pair.check_answers()
    handed = [pair.decode.answers[rid].last.usage.handoff_tokens for rid in ("a", "b", "c")]  # type: ignore[union-attr]
    assert handed == [22, 2, 2]


def test_a_request_waits_no_longer_for_the_same_prompt_at_an_engine_that_stands_still() -> None:
    engine = TinyEngine()
    for rid, address in (("a", "tcp://one"), ("b", "tcp://two"), ("c", "tcp://one")):
        engine.scheduler.add(replace(make_request(rid, PROMPT), prefill_address=address), remote=True)
    still = frozenset({"tcp://one"})
    taken = [engine.scheduler.take_reservations(0.0, {}, each) for each in (frozenset(), frozenset(), still)]
    assert [[reservation.rid for reservation in each] for each in taken] == [["a"], [], ["b"]]  # c waits for b


@pytest.mark.parametrize("new_tokens", [1, 6])
def test_a_first_token_that_ends_the_answer_ends_it_as_it_lands(new_tokens: int) -> None:
    stop = fake_continue(make_request("a", PROMPT), 1, 1000)[0]
    pair = HandoffPair(eos_ids=(stop,))
    started(pair, max_new_tokens=new_tokens)
    pair.calm()
    assert pair.decode.answers["a"].tokens == [stop]
    assert pair.decode.answers["a"].finish is FinishReason.STOP
    pair.check_drained()


def _opcodes_of_a_turn(queued: int, *, run_short: bool = False) -> int:
    """What one turn costs a decode engine while so many requests with one prompt wait: instructions of the interpreter,
    the same on any machine."""
    engine = TinyEngine(page_count=129, max_running_requests=8, max_queued_requests=8192, min_remote_tokens=8)
    for i in range(queued):
        engine.scheduler.add(make_request(f"r{i}", PROMPT), remote=True)
    (first,) = engine.scheduler.take_reservations(0.0)
    if run_short:
        assert engine.scheduler.landed(first.rid, 5, None, 0.0) is not None
    count = 0

    def counted(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return counted

    before = sys.gettrace()
    sys.settrace(counted)
    try:
        reserved = engine.scheduler.take_reservations(0.0)
        engine.scheduler.incoming.take_kept()
        engine.scheduler.plan(0.0)
    finally:
        sys.settrace(before)
    assert reserved == (), "they wait for the first one, or are computed here"
    return count


@pytest.mark.parametrize("run_short", [False, True])
def test_a_turn_costs_the_same_however_many_requests_with_one_prompt_wait(run_short: bool) -> None:
    few, many = (_opcodes_of_a_turn(queued, run_short=run_short) for queued in (300, 4000))
    assert many < few * 1.1, f"{few} instructions with 300 that wait, {many} with 4,000"


def test_a_request_behind_thousands_that_wait_for_one_prompt_is_looked_at_in_turn() -> None:
    engine = TinyEngine(page_count=129, max_running_requests=8, max_queued_requests=8192)
    for i in range(1000):
        engine.scheduler.add(make_request(f"r{i}", PROMPT), remote=True)
    engine.scheduler.add(make_request("other", [7] * 20), remote=True)
    reserved = [each.rid for _ in range(1000 // 32 + 1) for each in engine.scheduler.take_reservations(0.0)]
    assert reserved == ["r0", "other"]


def test_no_request_overtakes_one_without_room_behind_many_that_wait_for_one_prompt() -> None:
    engine = TinyEngine(page_count=17, max_running_requests=8, max_queued_requests=8192, context_length=64)
    for i in range(100):
        engine.scheduler.add(make_request(f"r{i}", PROMPT), remote=True)
    engine.scheduler.add(make_request("large", [7] * 60, max_new_tokens=1), remote=True)
    for i in range(40):
        engine.scheduler.add(make_request(f"small-{i}", [9, i], max_new_tokens=1), remote=True)
    reserved = [each.rid for _ in range(20) for each in engine.scheduler.take_reservations(0.0)]
    assert reserved == ["r0"]
    engine.scheduler.abort("r0", "client gone")
    for i in range(1, 100):
        engine.scheduler.abort(f"r{i}", "client gone")
    assert [each.rid for each in engine.scheduler.take_reservations(0.0)] == ["large"]
