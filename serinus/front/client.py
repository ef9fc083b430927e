"""The front's end of the wire to its engine: requests go out, tokens come back to the queue of their call.

One zmq DEALER on the engine's ipc endpoint, driven by the event loop through its file descriptor: a step's tokens for
all requests arrive as one message and cost one wake-up. Knows nothing of HTTP, text or sampling.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from serinus.core.errors import CapacityError, FrameError, PeerGone, SerinusError
from serinus.core.ids import new_incarnation
from serinus.core.log import get_logger
from serinus.core.request import Request, TokenDelta
from serinus.core.trace import SpanRecord
from serinus.wire import codec
from serinus.wire.messages import Abort, EngineCall, EngineReply, Generate, Message, Ready, Spans, Tokens

_log = get_logger("front")

BROKE_HEADER = "x-serinus-broke"
"""In a 503: the engine had the request and broke; the router sends it to one other engine, and to no third."""
_HANG_SHARE = 5
"""An engine is said to stand still after this part of the time after which it is given up."""
_WATCH_S = 1.0
"""Seconds between two questions to the engine, whether it goes on."""
_FOREVER_S = 1e9
_READABLE = int(zmq.POLLIN)
_SEND_QUEUE_MAX = 100_000
"""Frames zmq keeps for an engine that does not read."""


class EngineDown(PeerGone):
    """The engine behind this front ended, or is not ready yet."""


class EngineBroke(EngineDown):
    """The engine ended while it had this request, which may be why it did."""

    headers = ((BROKE_HEADER.encode(), b"1"),)


class AnswerLost(SerinusError):
    """A frame of the engine could not be read: answers that were open then may lack tokens (500)."""


class DeltaQueue:
    """Where the tokens of one call (one HTTP request: one or more sequences) arrive.

    A consumer that falls behind finds several deltas at once: nothing is dropped, and nothing grows beyond what its
    sequences may generate.
    """

    __slots__ = ("_at_once", "_client", "_failure", "_items", "_waiter", "gone", "rids")

    def __init__(self, client: EngineClient, rids: tuple[str, ...]) -> None:
        self._client = client
        self._items: list[TokenDelta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._at_once: Callable[[list[TokenDelta]], bool] | None = None
        self._failure: SerinusError | None = None
        self.gone = False
        """Whether `leave` was called."""
        self.rids = rids
        """Engine-side ids of the sequences of this call."""

    def put(self, out: TokenDelta) -> bool:
        """Add a delta; dropped where the call has failed. Returns whether `deliver` must be called: once for all deltas
        that came together."""
        if self._failure is not None:  # what comes after a gap is no continuation of what came before it
            return False
        self._items.append(out)
        return len(self._items) == 1

    def deliver(self) -> None:
        """Give what has come to the consumer that waits for it."""
        at_once = self._at_once
        if at_once is None or self.gone or not self._items:
            self._wake()
            return
        items, self._items = self._items, []
        try:
            if not at_once(items):
                self._wake()
        except SerinusError as error:
            self.fail(error)
        except BaseException:
            self.fail(AnswerLost("front: an answer could not be rendered"))
            raise

    def fail(self, error: SerinusError) -> None:
        """Nothing more will come: a consumer gets this error, after what came before it."""
        self._failure = self._failure or error
        self._wake()

    def leave(self) -> None:
        """The client of this call is gone: from now on a consumer gets an empty list."""
        self.gone = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self, at_once: Callable[[list[TokenDelta]], bool] | None = None) -> list[TokenDelta]:
        """All deltas since the last call, at least one; an empty list once `leave` was called.

        `at_once`: is given deltas that come while this waits, out of the loop's own step, which saves the way through
        the tasks that wait; while it returns True this goes on waiting, else the list is empty. What it raises is
        raised here.
        Raises EngineDown, AnswerLost.
        """
        if not self._items and not self.gone:
            if self._failure is not None:
                raise self._failure
            self._waiter, self._at_once = asyncio.get_running_loop().create_future(), at_once
            try:
                await self._waiter
            finally:
                self._waiter = self._at_once = None
            if not self._items and not self.gone and self._failure is not None:
                raise self._failure
        if self.gone:
            return []
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """Forget this call; sequences that have not ended are aborted silently."""
        self._client.close(self)


class EngineClient:
    """Talks to one engine. All methods but `engine_gone` belong to the loop that called `start`."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: where the engine's ROUTER listens, e.g. ipc:///run/serinus/decode-0."""
        self.endpoint = endpoint
        self.ready: Ready | None = None
        """What the engine said when it was loaded; None before."""
        self.down = ""
        """Why the engine is gone; empty while it is not."""
        self.hung = ""
        """Why it seems to stand still; empty while it does not."""
        self.degraded = ""
        """Why it should get no new requests, though it answers them; empty while there is no reason."""
        self._socket: zmq.Socket[bytes] | None = None
        self._fd = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._incarnation = new_incarnation()
        self._seq = 0
        self._queues: dict[str, DeltaQueue] = {}
        self._fresh: deque[DeltaQueue] = deque()
        """Queues with deltas that were not delivered yet."""
        self._calls: dict[int, asyncio.Future[EngineReply]] = {}
        self._call_count = 0
        self._ready_waiter: asyncio.Future[Ready] | None = None
        self._draining = False
        self.on_bad_frame: Callable[[str], None] | None = None
        """Told why a frame from the engine could not be read."""
        self.on_spans: Callable[[Sequence[SpanRecord]], None] | None = None
        """Takes the spans that the engine recorded."""

    # ---- life -------------------------------------------------------------------------------------------------

    async def start(self) -> Ready:
        """Connect, ask, and wait until the engine is loaded. Raises EngineDown where `engine_gone` comes first."""
        assert self._socket is None, "front: the engine client was started twice"
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._ready_waiter = self._loop.create_future()
        if self.down:
            raise EngineDown(self.down)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = _SEND_QUEUE_MAX
        socket.rcvhwm = 0
        socket.connect(self.endpoint)
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._send(EngineCall(call=0, what="ready"))
        self.ready = await self._ready_waiter
        return self.ready

    def stop(self) -> None:
        """Close the socket. Calls that wait get EngineDown."""
        self.engine_gone("the front is stopping")
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._socket.close()
            self._socket = None

    def engine_gone(self, reason: str) -> None:
        """The engine ended: all calls that wait get EngineDown, new requests too. May be called from any thread."""
        if self.down:
            return
        if self._loop is not None and self._thread_id != threading.get_ident():
            self._loop.call_soon_threadsafe(self.engine_gone, reason)
            return
        self.down = reason or "the engine is gone"
        for queue in set(self._queues.values()):
            queue.fail(EngineBroke(self.down))
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDown(self.down))
        if self._ready_waiter is not None and not self._ready_waiter.done():
            self._ready_waiter.set_exception(EngineDown(self.down))

    def drain(self) -> None:
        """From now on new requests are refused; those that run go on."""
        self._draining = True

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def open_count(self) -> int:
        """Sequences that have not ended."""
        return len(self._queues)

    async def watch(self, s_max: float, on_stuck: Callable[[str], None] | None = None) -> None:
        """Ask the engine now and then, for ever; while an answer is a fifth of `s_max` seconds late (0 = never), `hung`
        says so; `on_stuck` is told when it is `s_max` late. The engine answers between its steps, so one that stands in
        a step is seen, and one whose process is stopped. `degraded` is what it says of itself."""
        loop = asyncio.get_running_loop()
        hang_s = s_max / _HANG_SHARE
        while not self.down:
            late = [loop.call_later(hang_s or _FOREVER_S, self._hang, hang_s)]
            if on_stuck is not None:
                reason = f"stood in one step for {s_max:g} s (--watchdog-timeout)"
                late.append(loop.call_later(s_max or _FOREVER_S, on_stuck, reason))
            try:
                reply = await self.call("load", s_max=_FOREVER_S)
            except EngineDown:
                return
            finally:
                for each in late:
                    each.cancel()
            self.degraded = _degraded_of(reply)
            if self.hung:
                _log.warning("front: the engine answers again")
                self.hung = ""
            await asyncio.sleep(min(_WATCH_S, hang_s or _WATCH_S))

    def _hang(self, s_max: float) -> None:
        self.hung = f"the engine has not ended its step, or not answered between two, for {s_max:g} s"
        _log.error("front: %s", self.hung)

    # ---- requests ---------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> DeltaQueue:
        """Ask for these sequences; their deltas arrive in one queue. Raises EngineDown, CapacityError (draining)."""
        self._check_up()
        if self._draining:
            raise CapacityError("front: the server is draining, expected requests before it was told to stop")
        queue = DeltaQueue(self, tuple(request.rid for request in requests))
        for request in requests:
            assert request.rid not in self._queues, f"front: request id {request.rid!r} is in use"
            self._queues[request.rid] = queue
        try:
            for request in requests:
                self._send(Generate(request=request))
        except CapacityError:
            for rid in queue.rids:  # the engine does not read: it would not read an abort either
                del self._queues[rid]
            raise
        return queue

    def has(self, rid: str) -> bool:
        """Whether a sequence of this id runs."""
        return rid in self._queues

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """End a sequence (or all): its queue gets a last delta with finish `abort` from the engine."""
        self._check_up()
        self._send(Abort(rid=rid, all=everything, reason="aborted by /abort_request"))

    def close(self, queue: DeltaQueue) -> None:
        """Forget a call; sequences of it that have not ended are aborted silently."""
        for rid in queue.rids:
            if self._queues.get(rid) is queue:
                self.end(rid)

    def rids_of(self, request_id: str) -> list[str]:
        """Engine-side ids of the open sequences of a request: its own, or `<request_id>-0`, `-1`..."""
        if request_id in self._queues:
            return [request_id]
        head = f"{request_id}-"
        return [rid for rid in self._queues if rid.startswith(head) and rid[len(head) :].isdigit()]

    def fail_later(self, queue: DeltaQueue, seconds: float, reason: str) -> asyncio.TimerHandle:
        """Fail a queue unless the returned handle is cancelled within `seconds`."""
        return asyncio.get_running_loop().call_later(seconds, queue.fail, EngineDown(f"front: {reason} ({seconds} s)"))

    @property
    def gives_receipts(self) -> bool:
        """Whether the last delta of an answer says what a canary verified."""
        return self.ready is not None and self.ready.info.get("kv_canary", "none") != "none"

    def end(self, rid: str, reason: str = "", *, matched_stop: bool = False) -> None:
        """This front is done with a sequence: abort it silently, where it still runs.

        `matched_stop`: its answer is complete, as a stop text was found in it.
        """
        if self._queues.pop(rid, None) is not None and not self.down and self._socket is not None:
            self._send(Abort(rid=rid, reason=reason or "finished by the front", silent=True, matched_stop=matched_stop))

    def complete(self, rid: str, kept: int) -> None:
        """A stop text was found in a sequence that the engine still runs: end it behind `kept` tokens of its answer.
        Its last delta comes."""
        if rid in self._queues and not self.down and self._socket is not None:
            self._send(Abort(rid=rid, reason="a stop text was found", matched_stop=True, kept=kept))

    async def call(self, what: str, *, s_max: float = 60.0, limit: int = 0, body: bytes = b"") -> EngineReply:
        """Call the engine (see EngineCall). Raises EngineDown, also where it does not answer in `s_max`."""
        self._check_up()
        self._call_count += 1
        number = self._call_count
        reply: asyncio.Future[EngineReply] = asyncio.get_running_loop().create_future()
        self._calls[number] = reply
        try:
            self._send(EngineCall(call=number, what=what, limit=limit, body=body))
            return await asyncio.wait_for(reply, s_max)
        except TimeoutError as err:
            raise EngineDown(f"front: the engine did not answer {what!r} within {s_max} s") from err
        finally:
            del self._calls[number]

    # ---- frames -----------------------------------------------------------------------------------------------

    def _check_up(self) -> None:
        if self.down:
            raise EngineDown(self.down)
        if self.ready is None:
            raise EngineDown("front: the engine is still loading")

    def _send(self, message: Message) -> None:
        assert self._socket is not None, f"front: {type(message).__name__} before the engine client was started"
        self._seq += 1
        parts = codec.encode(message, self._incarnation, self._seq)
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again as err:
            raise CapacityError("front: the engine does not read its requests, expected it to keep up") from err
        if self._loop is not None:
            # The descriptor is edge-triggered and a send may swallow the edge: look again soon.
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Take every frame that has arrived, then deliver what they brought."""
        socket = self._socket
        while socket is not None and not socket.closed and int(socket.getsockopt(zmq.EVENTS)) & _READABLE:
            try:
                frame = codec.decode(socket.recv_multipart(zmq.NOBLOCK))
            except FrameError as error:
                self._bad_frame(error)
                continue
            self._receive(frame.message)
        while self._fresh:
            self._fresh.popleft().deliver()

    def _bad_frame(self, error: FrameError) -> None:
        """It may have held tokens of any open answer: all of them fail."""
        if self.on_bad_frame is not None:
            self.on_bad_frame(error.reason)
        lost = set(self._queues.values())
        _log.warning("front: dropped a frame of the engine (%s), which fails %d open requests", error, len(lost))
        for queue in lost:
            queue.fail(AnswerLost(f"front: a frame of the engine could not be read ({error}), the answer has a gap"))

    def _receive(self, message: Message) -> None:
        if isinstance(message, Tokens):
            queues = self._queues
            for out in message.deltas:
                queue = queues.pop(out.rid, None) if out.finish else queues.get(out.rid)
                if queue is not None and queue.put(out):
                    self._fresh.append(queue)
        elif isinstance(message, EngineReply) and not message.call:
            self.engine_gone(message.body.decode(errors="replace"))
        elif isinstance(message, EngineReply):
            call = self._calls.get(message.call)
            if call is not None and not call.done():
                call.set_result(message)
        elif isinstance(message, Spans) and self.on_spans is not None:
            self.on_spans(message.spans)
        elif isinstance(message, Ready) and self._ready_waiter is not None and not self._ready_waiter.done():
            self._ready_waiter.set_result(message)


def _degraded_of(reply: EngineReply) -> str:
    """What the answer to a `load` call says of the engine's health."""
    try:
        load = msgspec.json.decode(reply.body) if reply.ok else {}
    except msgspec.DecodeError:
        return ""
    return str(load.get("degraded", "")) if isinstance(load, dict) else ""
