"""The engine loop: inbox, handoffs, plan, run, commit, outbox; again. One thread owns everything.

    front letters, peer letters  ->  scheduler  ->  one step  ->  deltas to fronts, chunks to peers

Whatever a letter says is done here, in the loop's own turn, never in a callback. Knows neither how the model computes
(core.py) nor how a handoff is agreed (`pd`, through roles.py).
"""

from __future__ import annotations

import json

from serinus.core.clock import Clock
from serinus.core.errors import CapacityError, FrameError, InvariantError, RequestError, SerinusError
from serinus.core.ids import new_incarnation
from serinus.core.log import get_logger
from serinus.core.request import FinishReason, TokenDelta
from serinus.engine.build import Built
from serinus.engine.inspect import cache_view
from serinus.engine.outbox import Outbox
from serinus.engine.roles import Handoffs
from serinus.wire import Arrived, Gone, ZmqChannel, decode, encode, wait_any
from serinus.wire.convert import delta_to_wire, request_from_wire
from serinus.wire.messages import Abort, EngineCall, EngineReply, Generate, Message, Ready, Shutdown, Tokens

__all__ = ["EngineLoop"]

_IDLE_WAIT_S = 0.2
"""Longest sleep of an idle loop; letters wake it at once, so this only paces timers."""
_log = get_logger("engine")


