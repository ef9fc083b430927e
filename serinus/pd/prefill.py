"""Every handoff of one prefill engine: takes orders, sends pages as they are computed, ends each exactly once. Pure.

Pages of a chunk are read only between its ChunkComputed and its ReleaseChunk (or the end of the handoff); staged bytes
stay until the peer says it took or dropped them, or is gone: a failed handoff never makes a peer read something else.
A peer that takes nothing holds up its own parts only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from serinus.core.errors import BadSampling, InvariantError
from serinus.core.request import Request
from serinus.pd.clients import Client, Clients, Part
from serinus.pd.events import (
    AbortPrefill,
    AddPrefill,
    ChunkComputed,
    ClosePeer,
    Drain,
    EndPrefill,
    PartStaged,
    PeerLost,
    PrefillAction,
    PrefillDrained,
    PrefillEvent,
    Received,
    ReleaseChunk,
    Send,
    Shutdown,
    StageFull,
    StagePart,
    Tick,
    Unstage,
)
from serinus.pd.settings import PdSettings
from serinus.wire.convert import logprobs_to_wire, sampling_from_wire
from serinus.wire.messages import (
    Data,
    DataOk,
    Done,
    DoneOk,
    Fail,
    Grant,
    Hello,
    HelloNo,
    Keepalive,
    Prepare,
    bytes_to_ids,
)

__all__ = ["PrefillSide"]


@dataclass(slots=True, kw_only=True)
class _Handoff:
    xid: str
    rid: str
    peer: str
    page_count: int
    """Pages that decode lacks."""
    deadline: float
    grant: int = 0
    """0 = not yet granted."""
    seed: int = 0
    early: list[ChunkComputed] = field(default_factory=list)
    """Computed before the grant."""
    announced: int = 0
    """Pages computed so far."""
    part_count: int = 0
    """Parts cut so far."""
    sent_parts: int = 0
    sent_pages: int = 0
    sent_bytes: int = 0
    last: ChunkComputed | None = None
    done_sent: bool = False
    first_sent_at: float = 0.0


class PrefillSide:
    """The prefill engine's half of the protocol. One event at a time; actions in the order they must be performed."""

    def __init__(self, settings: PdSettings) -> None:
        self._settings = settings
        self._clients = Clients(settings)
        self._handoffs: dict[str, _Handoff] = {}
        self._closed = ""
        """Why nothing new is taken any more; empty = it is."""
        self._pages_per_part = min(max(1, settings.part_bytes_max // settings.page_bytes), 1 << 16)
        self.rejects: Counter[str] = Counter()
        """What was refused or dropped without effect, by reason."""

    # ---- questions ----------------------------------------------------------------------------------------------

    @property
    def clients(self) -> tuple[Client, ...]:
        """The greeted decode engines; read only."""
        return tuple(self._clients)

    @property
    def handoff_count(self) -> int:
        """Handoffs under way."""
        return len(self._handoffs)

    @property
    def ungranted_count(self) -> int:
        """Of these, prepared but not granted (the bootstrap queue)."""
        return sum(not handoff.grant for handoff in self._handoffs.values())

    # ---- the one way in -----------------------------------------------------------------------------------------

    def handle(self, event: PrefillEvent, now: float) -> list[PrefillAction]:
        """Take one event; returns what must be done, in order.

        Raises InvariantError where the engine announces pages that do not follow on each other; never for what a peer
        does.
        """
        out: list[PrefillAction] = []
        match event:
            case Received():
                self._received(event, now, out)
            case PartStaged():
                self._staged(event, now, out)
            case StageFull():
                self._stage_full(event, out)
            case ChunkComputed():
                self._computed(event, out)
            case EndPrefill():
                self._end_by_engine(event, out)
            case PeerLost():
                self._lose(event.peer, event.reason, out)
            case Tick():
                self._tick(event, now, out)
            case Drain():
                self._closed = self._closed or event.reason
            case Shutdown():
                self._stop(event, out)
        return out

    # ---- what the engine says -----------------------------------------------------------------------------------

    def _computed(self, event: ChunkComputed, out: list[PrefillAction]) -> None:
        handoff = self._handoffs.get(event.xid)
        if handoff is None:
            out.append(ReleaseChunk(xid=event.xid, pages=event.pages))
            return
        if event.first != handoff.announced or handoff.last is not None or not len(event.pages):
            raise InvariantError(
                f"pd: {event.xid} announced {len(event.pages)} pages from {event.first} on,"
                f" expected the next from {handoff.announced} on"
            )
        handoff.announced += len(event.pages)
        if handoff.announced > handoff.page_count or event.last != (handoff.announced == handoff.page_count):
            raise InvariantError(
                f"pd: {event.xid} announced {handoff.announced} pages (last: {event.last}),"
                f" expected {handoff.page_count}"
            )
        if event.last:
            handoff.last = event
        if handoff.grant:
            self._cut(handoff, event)
            self._pump(self._clients.get(handoff.peer), out)
        else:
            handoff.early.append(event)

    def _cut(self, handoff: _Handoff, chunk: ChunkComputed) -> None:
        """Cut a chunk into parts and queue them for its peer."""
        client = self._clients.get(handoff.peer)
        assert client is not None, f"pd: handoff {handoff.xid} outlived its peer {handoff.peer}"
        size = self._pages_per_part
        for start in range(0, len(chunk.pages), size):
            pages = chunk.pages[start : start + size]
            ends_chunk = start + size >= len(chunk.pages)
            client.outbox.append(
                Part(
                    xid=handoff.xid,
                    number=handoff.part_count,
                    first=chunk.first + start,
                    pages=pages,
                    ends=chunk.pages if ends_chunk else None,
                )
            )
            handoff.part_count += 1

    def _end_by_engine(self, event: EndPrefill, out: list[PrefillAction]) -> None:
        handoff = self._handoffs.get(event.xid)
        if handoff is not None:
            self._fail(handoff, event.code, event.reason, out)

    def _stop(self, event: Shutdown, out: list[PrefillAction]) -> None:
        self._closed = event.reason
        for handoff in list(self._handoffs.values()):
            self._fail(handoff, "shutdown", event.reason, out)
        for client in self._clients:
            self._hang_up(client, event.reason, out)

    # ---- staging: one part at a time and peer ---------------------------------------------------------------------

    def _pump(self, client: Client | None, out: list[PrefillAction]) -> None:
        """Ask for the next part of a peer to be staged, if it waits for nothing else."""
        if client is None or client.staging is not None or client.is_full:
            return
        while client.outbox:
            part = client.outbox.popleft()
            handoff = self._handoffs.get(part.xid)
            if handoff is None:
                continue  # ended meanwhile
            client.staging = part
            out.append(
                StagePart(
                    peer=client.peer,
                    xid=part.xid,
                    part=part.number,
                    pages=part.pages,
                    digest_seed=handoff.seed,
                    backend=client.backend,
                )
            )
            return

    def _staged(self, event: PartStaged, now: float, out: list[PrefillAction]) -> None:
        client = self._clients.get(event.peer)
        part = client.staging if client is not None else None
        if client is None or part is None or (part.xid, part.number) != (event.xid, event.part):
            self.rejects["unknown_part"] += 1
            return
        client.staging = None
        handoff = self._handoffs.get(part.xid)
        if handoff is None:  # ended while it was being staged; the peer never hears of it
            out.append(Unstage(peer=event.peer, xid=event.xid, part=event.part))
            self._pump(client, out)
            return
        client.staged.add((event.xid, event.part))
        if not handoff.sent_parts:
            handoff.first_sent_at = now
        handoff.sent_parts += 1
        handoff.sent_pages += len(part.pages)
        handoff.sent_bytes += event.byte_count
        data = Data(
            xid=event.xid, grant=handoff.grant, chunk=event.part, first=part.first, digests=event.digests,
            byte_count=event.byte_count, shm_name=event.shm_name, shm_offset=event.shm_offset,
        )  # fmt: skip
        out.append(Send(peer=event.peer, message=data, payload=event.payload))
        if part.ends is not None:
            out.append(ReleaseChunk(xid=event.xid, pages=part.ends))
        self._send_done(handoff, out)
        self._pump(client, out)

    def _stage_full(self, event: StageFull, out: list[PrefillAction]) -> None:
        client = self._clients.get(event.peer)
        part = client.staging if client is not None else None
        if client is None or part is None:
            self.rejects["unknown_part"] += 1
            return
        client.staging = None
        handoff = self._handoffs.get(part.xid)
        if handoff is not None and client.staged:
            client.outbox.appendleft(part)
            client.is_full = True
            return
        if handoff is not None:
            reason = f"pd: {len(part.pages)} pages do not fit into the empty staging area"
            self._fail(handoff, "error", reason, out)
        self._pump(client, out)

    def _send_done(self, handoff: _Handoff, out: list[PrefillAction]) -> None:
        last = handoff.last
        if last is None or handoff.sent_pages != handoff.page_count:
            return
        if last.token is None:
            raise InvariantError(f"pd: the last chunk of {handoff.xid} has no token")
        handoff.done_sent = True
        done = Done(
            xid=handoff.xid,
            grant=handoff.grant,
            token=last.token,
            logprobs=logprobs_to_wire(last.logprobs) if last.logprobs is not None else None,
            chunk_count=handoff.sent_parts,
            page_count=handoff.sent_pages,
            byte_count=handoff.sent_bytes,
            cached_tokens=dict(last.cached_tokens),
            queue_seconds=last.queue_seconds,
            compute_seconds=last.compute_seconds,
        )
        out.append(Send(peer=handoff.peer, message=done))

    # ---- ends: each handoff passes through exactly one of these ---------------------------------------------------

    def _fail(self, handoff: _Handoff, code: str, reason: str, out: list[PrefillAction]) -> None:
        """End it, and say so to the peer."""
        out.append(Send(peer=handoff.peer, message=Fail(xid=handoff.xid, code=code, reason=reason[:2000])))
        self._end(handoff, code, reason, out)

    def _end(self, handoff: _Handoff, code: str, reason: str, out: list[PrefillAction]) -> None:
        del self._handoffs[handoff.xid]
        out.append(AbortPrefill(xid=handoff.xid, code=code, reason=reason))
        client = self._clients.get(handoff.peer)
        if client is not None:
            client.outbox = type(client.outbox)(part for part in client.outbox if part.xid != handoff.xid)

    def _drained(self, handoff: _Handoff, now: float, out: list[PrefillAction]) -> None:
        del self._handoffs[handoff.xid]
        out.append(
            PrefillDrained(
                xid=handoff.xid,
                page_count=handoff.sent_pages,
                byte_count=handoff.sent_bytes,
                seconds=now - handoff.first_sent_at,
            )
        )

    # ---- what the world does --------------------------------------------------------------------------------------

    def _lose(self, peer: str, reason: str, out: list[PrefillAction]) -> None:
        if self._clients.get(peer) is None:
            return
        for handoff in [h for h in self._handoffs.values() if h.peer == peer]:
            self._end(handoff, "peer_gone", reason, out)
        self._clients.remove(peer, reason, out)

    def _hang_up(self, client: Client, reason: str, out: list[PrefillAction]) -> None:
        out.append(Send(peer=client.peer, message=HelloNo(reason=reason)))
        self._lose(client.peer, reason, out)
        out.append(ClosePeer(peer=client.peer))

    def _tick(self, event: Tick, now: float, out: list[PrefillAction]) -> None:
        for handoff in list(self._handoffs.values()):
            if now > handoff.deadline:
                self._fail(handoff, "deadline", "pd: prefill did not finish within the deadline of decode", out)
        for client in self._clients.tick(event, now, out):
            self._hang_up(client, f"pd: you were silent for {client.pulse.silent_s:.0f} s", out)

    def _received(self, event: Received, now: float, out: list[PrefillAction]) -> None:
        message = event.message
        if isinstance(message, Hello):
            self._hello(event, message, now, out)
            return
        client = self._clients.get(event.peer)
        if client is None:
            self.rejects["no_hello"] += 1
            out.append(Send(peer=event.peer, message=HelloNo(reason="pd: not greeted, expected HELLO first")))
            out.append(ClosePeer(peer=event.peer))
            return
        client.pulse.heard()
        match message:
            case Prepare():
                self._prepare(client, message, now, out)
            case Grant():
                self._granted(client, message, out)
            case DataOk():
                self._data_ok(client, message, out)
            case DoneOk():
                handoff = self._of(client, message.xid)
                if handoff is not None and handoff.done_sent and handoff.grant == message.grant:
                    self._drained(handoff, now, out)
            case Fail():
                handoff = self._of(client, message.xid)
                if handoff is not None:
                    self._end(handoff, message.code, message.reason, out)
            case Keepalive():
                client.pulse.step_s = message.step_s_max
                self._below_floor(client, message.grant_floor, out)
            case _:
                self.rejects["unexpected"] += 1

    def _of(self, client: Client, xid: str) -> _Handoff | None:
        handoff = self._handoffs.get(xid)
        if handoff is None or handoff.peer != client.peer:
            self.rejects["unknown_xid"] += 1
            return None
        return handoff

    def _hello(self, event: Received, message: Hello, now: float, out: list[PrefillAction]) -> None:
        if self._clients.get(event.peer) is not None:
            self.rejects["second_hello"] += 1
            return
        if self._closed:
            out.append(Send(peer=event.peer, message=HelloNo(reason=self._closed)))
            return
        for old in [c for c in self._clients if c.engine == message.engine and c.incarnation == event.incarnation]:
            # Whichever connection is the older one: the other side hears that it ended, and greets again if it cares.
            self._hang_up(old, "pd: you connected anew", out)
        self._clients.greet(event.peer, event.incarnation, message, now, out)

    def _prepare(self, client: Client, message: Prepare, now: float, out: list[PrefillAction]) -> None:
        if message.xid in self._handoffs:
            self.rejects["repeated_xid"] += 1
            return
        if self._closed:
            out.append(Send(peer=client.peer, message=Fail(xid=message.xid, code="shutdown", reason=self._closed)))
            return
        size = self._settings.layout.page_size
        wrong = ""
        length, odd = divmod(len(message.prompt), 4)
        if odd or not length:
            wrong = f"a prompt of {len(message.prompt)} bytes, expected a positive multiple of 4"
        elif message.held % size or message.held >= length:
            wrong = f"held is {message.held}, expected a multiple of {size} below {length}"
        elif not message.deadline_s > 0:
            wrong = f"deadline_s is {message.deadline_s}, expected more than 0"
        try:
            sampling = sampling_from_wire(message.sampling)
        except BadSampling as error:
            wrong = str(error)
        if wrong:
            self.rejects["bad_prepare"] += 1
            out.append(Send(peer=client.peer, message=Fail(xid=message.xid, code="rejected", reason=f"pd: {wrong}")))
            return
        self._handoffs[message.xid] = _Handoff(
            xid=message.xid,
            rid=message.rid,
            peer=client.peer,
            page_count=-(-length // size) - message.held // size,
            deadline=now + min(message.deadline_s, self._settings.handoff_s_max),
        )
        request = Request(
            rid=message.xid,
            prompt=bytes_to_ids(message.prompt),
            sampling=sampling,
            seed=message.seed,
            cache_salt=message.cache_salt,
            arrival=now,
        )
        out.append(AddPrefill(xid=message.xid, rid=message.rid, request=request, held=message.held, peer=client.peer))

    def _granted(self, client: Client, message: Grant, out: list[PrefillAction]) -> None:
        if message.grant <= client.grant_last:
            self.rejects["old_grant"] += 1
            return
        client.grant_last = message.grant
        handoff = self._of(client, message.xid)
        if handoff is None or handoff.grant:
            return
        if len(message.pages) != handoff.page_count:
            reason = f"pd: {len(message.pages)} pages granted, expected {handoff.page_count}"
            self._fail(handoff, "mismatch", reason, out)
            return
        handoff.grant, handoff.seed = message.grant, message.digest_seed
        for chunk in handoff.early:
            self._cut(handoff, chunk)
        handoff.early.clear()
        self._pump(client, out)

    def _data_ok(self, client: Client, message: DataOk, out: list[PrefillAction]) -> None:
        key = (message.xid, message.chunk)
        if key not in client.staged:
            self.rejects["unknown_part"] += 1
            return
        client.staged.remove(key)
        client.is_full = False
        out.append(Unstage(peer=client.peer, xid=message.xid, part=message.chunk))
        self._pump(client, out)

    def _below_floor(self, client: Client, floor: int, out: list[PrefillAction]) -> None:
        """Decode owes nothing below its floor: whatever is left there was forgotten by it."""
        for handoff in [h for h in self._handoffs.values() if h.peer == client.peer and 0 < h.grant < floor]:
            self.rejects["below_floor"] += 1
            self._end(handoff, "peer_gone", f"decode closed all grants below {floor}", out)
