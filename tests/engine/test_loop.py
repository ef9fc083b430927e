"""The engine loop behind its endpoint: what a front that asks, aborts and scrapes gets to see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from serinus.canary import CanaryLead, Verdict
from serinus.core.clock import Clock, ManualClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.handoff import HandoffFinding
from serinus.core.plan import StepPlan
from serinus.core.request import FinishReason, Request, TokenDelta, TokenLogprobs
from serinus.core.sampling import SamplingParams
from serinus.engine.build import build_engine
from serinus.engine.built import Built
from serinus.engine.handoffs import HandoffParts, MadeHandoffs
from serinus.engine.loop import EngineLoop
from serinus.engine.roles import NoHandoffs
from serinus.models.small_checkpoints import make_toy
from serinus.sched import Scheduler
from serinus.wire import Arrived, Gone, PeerMessage, ZmqChannel, decode, encode, wait_any
from serinus.wire.messages import Abort, EngineCall, EngineReply, Generate, Message, Ready, Tokens


class Handoffs(NoHandoffs):
    """A unified engine to which a test can slip deltas that no step brought."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.scheduler = scheduler
        self.slipped: list[TokenDelta] = []
        self.drains = 0
        self.told: list[tuple[str, bool]] = []
        """Requests said to be aborted, and whether their pages were still their own."""

    def turn(self, now: float, messages: Sequence[PeerMessage | Gone], turns: int) -> list[TokenDelta]:
        slipped, self.slipped = self.slipped, []
        return slipped

    def drain(self, now: float) -> None:
        self.drains += 1

    def aborted(self, rid: str, now: float, *, code: str = "aborted", reason: str = "") -> None:
        own = self.scheduler.prompt_pages(rid)
        self.told.append((rid, own is not None and any(len(span.pages) for span in own.spans)))


class PlantedVerdicts(CanaryLead):
    """A canary without ranks that fails the requests that the test names."""

    def __init__(self, *rids: str) -> None:
        self.rids = rids
        self.health = SimpleNamespace(degraded="")

    def begin(self, plan: StepPlan) -> None:
        """There is nothing to check."""

    def idle(self) -> None:
        """There is nothing to sweep."""

    def take_findings(self) -> list[HandoffFinding]:
        return []

    def judge(self, findings: Iterable[tuple[int, object]]) -> Sequence[Verdict]:
        rids, self.rids = self.rids, ()
        return [Verdict(rid=rid, reason="KV integrity: planted") for rid in rids]


class World:
    """One loop, and the front's end of its endpoint."""

    def __init__(self, checkpoint: Path, address: str, **settings: object) -> None:
        self.clock = ManualClock()
        names = {"model_path": str(checkpoint), "page_size": 4, "max_total_tokens": 256, "decode_log_interval": 0,
                 "kv_canary": "raise"}  # fmt: skip  # heal would hold tokens of answers that are not streamed
        self.built: Built = build_engine(
            from_names(ServeConfig, {**names, **settings}), self.clock, handoffs_of=self._handoffs
        )
        self.endpoint = ZmqChannel(address)
        ready = Ready(
            engine="e", incarnation=1, role="unified", vocab_size=64, context_length=256, max_total_tokens=256,
            page_size=4,
        )  # fmt: skip
        self.loop = EngineLoop(self.built, endpoint=self.endpoint, ready=ready, clock=self.clock)
        self.front = ZmqChannel()
        self.front.connect("engine", address)
        self.outs: list[TokenDelta] = []
        self.replies: list[EngineReply] = []

    def _handoffs(self, parts: HandoffParts, clock: Clock) -> MadeHandoffs:
        self.handoffs = Handoffs(parts.scheduler)
        return MadeHandoffs(role=self.handoffs)

    def say(self, message: Message) -> None:
        """Send it, and let the loop take it now: not some steps later, as the threads of the sockets like."""
        self.front.send("engine", encode(message))
        wait_any([self.endpoint], 10.0)
        self.loop.turn()

    def ask(self, rid: str, count: int) -> None:
        sampling = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
        request = Request(rid=rid, prompt=np.asarray([1, 2, 3], np.int32), sampling=sampling, seed=0)
        self.say(Generate(request=request))

    def until(self, holds: Callable[[], bool]) -> None:
        """Turn and listen until `holds`."""
        for _ in range(500):
            if holds():
                return
            self.loop.turn()
            for event in self.front.poll(0.05):
                message = decode(event.parts).message if isinstance(event, Arrived) else None
                if isinstance(message, Tokens):
                    self.outs.extend(message.deltas)
                elif isinstance(message, EngineReply):
                    self.replies.append(message)
        raise AssertionError(f"never came to be; the front got {len(self.outs)} deltas")

    def call(self, what: str) -> EngineReply:
        """Ask the engine itself, and wait for its reply."""
        count = len(self.replies)
        self.say(EngineCall(call=count + 1, what=what))
        self.until(lambda: len(self.replies) > count)
        return self.replies[-1]

    def of(self, rid: str) -> list[TokenDelta]:
        return [out for out in self.outs if out.rid == rid]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), vocab=64, context=256, tokenizer=False)


