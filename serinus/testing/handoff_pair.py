"""Two tiny engines, one prefilling for the other, and the handoffs between them; the test orders the deliveries.

Stands in for `pd` under mode A: pages are copied only while the reservation stands; whatever comes later is dropped.
Every answer is held against the oracle at the end. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from serinus.core.handoff import ChunkReady, HandoffSpec, Reservation
from serinus.core.request import FinishReason, Request
from serinus.sched import Outcome
from serinus.testing.fake_runner import copy_pages, fake_continue, fake_pooled, fake_prompt_logprobs
from serinus.testing.tiny_engine import TinyEngine


@dataclass(slots=True)
class Handoff:
    """One attempt, as both sides' `pd` would know it."""

    rid: str
    """Name of the request at the decode engine; the prefill engine calls it by `xid`."""
    xid: str
    reservation: Reservation
    asked: bool = False
    """Whether the prefill engine has been told."""
    chunks: list[ChunkReady] = field(default_factory=list)
    """Chunks that were announced, but not delivered."""
    pages_come: int = 0
    last: ChunkReady | None = None
    """The last chunk, once it was delivered."""
    aborted: bool = False
    """Whether the prefill engine ended it by itself."""
    over: bool = False
    """Decode has closed the grant (landed, aborted, or recomputes)."""


