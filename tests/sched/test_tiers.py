"""Parts and tiers as the scheduler sees them: windows that are given back, hits from host and storage, loads that fail,
requests that wait for a storage. The test ends copies; nothing here takes time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serinus.cache import PartGeometry
from serinus.core.errors import ConfigError
from serinus.core.handoff import HandoffSpec
from serinus.core.parts import Part
from serinus.testing.builders import make_request
from serinus.testing.fake_mover import StoredPages
from serinus.testing.fake_runner import fake_continue
from serinus.testing.handoff_pair import HandoffPair
from serinus.testing.tiny_engine import TinyEngine

PROMPT = list(range(1, 23))
SLIDING: dict[str, Any] = {"beside": {Part.SWA: PartGeometry(pages=33, window=6)}}


def host_hit(**settings: Any) -> TinyEngine:
    """An engine whose host alone knows the beginning of PROMPT: 20 tokens."""
    engine = TinyEngine(host_pages=65, **settings)
    engine.add("warm", PROMPT, max_new_tokens=1)
    engine.run()
    engine.end_copies()
    engine.run()
    engine.cache.evict(32)
    assert engine.cache.free() == 32, engine.cache.stats()
    return engine


def expected(engine: TinyEngine, rid: str, prompt: list[int], count: int) -> list[int]:
    return fake_continue(make_request(rid, prompt), count, 1000, windows=engine.runner.windows)


def test_a_request_runs_in_the_step_that_begins_its_load() -> None:
    engine = host_hit(auto=False)
    engine.add("a", [*PROMPT, 50], max_new_tokens=3)
    outcome = engine.step()
    assert outcome is not None
    assert (outcome.prompt_tokens, dict(outcome.cached_by_tier)) == (3, {"device": 0, "host": 20, "storage": 0})
    engine.run()
    assert engine.answers["a"].tokens == expected(engine, "a", [*PROMPT, 50], 3)
    last = engine.answers["a"].last
    assert last is not None
    assert last.usage is not None
    assert last.usage.cached_tokens == {"host": 20}
    assert engine.scheduler.stats().totals.cached_tokens == {"host": 20}


def test_no_token_leaves_that_was_computed_on_a_load_that_failed() -> None:
    engine = host_hit(auto=False)
    engine.add("a", [*PROMPT, 50], max_new_tokens=3)
    plan = engine.scheduler.plan(engine.clock.now())
    assert plan is not None
    assert engine.mover is not None
    (op,) = engine.mover.pending
    engine.mover.fail(op)
    outcome = engine.scheduler.commit(plan, engine.runner.run(plan), engine.clock.now())
    assert outcome.deltas == ()
    assert engine.scheduler.stats().num_queue_reqs == 1
    engine.run()
    assert engine.answers["a"].tokens == expected(engine, "a", [*PROMPT, 50], 3)
    engine.end_copies()
    engine.check_drained()


def test_an_aborted_request_whose_load_failed_is_gone_after_its_step() -> None:
    engine = host_hit(auto=False)
    engine.add("a", [*PROMPT, 50], max_new_tokens=3)
    plan = engine.scheduler.plan(engine.clock.now())
    assert plan is not None
    assert engine.mover is not None
    engine.mover.fail(next(iter(engine.mover.pending)))
    assert engine.scheduler.abort("a", "client gone") is not None
    engine.scheduler.commit(plan, engine.runner.run(plan), engine.clock.now())
    assert engine.scheduler.idle
    engine.check_drained()


def test_decode_reserves_pages_when_its_host_hit_has_come_and_not_before() -> None:
    pair = HandoffPair(host_pages=65, auto=False)
    pair.decode = host_hit(auto=False)
    pair.add(make_request("r", [*PROMPT, *range(50, 60)], max_new_tokens=4), remote=True)
    pair.reserve()
    assert not pair.handoffs
    assert pair.decode.scheduler.stats().num_decode_transfer_queue_reqs == 1
    assert not pair.decode.scheduler.incoming.is_granted("r"), "one that was asked for early is asked for again then"
    pair.decode.end_copies()
    pair.decode.step()
    pair.reserve()
    assert pair.decode.scheduler.incoming.is_granted("r")
    (handoff,) = pair.handoffs.values()
    assert handoff.reservation.held == 20
    pair.calm()
    pair.check_answers()
    pair.check_drained()


def test_a_reservation_whose_load_failed_begins_once_more() -> None:
    pair = HandoffPair(host_pages=65, auto=False)
    pair.decode = host_hit(auto=False)
    pair.add(make_request("r", [*PROMPT, *range(50, 60)], max_new_tokens=4), remote=True)
    pair.reserve()
    assert pair.decode.mover is not None
    (op,) = pair.decode.mover.pending
    pair.decode.mover.fail(op)
    pair.decode.end_copies()
    pair.decode.step()
    pair.reserve()
    assert [handoff.reservation.held for handoff in pair.handoffs.values()] == [0]
    pair.calm()
    pair.check_answers()
    pair.check_drained()


def stored(**settings: Any) -> TinyEngine:
    """A fresh engine beside a storage that has 20 tokens of PROMPT."""
    pages: StoredPages = {}
    first = TinyEngine(host_pages=65, stored=pages)
    first.add("warm", PROMPT, max_new_tokens=1)
    first.run()
    first.run()
    assert len(pages) == 5, pages
    return TinyEngine(host_pages=65, stored=pages, auto=False, **settings)


def test_a_request_that_waits_for_the_storage_holds_no_other_request_up() -> None:
    engine = stored(prefetch_policy="wait_complete")
    engine.add("waits", PROMPT, max_new_tokens=2)
    engine.add("other", [7, 8, 9], max_new_tokens=2)
    for _ in range(3):
        engine.step()
    assert engine.answers["other"].finish is not None
    assert "waits" not in engine.answers
    assert engine.step() is None
    assert engine.scheduler.in_flight > 0
    for _ in range(4):
        engine.end_copies()
        engine.step()
    assert engine.answers["waits"].tokens == expected(engine, "waits", PROMPT, 2)
    last = engine.answers["waits"].last
    assert last is not None
    assert last.usage is not None
    assert last.usage.cached_tokens == {"storage": 20}


def test_a_request_whose_files_have_just_come_is_not_one_without_room() -> None:
    """Nothing is under way and it stands in its queue still: no reason to give quarantined pages out."""
    engine = stored(prefetch_policy="wait_complete", min_remote_tokens=1)
    engine.scheduler.add(replace(make_request("waits", PROMPT, max_new_tokens=2), prefill_address="p:1"), remote=True)
    assert engine.scheduler.take_reservations(0.0) == ()
    assert engine.plan() is None
    while engine.scheduler.in_flight:
        assert not engine.scheduler.is_blocked
        engine.end_copies()
        assert engine.plan() is None
    assert engine.scheduler.stats().num_decode_prealloc_queue_reqs == 1
    assert not engine.scheduler.is_blocked
    assert engine.scheduler.is_remote("waits")


def test_a_request_without_room_is_blocked_until_there_is_some() -> None:
    engine = TinyEngine(page_count=9)
    engine.add("runs", PROMPT[:12], max_new_tokens=16)
    engine.step()
    assert not engine.scheduler.is_blocked
    engine.add("waits", [99, *PROMPT], max_new_tokens=4)
    engine.step()
    assert engine.scheduler.is_blocked
    engine.run()
    assert not engine.scheduler.is_blocked
    assert engine.answers["waits"].finish is not None


def test_a_request_that_waits_for_room_keeps_what_the_storage_brought_and_is_one_hit_once_it_is_placed() -> None:
    engine = stored(prefetch_policy="wait_complete", page_count=11)
    engine.add("first", PROMPT[:9], max_new_tokens=1)
    engine.add("runs", list(range(100, 112)), max_new_tokens=12)
    while "first" not in engine.answers:
        engine.end_copies()
        engine.step()
    engine.add("waits", PROMPT, max_new_tokens=2)
    for _ in range(6):
        engine.end_copies()
        engine.step()
    (shared,) = [node for node in engine.cache.tree.nodes() if node.end == 8]
    assert engine.scheduler.is_blocked
    assert (shared.hit_count, shared.uses, engine.cache.stats().hit_tokens) == (1, 2, 0), "those of the first"
    while not engine.scheduler.idle:
        engine.end_copies()
        engine.step()
    last = engine.answers["waits"].last
    assert last is not None
    assert last.usage is not None
    assert last.usage.cached_tokens == {"device": 8, "storage": 12}
    assert engine.cache.stats().hit_tokens == 8


def test_the_deadline_of_a_prefetch_takes_what_has_come() -> None:
    engine = stored(prefetch_policy="timeout", prefetch_s_max=1.0)
    engine.add("a", PROMPT, max_new_tokens=2)
    assert engine.step() is None
    engine.clock.advance(1.5)
    assert engine.step() is not None
    engine.run()
    assert engine.answers["a"].tokens == expected(engine, "a", PROMPT, 2)
    assert engine.runner.token_count >= len(PROMPT)


def test_best_effort_does_not_wait() -> None:
    engine = stored(prefetch_policy="best_effort")
    engine.add("a", PROMPT, max_new_tokens=1)
    assert engine.step() is not None
    assert engine.answers["a"].tokens == expected(engine, "a", PROMPT, 1)


def restarted(prompts: list[list[int]], **settings: Any) -> TinyEngine:
    """An engine that begins anew beside a storage that has these prompts."""
    pages: StoredPages = {}
    first = TinyEngine(host_pages=513, stored=pages)
    for number, prompt in enumerate(prompts):
        first.add(f"warm {number}", prompt, max_new_tokens=1)
        first.run()
    first.run()
    return TinyEngine(stored=pages, **{"max_running_requests": 2, **settings})


def sources(engine: TinyEngine, rid: str) -> dict[str, int]:
    """Where the KV of an answered request's prompt was found."""
    last = engine.answers[rid].last
    assert last is not None
    assert last.usage is not None
    return dict(last.usage.cached_tokens)


