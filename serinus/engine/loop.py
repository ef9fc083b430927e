"""The loop of an engine process: sockets and time around an Engine. Poll, turn, send, let the ranks work; again.

One thread owns everything. What a message says is done in the engine's own turn, never in a callback.
"""

from __future__ import annotations

from collections.abc import Sequence

from serinus.core.clock import Clock
from serinus.core.errors import FrameError
from serinus.core.log import get_logger
from serinus.core.request import TokenDelta
from serinus.engine.built import Built
from serinus.engine.messages import FailRequest, FrontEvent, FrontGone, FrontMessage, TurnOutput, failed_delta
from serinus.wire import Arrived, ZmqChannel, decode, encode
from serinus.wire.messages import Abort, EngineCall, Generate, Message, Ready, Spans, StopEngine, Tokens

_log = get_logger("engine")


class EngineLoop:
    """One engine behind its endpoint."""

    def __init__(self, built: Built, *, endpoint: ZmqChannel, ready: Ready, clock: Clock) -> None:
        """`endpoint` is bound where fronts connect; `ready` is the answer to their first question."""
        self._built = built
        self._engine = built.engine
        self._endpoint = endpoint
        self._clock = clock
        self._ready = ready
        self._waiting: list[FrontEvent] = []
        """Events of this process for the next turn."""

    def request_stop(self, *, drain: bool) -> None:
        """End: after the requests that run (and take no new ones), or now. Safe to call from a signal handler."""
        self._waiting.append(FrontMessage(front="", message=StopEngine(drain=drain)))

    def run(self) -> None:
        """Turn until told to stop. Raises whatever breaks the engine."""
        while not self._engine.ended:
            self.turn()
        self._finish(self._engine.stop(self._clock.now()))

    def turn(self) -> None:
        """One round. Waits only where the engine has nothing to do."""
        engine, peers = self._engine, self._built.peers
        output = self._built.turn(self._events())
        engine.line.flush(lambda: self._send(output))
        if not self._waiting and (wait_s := engine.wait_s) > 0:
            engine.line.wait_any([self._endpoint, *(peers.channels if peers is not None else ())], wait_s)

    def tell_failure(self, reason: str) -> None:
        """The engine broke: tell every front that waits, as far as that still works."""
        self._finish(self._engine.fail(reason))

    def close(self) -> None:
        """Give the sockets back, and end the ranks."""
        self._endpoint.close()
        self._built.close()

    # ---- in -------------------------------------------------------------------------------------------------------

    def _events(self) -> list[FrontEvent]:
        events, self._waiting = self._waiting, []
        for event in self._endpoint.poll(0.0):
            if isinstance(event, Arrived):
                message = self._read(event)
                if message is not None:
                    events.append(message)
            else:
                events.append(FrontGone(front=event.peer))
        return events

    def _read(self, event: Arrived) -> FrontMessage | None:
        try:
            message = decode(event.parts).message
        except FrameError as error:
            self._built.metrics.add("wire_bad_frames", 1, error.reason)
            _log.warning("engine: dropped a frame of the front: %s", error)
            return None
        if not isinstance(message, (Generate, Abort, EngineCall, StopEngine)):
            _log.warning("engine: dropped a %s from the front, expected a request or a call", type(message).__name__)
            return None
        if isinstance(message, EngineCall) and message.what == "ready":
            self._send_one(event.peer, self._ready)
            return None
        if isinstance(message, EngineCall) and message.what == "metrics" and self._built.peers is not None:
            self._built.peers.refresh(self._built.metrics)
        return FrontMessage(front=event.peer, message=message)

    # ---- out ------------------------------------------------------------------------------------------------------

    def _finish(self, output: TurnOutput) -> None:
        self._built.deliver(output)
        self._send(output)

    def _send(self, output: TurnOutput) -> None:
        for front, deltas in output.deltas:
            try:
                self._send_one(front, Tokens(deltas=deltas))
            except FrameError:
                self._send_apart(front, deltas)
        for front, reply in output.replies:
            self._send_one(front, reply)
        if output.spans:
            self._send_one(output.spans_to, Spans(spans=output.spans))

    def _send_apart(self, front: str, deltas: Sequence[TokenDelta]) -> None:
        """Deltas that are too long for one frame together; one that is too long alone ends its request as an error."""
        failed: set[str] = set()
        for delta in deltas:
            if delta.rid in failed:
                continue
            try:
                self._send_one(front, Tokens(deltas=(delta,)))
            except FrameError as error:
                reason = f"engine: the answer does not fit a message ({error}), expected fewer log-probabilities"
                _log.warning("engine: request %s fails: %s", delta.rid, reason, extra={"rid": delta.rid})
                failed.add(delta.rid)
                self._waiting.append(FrontMessage(front=front, message=FailRequest(rid=delta.rid, reason=reason)))
                self._send_one(front, Tokens(deltas=(failed_delta(delta.rid, reason, 400),)))

    def _send_one(self, front: str, message: Message) -> None:
        self._endpoint.send(front, encode(message, self._ready.incarnation))