class HandoffPair:
    """`decode` answers; `prefill` computes prompts for it."""

    def __init__(self, **engine: Any) -> None:
        self.decode = TinyEngine(**engine)
        self.prefill = TinyEngine(**engine)
        self.requests: dict[str, Request] = {}
        """All that ever asked the decode engine..."""
        self.guests: dict[str, Request] = {}
        """...and those that asked the prefill engine for an answer of its own."""
        self.aborted: set[str] = set()
        self.handoffs: dict[str, Handoff] = {}
        self._attempts = 0

    @property
    def quiet(self) -> bool:
        """Whether both engines are idle and no handoff is under way."""
        return self.decode.scheduler.idle and self.prefill.scheduler.idle and not self.handoffs

    def add(self, request: Request, *, remote: bool) -> None:
        """A request arrives at the decode engine."""
        self.decode.scheduler.add(request, remote=remote)
        self.requests[request.rid] = request

    def add_guest(self, request: Request) -> None:
        """A request that the prefill engine answers by itself, between the prompts it computes for decode."""
        self.prefill.scheduler.add(request)
        self.guests[request.rid] = request

    def reserve(self) -> None:
        """The decode engine reserves pages for the requests it has room for; the prefill engine is not told yet."""
        for reservation in self.decode.scheduler.take_reservations(self.decode.clock.now()):
            self._attempts += 1
            xid = f"x{self._attempts}"
            self.handoffs[xid] = Handoff(rid=reservation.rid, xid=xid, reservation=reservation)

    def ask(self, handoff: Handoff) -> None:
        """Tell the prefill engine."""
        request = handoff.reservation.request
        copy = Request(
            rid=handoff.xid, prompt=request.prompt, sampling=request.sampling, seed=request.seed,
            cache_salt=request.cache_salt, priority=request.priority, arrival=self.prefill.clock.now(),
        )  # fmt: skip
        spec = HandoffSpec(xid=handoff.xid, held=handoff.reservation.held)
        self.prefill.scheduler.add(copy, handoff=spec)
        handoff.asked = True

    def step_decode(self) -> bool:
        """One step there; False = nothing to run."""
        self.reserve()
        return self.decode.step() is not None

    def step_prefill(self) -> bool:
        """One step there; its chunks are ready for delivery. False = nothing to run."""
        outcome = self.prefill.step()
        self._announced(outcome)
        return outcome is not None

    def commit(self, engine: TinyEngine) -> None:
        """The oldest plan under way of one of them ends."""
        self._announced(engine.commit())

    def _announced(self, outcome: Outcome | None) -> None:
        for chunk in outcome.chunks if outcome else ():
            self.handoffs[chunk.xid].chunks.append(chunk)

    def deliver(self, handoff: Handoff, index: int = 0) -> None:
        """One announced chunk arrives, is copied (or dropped, where the grant is closed), and is drained."""
        chunk = handoff.chunks.pop(index)
        if not handoff.over:
            self.prefill.catch_up()
            self.decode.catch_up()
            granted = {span.part: span for span in handoff.reservation.spans}
            for span in chunk.spans:
                target = granted[span.part]
                first = span.first - target.first
                pages = target.pages[first : first + len(span.pages)]
                copy_pages(self.prefill.runner, span.pages, self.decode.runner, pages, span.part)
                handoff.pages_come += len(span.pages)
            handoff.last = chunk if chunk.last else handoff.last
        assert self.prefill.scheduler.chunk_drained(chunk.rid, chunk.spans), f"testing: {chunk} was not held"
        if handoff.last is not None and not handoff.chunks and not handoff.over:
            self._land(handoff, handoff.last)

    def _land(self, handoff: Handoff, last: ChunkReady) -> None:
        granted = sum(len(span.pages) for span in handoff.reservation.spans)
        assert handoff.pages_come == granted, f"testing: {handoff.pages_come} pages came of {granted} granted (I9)"
        assert last.token is not None, f"testing: {last} has no token"
        self.close(handoff)
        assert self.prefill.scheduler.handoff_drained(handoff.xid), f"testing: {handoff.xid} was not in flight"
        del self.handoffs[handoff.xid]
        delta = self.decode.scheduler.landed(
            handoff.rid, last.token, last.logprobs, self.decode.clock.now(), prefill_engine="prefill-0",
            cached_tokens=last.cached_tokens, ends=last.ends,
        )  # fmt: skip
        assert delta is not None, f"testing: {handoff.rid} is not in transfer"
        self.decode.take(delta)
        self.check()

    def close(self, handoff: Handoff) -> None:
        """Decode closes the grant: from here on what comes is dropped."""
        handoff.over = True

    def abort(self, rid: str) -> None:
        """The client goes away, in whatever state its request is; the prefill engine learns of it later."""
        for handoff in self.handoffs.values():
            if handoff.rid == rid:
                self.close(handoff)
        delta = self.decode.scheduler.abort(rid, "client gone")
        if delta is not None:
            assert delta.finish is FinishReason.ABORT, f"testing: {delta}"
            self.decode.take(delta)
            self.aborted.add(rid)

    def recompute(self, handoff: Handoff) -> None:
        """Decode gives up on the prefill engine; that one learns of it later."""
        if not handoff.over:
            self.close(handoff)
            assert self.decode.scheduler.recompute(handoff.rid, "peer_gone"), f"testing: {handoff.rid} not in transfer"

    def abort_prefill(self, handoff: Handoff) -> None:
        """An operator ends it at the prefill engine; decode recomputes."""
        self.recompute(handoff)
        handoff.aborted = True
        delta = self.prefill.scheduler.abort(handoff.xid, "operator")
        assert delta is None, f"testing: nobody at the prefill engine waits for {delta}"

    def end(self, handoff: Handoff) -> None:
        """The prefill engine learns that the handoff is over."""
        assert handoff.over, f"testing: {handoff.xid} is not closed"
        known = handoff.xid in self.prefill.scheduler
        assert known or not handoff.asked or handoff.aborted, f"testing: prefill has forgotten {handoff}"
        assert self.prefill.scheduler.handoff_ended(handoff.xid) == known, f"testing: {handoff.xid} known: {known}"
        stays = handoff.xid in self.prefill.scheduler and not self.prefill.works_for(handoff.xid)
        assert not stays, f"testing: {handoff.xid} is over, but not forgotten"
        del self.handoffs[handoff.xid]

    def calm(self, turns_max: int = 3000) -> None:
        """Deliver everything that waits, without faults, until the pair is quiet. Raises AssertionError where it is not
        after `turns_max` turns."""
        for _ in range(turns_max):
            if self.quiet:
                return
            for handoff in list(self.handoffs.values()):
                if handoff.over:
                    self.end(handoff)
                elif not handoff.asked:
                    self.ask(handoff)
                elif handoff.chunks:
                    self.deliver(handoff)
            for engine in (self.decode, self.prefill):
                engine.end_copies()
            self.step_decode()
            self.step_prefill()
            self.check()
        decode, prefill = self.decode.scheduler.stats(), self.prefill.scheduler.stats()
        raise AssertionError(f"testing: no end after {turns_max} turns: {decode}, {prefill}, {self.handoffs}")

    def check(self) -> None:
        """Every invariant of both engines."""
        self.decode.scheduler.sanity_check()
        self.prefill.scheduler.sanity_check()

    def check_answers(self) -> None:
        """Every answer is what the oracle says, or the beginning of it where the client went away."""
        for engine, requests in ((self.decode, self.requests), (self.prefill, self.guests)):
            self._check_answers(engine, requests)

    def _check_answers(self, engine: TinyEngine, requests: dict[str, Request]) -> None:
        settings, cache = engine.settings, engine.cache
        pool_tokens = (cache.page_count - 1) * cache.page_size
        for rid, request in requests.items():
            answer = engine.answers[rid]
            stop_ids = {*(() if request.sampling.ignore_eos else settings.eos_ids), *request.sampling.stop_token_ids}
            room = min(settings.context_length, pool_tokens) - len(request.prompt)
            count = min(room, request.sampling.max_new_tokens or room)
            expected = fake_continue(request, count, settings.vocab_size, sorted(stop_ids), engine.runner.windows)
            if rid in self.aborted:
                assert answer.finish is FinishReason.ABORT, f"testing: {rid} was aborted: {answer}"
                assert answer.tokens == expected[: len(answer.tokens)], f"testing: {rid}: {answer.tokens}, {expected}"
                continue
            stopped = expected[-1] in stop_ids
            assert answer.tokens == expected, f"testing: {rid} got {answer.tokens}, expected {expected}"
            assert answer.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH), f"testing: {rid}: {answer}"
            if request.sampling.prompt_logprobs is not None:
                assert answer.prompt_logprobs == fake_prompt_logprobs(request), f"testing: {rid}: {answer}"
            if request.sampling.pooling != "last":
                assert answer.logprobs[0].hidden == fake_pooled(request), f"testing: {rid}: {answer}"
            wanted = len(expected) if request.sampling.logprobs is not None else 0
            assert len(answer.logprobs) == wanted, f"testing: {rid} got {len(answer.logprobs)} log-probabilities"

    def check_drained(self) -> None:
        """Both ledgers are empty but for the tree; a flush makes every page free."""
        for engine in (self.decode, self.prefill):
            engine.end_copies()
            while engine.cache.poll().in_flight:
                engine.end_copies()
            engine.check_drained()
            engine.cache.reset()
            for place, ledger in engine.cache.ledgers.items():
                assert ledger.free_pages == ledger.page_count - 1, f"testing: {place} is not free after the flush"