@pytest.mark.parametrize(
    "settings", [{}, {"prefetch_policy": "timeout"}, {"overlaps": True}, {"schedule_policy": "lpm"}]
)
@pytest.mark.parametrize(
    ("count", "length", "host_pages"),
    [pytest.param(16, 22, 25, id="more than the host has room for"), pytest.param(100, 5, 401, id="more than 64")],
)
def test_each_of_many_prompts_that_wait_is_read_from_the_storage(
    count: int, length: int, host_pages: int, settings: dict[str, Any]
) -> None:
    prompts = [[number + 1, *range(200, 199 + length)] for number in range(count)]
    engine = restarted(prompts, host_pages=host_pages, **settings)
    for number, prompt in enumerate(prompts):
        engine.add(f"r{number}", prompt, max_new_tokens=2)
    engine.run()
    found = [sources(engine, f"r{number}") for number in range(count)]
    assert found == [{"storage": (length - 1) // 4 * 4}] * count
    assert not engine.cache.prefetches_full(10_000), "nothing is kept for requests that have ended"
    engine.check_drained()


def test_the_first_in_line_is_read_from_the_storage_whatever_is_kept_for_others() -> None:
    prompts = [[number, *range(200, 221)] for number in (1, 2)]
    engine = restarted(prompts, host_pages=11, schedule_policy="priority", priority_ageing_s=0)
    for rid in ("run", "too"):
        engine.add(rid, [7, 8, 9], max_new_tokens=6, priority=-9)
    engine.step()
    engine.add("asked", prompts[0], max_new_tokens=1, priority=5)
    for _ in range(3):
        engine.step()
    engine.add("urgent", prompts[1], max_new_tokens=1, priority=0)
    ends: list[str] = []
    while not engine.scheduler.idle:
        outcome = engine.step()
        ends += [delta.rid for delta in outcome.deltas if delta.finish is not None] if outcome else []
    assert ends.index("urgent") < ends.index("asked")
    assert sources(engine, "urgent") == {"storage": 20}


def test_prompts_that_are_tried_first_wait_for_no_room_that_others_keep_on_the_host() -> None:
    """The longest cached prefixes are tried first. What the host keeps for an older prompt goes on only when that is
    tried too, and it is not, as long as these two wait."""
    trunk = list(range(300, 324))
    prompts = [list(range(200, 221)), *([*trunk, *range(first, first + 21)] for first in (400, 500))]
    engine = restarted(prompts, host_pages=11, schedule_policy="lpm", max_running_requests=1)
    engine.add("trunk", [*trunk, 7], max_new_tokens=1)
    engine.run()
    engine.add("runs", [7, 8, 9], max_new_tokens=6)
    engine.step()
    for rid, prompt in zip(("old", "b", "c"), prompts, strict=True):
        engine.add(rid, prompt, max_new_tokens=1)
        engine.step()
    engine.run()
    assert [sources(engine, rid) for rid in ("b", "c")] == [{"device": 24, "storage": 20}] * 2
    assert engine.answers["old"].finish is not None


def test_a_prompt_has_its_time_for_the_storage_from_when_that_is_asked_for_it() -> None:
    """What it waits in line before, as there is no room for what it would bring, is none of it."""
    prompts = [[number + 1, *range(200, 221)] for number in range(16)]
    engine = restarted(prompts, host_pages=25, prefetch_policy="timeout", prefetch_s_max=1.0)
    for number, prompt in enumerate(prompts):
        engine.add(f"r{number}", prompt, max_new_tokens=2)
    while not engine.scheduler.idle:
        engine.step()
        engine.clock.advance(0.5)
    assert [sources(engine, f"r{number}") for number in range(16)] == [{"storage": 20}] * 16


@pytest.mark.parametrize("prompt", [[7, 8], [*range(500, 525), 3]], ids=["below a page", "on the device"])
def test_a_prompt_that_lacks_nothing_waits_for_no_room_for_what_others_lack(prompt: list[int]) -> None:
    prompts = [[number + 1, *range(200, 221)] for number in range(3)]
    engine = restarted(prompts, host_pages=17, auto=False, max_running_requests=4)
    engine.add("warm", [*range(500, 525), 1], max_new_tokens=1)
    for _ in range(6):
        engine.step()
        engine.end_copies()
        for op in list(engine.storage.pending):
            engine.storage.end(op)
    for number, each in enumerate(prompts):
        engine.add(f"slow {number}", each, max_new_tokens=1)
    engine.add("quick", prompt, max_new_tokens=1)
    for _ in range(5):
        engine.step()
    assert set(engine.answers) == {"warm", "quick"}


def test_an_aborted_request_lets_its_prefetch_go() -> None:
    engine = stored(prefetch_policy="wait_complete")
    engine.add("a", PROMPT, max_new_tokens=1)
    engine.step()
    engine.scheduler.abort("a", "client gone")
    assert engine.scheduler.idle
    for _ in range(3):
        engine.end_copies()
        engine.step()
    assert engine.scheduler.in_flight == 0
    engine.check_drained()


def test_a_long_request_holds_its_window_and_no_more() -> None:
    engine = TinyEngine(
        beside={Part.SWA: PartGeometry(pages=5, window=6)}, page_count=33, context_length=128, chunked_prefill_size=-1
    )
    engine.add("a", PROMPT, max_new_tokens=90)
    held = []
    while engine.step() is not None:
        state = engine.scheduler._states.get("a")
        if state is not None and state.generated:
            held += [row.count for row in state.windowed]
    assert engine.answers["a"].tokens == expected(engine, "a", PROMPT, 90)
    assert max(held) <= 3  # three pages of four tokens: a window of six and the page that is written
    engine.check_drained()


def test_a_prefix_whose_window_is_gone_is_computed_again_as_far_as_needed() -> None:
    engine = TinyEngine(**SLIDING)
    engine.add("warm", PROMPT, max_new_tokens=1)
    engine.run()
    engine.cache.evict(32, part=Part.SWA)
    engine.add("a", [*PROMPT, 50], max_new_tokens=2)
    engine.run()
    assert engine.answers["a"].tokens == expected(engine, "a", [*PROMPT, 50], 2)
    assert engine.runner.token_count == len(PROMPT) + len(PROMPT) + 1 + 1  # all of it, and one token decoded
    engine.check_drained()


def test_only_the_window_behind_the_prompt_travels() -> None:
    pair = HandoffPair(chunked_prefill_size=8, **SLIDING)
    pair.add(make_request("r", PROMPT, max_new_tokens=9), remote=True)
    pair.reserve()
    (handoff,) = pair.handoffs.values()
    assert [(span.part, span.first, len(span.pages)) for span in handoff.reservation.spans] == [
        (Part.FULL, 0, 6), (Part.SWA, 4, 2),
    ]  # fmt: skip
    pair.ask(handoff)
    pair.prefill.run()
    told = [[(span.part.name, span.first, span.end) for span in chunk.spans] for chunk in pair.prefill.chunks]
    assert told == [[("FULL", 0, 2)], [("FULL", 2, 4)], [("FULL", 4, 6), ("SWA", 4, 6)]]
    pair.handoffs[handoff.xid].chunks.extend(pair.prefill.chunks)
    pair.calm()
    pair.check_answers()
    pair.check_drained()


def test_a_prefill_engine_announces_host_hits_when_they_are_on_its_device() -> None:
    engine = host_hit(auto=False, chunked_prefill_size=8)
    spec = HandoffSpec(xid="x", held=4)
    engine.scheduler.add(make_request("h", PROMPT), handoff=spec)
    engine.run()
    (chunk,) = engine.chunks
    assert [(span.first, span.end) for span in chunk.spans] == [(1, 6)]
    assert chunk.cached_tokens == {"host": 16}  # of 20, decode held 4


def test_a_retracted_request_finds_its_pages_on_the_host() -> None:
    engine = TinyEngine(page_count=9, context_length=40, host_pages=33, growth_tokens=0, max_running_requests=2,
                        write_policy="write_back")  # fmt: skip
    for rid, first in (("old", 1), ("young", 100)):
        engine.add(rid, list(range(first, first + 12)), max_new_tokens=16)
    engine.run()
    assert engine.scheduler.stats().totals.retracted > 0
    for rid, first in (("old", 1), ("young", 100)):
        assert engine.answers[rid].tokens == expected(engine, rid, list(range(first, first + 12)), 16)
    assert engine.cache.stats().loaded_tokens > 0
    engine.check_drained()


def test_a_part_without_room_for_one_window_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="part SWA has 2 pages"):
        TinyEngine(beside={Part.SWA: PartGeometry(pages=3, window=12)})