class EngineLoop:
    """One engine behind its endpoint."""

    def __init__(self, built: Built, *, endpoint: ZmqChannel, handoffs: Handoffs, ready: Ready, clock: Clock) -> None:
        """`endpoint` is bound where fronts connect; `ready` is what they are told."""
        self._core = built.core
        self._built = built
        self._endpoint = endpoint
        self._handoffs = handoffs
        self._ready = ready
        self._clock = clock
        self._incarnation = ready.incarnation or new_incarnation()
        self._outbox = Outbox(stream_interval=built.config.sched.stream_interval)
        self._fronts: set[str] = set()
        self._draining = False
        self._drain_told = False
        self._stopping = False
        self._core.leaving = lambda rid: handoffs.aborted(rid, clock.now())
        self._core.ungranted = handoffs.ungranted

    # ---- life -------------------------------------------------------------------------------------------------

    def request_stop(self, *, drain: bool) -> None:
        """End: after the requests that run (and take no new ones), or now. Safe to call from a signal handler."""
        self._draining = True
        if not drain:
            self._stopping = True

    def run(self) -> None:
        """Turn until told to stop. Raises whatever breaks the engine."""
        while not self._ended():
            self.turn()
        for delta in self._core.scheduler.abort_all("the engine is stopping"):
            self._outbox.put(delta)
        self._handoffs.shut_down(self._clock.now())
        self._send_outbox()

    def _ended(self) -> bool:
        return self._stopping or (self._draining and self._core.scheduler.idle)

    def turn(self) -> None:
        """One round. Waits (at most _IDLE_WAIT_S) only where the last round found nothing to do."""
        self._take_letters()
        if self._draining and not self._drain_told:
            self._drain_told = True
            self._handoffs.drain()
        now = self._clock.now()
        for delta in self._handoffs.turn(now, self._core.turns):
            self._answer(delta)
        outcome = self._core.step()
        if outcome is not None:
            for delta in outcome.deltas:
                self._outbox.put(delta)
            if outcome.chunks:
                self._handoffs.computed(outcome.chunks, self._clock.now())
        self._send_outbox()
        if outcome is None and not self._ended():
            longest_s = self._core.wait_s or _IDLE_WAIT_S
            channels = [self._endpoint, *self._handoffs.channels, *self._core.executor.channels]
            wait_any(channels, self._handoffs.wait_s(longest_s))

    def last_words(self, reason: str) -> None:
        """The engine broke: tell everybody who waits, as far as that still works."""
        for front in list(self._fronts):
            for rid in self._outbox.owned_by(front):
                self._outbox.put(_failed(rid, f"the engine stopped: {reason}", 500))
        self._send_outbox()

    def close(self) -> None:
        """Give the sockets back."""
        self._handoffs.close()
        self._endpoint.close()
        self._core.close()

    # ---- letters ----------------------------------------------------------------------------------------------

    def _take_letters(self) -> None:
        for event in self._endpoint.poll(0.0):
            if isinstance(event, Gone):
                self._front_gone(event.peer)
            else:
                self._take(event)

    def _take(self, event: Arrived) -> None:
        try:
            message = decode(event.parts).message
        except FrameError as error:
            self._built.metrics.add("wire_bad_frames", 1, error.reason)
            _log.warning("engine: dropped a frame of the front: %s", error)
            return
        self._fronts.add(event.peer)
        if isinstance(message, Generate):
            self._generate(event.peer, message)
        elif isinstance(message, Abort):
            self._abort(message)
        elif isinstance(message, EngineCall):
            self._call(event.peer, message)
        elif isinstance(message, Shutdown):
            self.request_stop(drain=message.drain)
        else:
            _log.warning("engine: dropped a %s from the front, expected a request or a call", type(message).__name__)

    def _generate(self, peer: str, message: Generate) -> None:
        if message.rid in self._core.scheduler:
            _log.warning("engine: request %s is here already, dropped the second one", message.rid)
            return
        self._outbox.expect(message.rid, peer)
        if self._draining:
            self._outbox.put(_failed(message.rid, "engine: shutting down, expected no new requests", 503))
            return
        try:
            request = request_from_wire(message, self._clock.now())
            self._handoffs.admit(request)
        except (RequestError, CapacityError) as error:
            self._outbox.put(_failed(message.rid, str(error), error.status))
        except ValueError as error:
            self._outbox.put(_failed(message.rid, f"engine: prompt: {error}, expected token ids", 400))

    def _abort(self, message: Abort) -> None:
        if message.all:
            own = [rid for peer in self._fronts for rid in self._outbox.owned_by(peer)]
            for rid in own + self._handoffs.asked_by_peers():
                self._end(rid, message.reason)
            return
        if message.silent:
            self._outbox.silence(message.rid)
        self._end(message.rid, message.reason, FinishReason.STOP if message.matched_stop else FinishReason.ABORT)

    def _end(self, rid: str, reason: str, finish: FinishReason = FinishReason.ABORT) -> None:
        self._handoffs.aborted(rid, self._clock.now())
        delta = self._core.scheduler.abort(rid, reason, finish)
        if delta is not None:
            self._answer(delta)

    def _front_gone(self, peer: str) -> None:
        for rid in self._outbox.owned_by(peer):
            self._outbox.silence(rid)
            self._end(rid, "the front is gone")
        self._fronts.discard(peer)

    def _answer(self, delta: TokenDelta) -> None:
        """A delta that no step brought."""
        self._core.watch.answered(delta)
        self._outbox.put(delta)

    # ---- calls ------------------------------------------------------------------------------------------------

    def _call(self, peer: str, message: EngineCall) -> None:
        if message.what == "ready":
            self._send(peer, self._ready)
            return
        ok, body = True, b""
        if message.what == "metrics":
            self._core.watch.refresh(self._core.scheduler, self._built.cache, self._core.turns)
            self._handoffs.refresh(self._built.metrics)
            self._core.guard.refresh(self._built.metrics)
            body = self._built.metrics.render()
        elif message.what in ("info", "load"):
            body = json.dumps(self._info()).encode()
        elif message.what == "flush_cache":
            ok, body = self._flush()
        elif message.what == "canary":
            body = json.dumps(self._core.guard.view()).encode()
        elif message.what == "cache":
            body = json.dumps(self._cache_view(message.limit)).encode()
        else:
            expected = "metrics, info, load, cache, canary or flush_cache"
            ok, body = False, f"engine: call {message.what!r}, expected {expected}".encode()
        self._send(peer, EngineReply(call=message.call, ok=ok, body=body))

    def _flush(self) -> tuple[bool, bytes]:
        try:
            self._built.cache.reset()
        except InvariantError:
            raise
        except SerinusError as error:
            return False, str(error).encode()
        return True, b"cache flushed"

    def _cache_view(self, limit: int) -> dict[str, object]:
        config = self._built.config
        storage = None if self._built.tiers is None else self._built.tiers.storage
        shelf = None if storage is None else storage.shelf
        return cache_view(self._built.cache, limit, engine=config.engine_name, role=config.role, shelf=shelf)

    def _info(self) -> dict[str, object]:
        stats = self._core.scheduler.stats()
        return {
            "num_running_reqs": stats.num_running_reqs,
            "num_queue_reqs": stats.num_queue_reqs,
            "num_decode_prealloc_queue_reqs": stats.num_decode_prealloc_queue_reqs,
            "num_decode_transfer_queue_reqs": stats.num_decode_transfer_queue_reqs,
            "num_prefill_inflight_queue_reqs": stats.num_prefill_inflight_queue_reqs,
            "token_usage": stats.token_usage,
            "free_tokens": stats.free_tokens,
            "evictable_tokens": stats.evictable_tokens,
            "turns": self._core.turns,
            "peers": self._handoffs.peers(),
            "ranks": [] if self._built.followers is None else self._built.followers.facts(),
        }

    # ---- out --------------------------------------------------------------------------------------------------

    def _send_outbox(self) -> None:
        for peer, tokens in self._outbox.take():
            try:
                parts = encode(tokens, self._incarnation)
            except FrameError:
                self._send_apart(peer, tokens)
            else:
                self._endpoint.send(peer, parts)

    def _send_apart(self, peer: str, tokens: Tokens) -> None:
        """Deltas that are too long for one frame together; one that is too long alone ends its request as an error."""
        failed: set[str] = set()
        for out in tokens.out:
            if out.rid in failed:
                continue
            try:
                parts = encode(Tokens(out=(out,)), self._incarnation)
            except FrameError as error:
                reason = f"engine: the answer does not fit a message ({error}), expected fewer log-probabilities"
                _log.warning("engine: request %s fails: %s", out.rid, reason)
                failed.add(out.rid)
                self._outbox.forget(out.rid)
                self._end(out.rid, reason, FinishReason.ERROR)
                self._send(peer, Tokens(out=(delta_to_wire(_failed(out.rid, reason, 400)),)))
            else:
                self._endpoint.send(peer, parts)

    def _send(self, peer: str, message: Message) -> None:
        self._endpoint.send(peer, encode(message, self._incarnation))


def _failed(rid: str, reason: str, status: int) -> TokenDelta:
    return TokenDelta(rid=rid, finish=FinishReason.ERROR, error=reason, error_status=status)
