"""Decode and prefill engines reduced to handoff machines and tiny pools; the test decides the order of everything.

Pages hold bytes that name the prompt and the page, so a page with anything else in it is noticed. Freed pages and
released staging bytes are scribbled over. The world keeps its own account of what may be written and read:

    I1  a granted page is given to no other request         I2  every TakeIn writes pages its handoff holds then
    I3  a closed grant changes only a counter               I4  pages are read only while they are held
    I6  what landed is what was computed                    I7  each handoff has exactly one end
    I9  granted = sent = landed                             I12 after calm nothing is held anywhere
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.core.handoff import ChunkReady
from serinus.core.request import Request
from serinus.pd import (
    AbortPrefill,
    AddPrefill,
    CancelHandoff,
    ClosePeer,
    DecodeEvent,
    DecodeSide,
    EndPrefill,
    Landed,
    MovePiece,
    OpenPeer,
    PeerChanged,
    PieceMoved,
    PieceStatus,
    PrefillDrained,
    PrefillEvent,
    PrefillSide,
    PrepareHandoff,
    Recompute,
    ReleaseChunk,
    Send,
    StartHandoff,
    TakeIn,
    TakenIn,
    Tick,
    Unstage,
    digest_pages,
)
from serinus.wire import Gone, PeerMessage
from serinus.wire.messages import Data, Message
from tests.pd.tiny import PAGE_BYTES, PAGE_SIZE, Pool, first_token, full, make_request, make_settings, page_content


@dataclass(slots=True)
class Link:
    """One connection: what travels each way, in order; None = the news that it ended."""

    decode: int
    decode_name: str
    incarnations: tuple[int, int]
    """Of both ends, for good."""
    prefill: int
    prefill_name: str
    to_prefill: deque[Message | None] = field(default_factory=deque)
    to_decode: deque[Message | None] = field(default_factory=deque)
    decode_open: bool = True
    prefill_open: bool = True
    staging: dict[tuple[str, int, int], NDArray[np.uint8]] = field(default_factory=dict)
    """Bytes the sender keeps for the receiver, by part."""


@dataclass(slots=True)
class Asked:
    """A handoff as its decode engine sees it."""

    request: Request
    held: int
    pages: NDArray[np.int32]
    ends: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Job:
    """A prompt being computed by a prefill engine."""

    request: Request
    held_pages: int
    done_pages: int = 0
    chunks: list[NDArray[np.int32]] = field(default_factory=list)
    """Held for the transfer."""

    @property
    def page_count(self) -> int:
        return -(-len(self.request.prompt) // PAGE_SIZE) - self.held_pages


class World:
    """Engines, links, and the account of everything. Every method is one step; actions are performed within it."""

    def __init__(self, decodes: int = 1, prefills: int = 1, *, pages: int = 14, room: int = 3) -> None:
        """`room`: parts that one connection can have staged at once."""
        self.now = 100.0
        self.room = room
        self.lives = 0
        self.decode: list[DecodeSide] = []
        self.prefill: list[PrefillSide] = []
        self.pools = [Pool(pages) for _ in range(decodes)]
        self.prefill_pools = [Pool(4 * pages) for _ in range(prefills)]
        self.asked: list[dict[str, Asked]] = [{} for _ in range(decodes)]
        self.over: Counter[str] = Counter()
        self.jobs: list[dict[str, Job]] = [{} for _ in range(prefills)]
        self.links: list[Link] = []
        self.news: list[PeerChanged] = []
        self.prefill_alive = [True] * prefills
        self.decode_life = [0] * decodes
        self.prefill_life = [0] * prefills
        self.started = 0
        self.decode.extend(self._new_decode(d) for d in range(decodes))
        self.prefill.extend(self._new_prefill(p) for p in range(prefills))

    def _new_decode(self, d: int) -> DecodeSide:
        self.lives += 1
        self.decode_life[d] = self.lives
        return DecodeSide(make_settings(f"decode-{d}", self.lives), mint=self._mint)

    def _new_prefill(self, p: int) -> PrefillSide:
        self.lives += 1
        self.prefill_life[p] = self.lives
        return PrefillSide(make_settings(f"prefill-{p}", self.lives))

    def _mint(self) -> str:
        self.started += 1
        return f"x{self.started}"

    # ---- steps of engines -------------------------------------------------------------------------------------------

    def start(self, d: int, p: int, length: int, held_pages: int, *, early: bool = False) -> str | None:
        """A decode engine asks a prefill engine for a prompt; None = no pages for it. `early`: it asks before it
        grants them, with `late_grant`."""
        request = make_request(f"r{self.started}-{len(self.asked[d])}-{self.over.total()}", length, self.started)
        total = -(-length // PAGE_SIZE)
        held_pages = min(held_pages, (length - 1) // PAGE_SIZE)
        pages = self.pools[d].take(request.rid, total - held_pages)
        if pages is None:
            return None
        self.asked[d][request.rid] = Asked(request=request, held=held_pages * PAGE_SIZE, pages=pages)
        asked: dict[str, Any] = {"rid": request.rid, "request": request, "address": f"p{p}"}
        self.late_grant = StartHandoff(**asked, held=held_pages * PAGE_SIZE, spans=full(held_pages, pages))
        self.to_decode(d, PrepareHandoff(**asked) if early else self.late_grant)
        return request.rid

    def cancel(self, d: int, rid: str) -> None:
        """The client of a request goes away."""
        self.to_decode(d, CancelHandoff(rid=rid))
        self._end(d, rid, "cancelled")

    def compute(self, p: int, xid: str, count: int) -> None:
        """A prefill engine computes up to `count` more pages of a prompt."""
        job = self.jobs[p][xid]
        count = min(count, job.page_count - job.done_pages)
        if not count:
            return
        pool = self.prefill_pools[p]
        pages = pool.take(xid, count)
        if pages is None:
            return
        for i, page in enumerate(pages.tolist()):
            pool.data[page] = page_content(job.request.prompt, job.held_pages + job.done_pages + i)
        first = job.done_pages
        job.done_pages += count
        job.chunks.append(pages)
        last = job.done_pages == job.page_count
        token = first_token(job.request.prompt) if last else None
        self.to_prefill(p, ChunkReady(xid=xid, spans=full(job.held_pages + first, pages), last=last, token=token))

    def end_prefill(self, p: int, xid: str, code: str = "error") -> None:
        """A prefill engine gives a prompt up."""
        self.to_prefill(p, EndPrefill(xid=xid, code=code, reason="gave up"))

    def tick(self, seconds: float) -> None:
        """Time passes for all engines that run."""
        self.now += seconds
        for d in range(len(self.decode)):
            self.to_decode(d, Tick())
        for p in range(len(self.prefill)):
            if self.prefill_alive[p]:
                self.to_prefill(p, Tick())

    def kill_prefill(self, p: int) -> None:
        """kill -9: what it had sent may still arrive; then its connections end."""
        self.prefill_alive[p] = False
        self.jobs[p].clear()
        self.prefill_pools[p].owner.clear()
        for link in self.links:
            if link.prefill == p and link.prefill_open:
                link.prefill_open = False
                link.to_prefill.clear()
                link.to_decode.append(None)

    def revive_prefill(self, p: int) -> None:
        """A new process at the same address."""
        self.prefill_alive[p] = True
        self.prefill[p] = self._new_prefill(p)

    def kill_decode(self, d: int) -> None:
        """kill -9 of a decode engine, and a new process in its place."""
        for link in self.links:
            if link.decode == d and link.decode_open:
                link.decode_open = False
                link.to_decode.clear()
                link.to_prefill.append(None)
        for rid in list(self.asked[d]):
            self._end(d, rid, "killed")
        self.decode[d] = self._new_decode(d)

    # ---- steps of the network -----------------------------------------------------------------------------------

    def deliver_to_decode(self, link: Link) -> None:
        """The next message of a link arrives."""
        if not link.to_decode:
            return
        message = link.to_decode.popleft()
        if not link.decode_open:
            return
        if message is None:
            link.decode_open = False
            self.to_decode(link.decode, Gone(peer=link.decode_name, reason="the connection broke"))
            return
        event = PeerMessage(peer=link.decode_name, incarnation=link.incarnations[1], message=message)
        self.to_decode(link.decode, event)

    def deliver_to_prefill(self, link: Link) -> None:
        """The next message of a link arrives."""
        if not link.to_prefill:
            return
        message = link.to_prefill.popleft()
        if not link.prefill_open:
            return
        if message is None:
            link.prefill_open = False
            link.staging.clear()
            self.to_prefill(link.prefill, Gone(peer=link.prefill_name, reason="the connection broke"))
            return
        event = PeerMessage(peer=link.prefill_name, incarnation=link.incarnations[0], message=message)
        self.to_prefill(link.prefill, event)

    def corrupt(self, link: Link) -> None:
        """A byte flips in the first part that is on its way."""
        for message in link.to_decode:
            if isinstance(message, Data) and (message.xid, message.piece, 0) in link.staging:
                link.staging[message.xid, message.piece, 0][0, 3] ^= 0x10
                return

    def settle(self, *, compute: bool = True) -> None:
        """Deliver and compute until nothing is left to do."""
        for _ in range(100_000):
            busy = False
            for link in self.links:
                busy = busy or bool(link.to_decode) or bool(link.to_prefill)
                self.deliver_to_decode(link)
                self.deliver_to_prefill(link)
            for p, jobs in enumerate(self.jobs):
                for xid in list(jobs) if compute else []:
                    job = jobs.get(xid)
                    if job is not None and job.done_pages < job.page_count:
                        busy = True
                        self.compute(p, xid, 2)
            if not busy:
                return
        raise AssertionError("the world does not come to rest")

    # ---- performing actions ---------------------------------------------------------------------------------------

    def to_decode(self, d: int, event: DecodeEvent) -> None:
        """Give one event to a decode machine and perform what it asks."""
        events: deque[DecodeEvent] = deque((event,))
        while events:
            for action in self.decode[d].handle(events.popleft(), self.now):
                match action:
                    case Send():
                        link = self._link(decode=(d, action.peer))
                        if link is not None and link.decode_open:
                            link.to_prefill.append(action.message)
                    case OpenPeer():
                        self._open(d, action)
                    case ClosePeer():
                        link = self._link(decode=(d, action.peer))
                        if link is not None and link.decode_open:
                            link.decode_open = False
                            link.to_prefill.append(None)
                    case TakeIn():
                        events.appendleft(self._copy_in(d, action))
                    case Landed():
                        self._landed(d, action)
                    case Recompute():
                        self._end(d, action.rid, action.code)
                    case PeerChanged():
                        self.news.append(action)
        self.check()

    def to_prefill(self, p: int, event: PrefillEvent) -> None:
        """Give one event to a prefill machine and perform what it asks."""
        events: deque[PrefillEvent] = deque((event,))
        while events:
            for action in self.prefill[p].handle(events.popleft(), self.now):
                match action:
                    case Send():
                        link = self._link(prefill=(p, action.peer))
                        if link is not None and link.prefill_open:
                            link.to_decode.append(action.message)
                    case ClosePeer():
                        link = self._link(prefill=(p, action.peer))
                        if link is not None:
                            link.prefill_open = False
                            link.staging.clear()
                    case AddPrefill():
                        assert action.xid not in self.jobs[p], f"{action.xid} was added twice"
                        self.jobs[p][action.xid] = Job(request=action.request, held_pages=action.held // PAGE_SIZE)
                    case MovePiece():
                        events.append(self._stage(p, action))
                    case Unstage():
                        link = self._link(prefill=(p, action.peer))
                        assert link is not None
                        link.staging.pop((action.xid, action.piece, action.rank))[:] = 0xCC
                    case ReleaseChunk():
                        self._release_chunk(p, action)
                    case PrefillDrained():
                        job = self.jobs[p].pop(action.xid)
                        assert not job.chunks, "drained, but chunks are held still"
                        assert action.page_count == job.page_count
                    case AbortPrefill():
                        job = self.jobs[p].pop(action.xid)
                        for chunk in job.chunks:
                            self.prefill_pools[p].give(action.xid, chunk)
                    case PeerChanged():
                        self.news.append(action)
        self.check()

    def _open(self, d: int, action: OpenPeer) -> None:
        p = int(action.address[1:])
        name = f"in-{len(self.links)}"
        lives = (self.decode_life[d], self.prefill_life[p])
        link = Link(decode=d, decode_name=action.peer, incarnations=lives, prefill=p, prefill_name=name)
        if not self.prefill_alive[p]:
            link.prefill_open = False
            link.to_decode.append(None)
        self.links.append(link)

    def _link(self, *, decode: tuple[int, str] | None = None, prefill: tuple[int, str] | None = None) -> Link | None:
        for link in reversed(self.links):  # a new process uses old names again
            if (link.decode, link.decode_name) == decode or (link.prefill, link.prefill_name) == prefill:
                return link
        return None

    def _release_chunk(self, p: int, action: ReleaseChunk) -> None:
        job = self.jobs[p].get(action.xid)
        assert job is not None, f"a chunk of {action.xid} was released, which has ended"
        index = next(i for i, chunk in enumerate(job.chunks) if np.array_equal(chunk, action.spans[0].pages))
        self.prefill_pools[p].give(action.xid, job.chunks.pop(index))

    def _stage(self, p: int, action: MovePiece) -> PieceMoved:
        link = self._link(prefill=(p, action.peer))
        assert link is not None
        if len(link.staging) >= self.room:
            return PieceMoved(
                peer=action.peer, xid=action.xid, piece=action.piece, rank=action.rank, status=PieceStatus.FULL,
                others=len(link.staging),
            )  # fmt: skip
        pool = self.prefill_pools[p]
        for page in action.pages.tolist():
            assert pool.owner.get(page) == action.xid, f"I4: page {page} is read and not held"
        rows = pool.data[action.pages]
        link.staging[action.xid, action.piece, action.rank] = rows
        return PieceMoved(
            peer=action.peer,
            xid=action.xid,
            piece=action.piece,
            rank=action.rank,
            digests=digest_pages(rows, action.digest_seed),
            byte_count=rows.nbytes,
            shm_name="world",
        )

    def _copy_in(self, d: int, action: TakeIn) -> TakenIn:
        rid = next((rid for rid, asked in self.asked[d].items() if np.isin(action.pages, asked.pages).all()), None)
        assert rid is not None, f"I2: {action.pages} are filled for {action.xid} and no request that asked holds them"
        granted = self.decode[d].granted(rid)
        assert granted, f"I2: {rid} has no open grant"
        for page in action.pages.tolist():
            assert self.pools[d].owner.get(page) == rid, f"I2: page {page} is not {rid}'s"
        link = self._link(decode=(d, action.peer))
        assert link is not None
        rows = link.staging.get((action.xid, action.piece, 0))
        if rows is None:  # the sender died with its memory
            return TakenIn(xid=action.xid, piece=action.piece, error="nothing is there", code="transfer")
        self.pools[d].data[action.pages] = rows
        if digest_pages(rows, action.digest_seed) != action.digests:
            return TakenIn(xid=action.xid, piece=action.piece, error="a page differs", code="digest")
        return TakenIn(xid=action.xid, piece=action.piece)

    def _landed(self, d: int, action: Landed) -> None:
        asked = self.asked[d][action.rid]
        assert action.page_count == len(asked.pages), "I9"
        assert action.byte_count == len(asked.pages) * PAGE_BYTES, "I9"
        assert action.token == first_token(asked.request.prompt), "I7: the first token is another one's"
        for i, page in enumerate(asked.pages.tolist()):
            wanted = page_content(asked.request.prompt, asked.held // PAGE_SIZE + i)
            assert np.array_equal(self.pools[d].data[page], wanted), f"I6: page {i} of {action.rid} holds other bytes"
        self._end(d, action.rid, "landed")

    def _end(self, d: int, rid: str, how: str) -> None:
        asked = self.asked[d].pop(rid, None)
        assert asked is not None, f"I7: {rid} ended twice, now {how}"
        self.pools[d].give(rid, asked.pages)
        self.over[how] += 1

    # ---- the account ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold after every step."""
        for p, jobs in enumerate(self.jobs):
            held = sum(len(chunk) for job in jobs.values() for chunk in job.chunks)
            assert held == len(self.prefill_pools[p].owner), "a chunk is held by no handoff"
        for link in self.links:
            assert len(link.staging) <= self.room

    def assert_empty(self) -> None:
        """I12: nothing is held anywhere, and all machines agree that nothing goes on."""
        for d, machine in enumerate(self.decode):
            assert not self.asked[d], f"never ended: {list(self.asked[d])}"
            assert machine.handoff_count == 0
            assert not self.pools[d].owner
        for p, machine_p in enumerate(self.prefill):
            assert machine_p.handoff_count == 0
            assert not machine_p.rejects["below_floor"], "an end was missed, and only the grant floor cleaned up"
            assert not self.jobs[p]
            assert not self.prefill_pools[p].owner
            for client in machine_p.clients:
                assert not client.staged
                assert all(not lane.outbox and not lane.moving and not lane.again for lane in client.lanes)
                assert not client.live
                assert not client.early
        for link in self.links:
            assert not (link.staging and link.prefill_open), "bytes are staged for no peer"