@pytest.fixture
def world(toy: Path, tmp_path: Path) -> Iterator[World]:
    world = World(toy, f"ipc://{tmp_path}/e")
    yield world
    world.front.close()
    world.loop.close()


@pytest.mark.slow
def test_an_answer_that_fits_no_frame_fails_alone(world: World) -> None:
    for rid in ("big", "small"):
        world.ask(rid, 100)
    world.until(lambda: bool(world.of("big") and world.of("small")))
    place = TokenLogprobs(logprob=-1.0, top_ids=(1 << 30,) * 2000, top_logprobs=(-1.0,) * 2000)
    world.handoffs.slipped = [TokenDelta(rid="big", prompt_logprobs=(place,) * 2600)]  # 73 MB
    world.until(lambda: len(world.of("small")) == 100)
    last = world.of("big")[-1]
    assert (last.finish, last.error_status) == (FinishReason.ERROR, 400)
    assert "expected fewer log-probabilities" in last.error
    assert [out.finish for out in world.of("big")].count(FinishReason.ERROR) == 1
    assert world.of("small")[-1].finish is FinishReason.LENGTH
    assert world.built.engine.scheduler.idle
    assert world.built.metrics.get("num_finished_requests", "error") == 1


def test_a_stop_text_found_by_the_front_counts_as_finished_not_as_aborted(world: World) -> None:
    for rid in ("stopped", "left"):
        world.ask(rid, 100)
    world.until(lambda: bool(world.of("stopped") and world.of("left")))
    world.say(Abort(rid="stopped", silent=True, matched_stop=True))
    world.say(Abort(rid="left", silent=True))
    world.until(lambda: world.built.engine.scheduler.idle)
    world.built.engine.metrics.refresh(world.built.engine.scheduler, world.built.cache, 0, 0.0)
    metrics = world.built.metrics
    assert metrics.get("num_aborted_requests") == 1
    assert metrics.get("num_finished_requests", "stop") == 1
    assert metrics.get("num_finished_requests", "abort") == 1
    assert not any(out.finish for out in world.outs)


def test_a_request_aborted_after_its_first_token_has_queued_once(world: World) -> None:
    world.ask("one", 100)
    world.until(lambda: world.built.engine.scheduler.stats().totals.generation_tokens == 1)
    engine = world.built.engine
    delta = engine.scheduler.abort("one", "test")
    assert delta is not None
    assert delta.usage is not None
    assert (delta.finish, delta.usage.completion_tokens) == (FinishReason.ABORT, 1)
    engine.metrics.answered(delta)
    assert world.built.metrics.count("queue_time_seconds") == 1


def test_the_handoffs_are_told_once_that_the_engine_drains(world: World) -> None:
    world.ask("one", 20)
    world.until(lambda: bool(world.of("one")))
    assert world.handoffs.drains == 0
    world.loop.request_stop(drain=True)
    world.until(lambda: len(world.of("one")) == 20)
    assert world.handoffs.drains == 1


def test_a_flush_with_tiers_names_the_busy_requests_and_empties_device_and_host(toy: Path, tmp_path: Path) -> None:
    world = World(toy, f"ipc://{tmp_path}/e", enable_hierarchical_cache=True)
    cache = world.built.cache
    world.ask("guest", 40)
    refused = world.call("flush_cache")
    assert not refused.ok
    assert b"busy with 1 leases" in refused.body
    assert b"requests guest" in refused.body
    world.until(lambda: bool(world.of("guest")) and bool(world.of("guest")[-1].finish))
    world.until(lambda: cache.stats().backup_tokens > 0)
    flushed = world.call("flush_cache")
    assert (flushed.ok, flushed.body) == (True, b"cache flushed")
    for place, pool in cache.stats().pools.items():
        assert pool.pages.free == pool.page_count, place
    world.front.close()
    world.loop.close()


def test_handoffs_are_told_of_a_request_that_the_canary_fails_before_its_pages_are_freed(world: World) -> None:
    world.ask("guest", 40)
    world.built.engine.canary = PlantedVerdicts("guest")
    world.until(lambda: bool(world.of("guest")) and bool(world.of("guest")[-1].finish))
    assert world.handoffs.told == [("guest", True)]
    assert world.of("guest")[-1].error_status == 500
    assert world.built.engine.scheduler.idle


def test_an_engine_that_breaks_tells_its_fronts_why(world: World) -> None:
    world.ask("a", 40)
    world.loop.tell_failure("ValueError: broken")
    world.until(lambda: bool(world.replies))
    assert world.replies == [EngineReply(call=0, ok=False, body=b"the engine stopped: ValueError: broken")]
