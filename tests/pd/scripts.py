"""Scripts of arbitrary messages and events for both machines, told by a source of choices: hypothesis, or a fuzzer.

Whatever is said: no exception leaves a machine, its books agree with each other, and after the peer is gone nothing is
held. Values are drawn near what is legal, so that scripts come far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from serinus.core.errors import FrameError
from serinus.core.handoff import ChunkReady
from serinus.core.parts import PageSpan, Part
from serinus.pd import (
    AddPrefill,
    CancelHandoff,
    Capabilities,
    ClosePeer,
    DecodeSide,
    DigestPiece,
    EndPrefill,
    Fence,
    FencePeer,
    Mode,
    MovePiece,
    PeerFenced,
    PieceDigested,
    PieceMoved,
    PieceStatus,
    PrefillSide,
    Recompute,
    TakeIn,
    TakenIn,
    Tick,
    Unstage,
)
from serinus.wire import Gone, PeerMessage, decode, encode
from serinus.wire.messages import (
    AbortAck,
    AbortGrant,
    Confirm,
    ConfirmOk,
    Data,
    DataOk,
    Done,
    DoneOk,
    Drained,
    Expired,
    Fail,
    Grant,
    Hello,
    HelloAgain,
    HelloNo,
    HelloOk,
    Keepalive,
    KvFound,
    Message,
    PieceDigests,
    Prepare,
)
from tests.pd.steps import start_event
from tests.pd.tiny import LAYOUT, PAGE_BYTES, full, make_request, make_settings

MODES = tuple(Mode)
HUGE = (1 << 63) - 1


class Choices(Protocol):
    """Where the script's choices come from."""

    def pick(self, count: int) -> int:
        """0 <= number < count."""
        ...


def _number(choices: Choices) -> int:
    return (0, 1, 2, 3, 4, 7, HUGE)[choices.pick(7)]


def message_of(choices: Choices, mode: Mode) -> Message:
    """Any message, with values that are often right."""
    xid, grant = f"x{choices.pick(3)}", 1 + choices.pick(3) if choices.pick(8) else _number(choices)
    count = choices.pick(4)
    spans = tuple(
        PageSpan(
            part=Part(choices.pick(8) // 7),
            first=choices.pick(3),
            pages=np.array([1 + (i * 5 + count) % 9 for i in range(count)], np.int32),
        )
        for _ in range(choices.pick(8) // 4 + 1 if choices.pick(4) else 1)
    )
    right = {"xid": xid, "grant": grant}
    size = count * PAGE_BYTES if choices.pick(8) else _number(choices)
    kinds: tuple[Message, ...] = (
        Hello(engine="d", role="decode", layout=LAYOUT, backends=("b", "shm"), host="here", mac=b"m" * choices.pick(2)),
        HelloOk(engine="p", role="prefill", backend="b", mode=mode.value, layout=LAYOUT),
        HelloNo(reason="no"),
        HelloAgain(nonce=b"n"),
        Keepalive(grant_floor=_number(choices) if not choices.pick(4) else 0, step_s_max=float(choices.pick(3))),
        Prepare(
            **right, request=make_request("r", choices.pick(10), temperature=float(choices.pick(3))),
            held=4 * choices.pick(3), deadline_s=float(choices.pick(4) * 100 - 100),
            spans=spans if choices.pick(2) else (), digest_seed=choices.pick(3),
        ),
        Grant(**right, spans=spans, digest_seed=_number(choices)),
        Data(
            **right, piece=_number(choices), rank=choices.pick(9) // 8, part=choices.pick(9) // 8,
            first=choices.pick(4), digests=bytes(8 * count if choices.pick(3) else 0), byte_count=size,
            pages=list(range(1, count + 1)) if mode is Mode.PULL and choices.pick(8) else [],
        ),
        DataOk(**right, piece=_number(choices), rank=choices.pick(3)),
        Done(
            **right, token=_number(choices), piece_count=count, page_count=count, byte_count=size,
            digests=tuple(
                PieceDigests(piece=piece, digests=bytes(8 * choices.pick(3))) for piece in range(choices.pick(3))
            ),
        ),
        DoneOk(**right),
        Fail(**right, code=("aborted", "made up")[choices.pick(2)], reading=bool(choices.pick(2))),
        AbortGrant(grant=grant, floor=choices.pick(3), xid=xid),
        AbortAck(grant=grant, ranks=(0,) * choices.pick(2)),
        Confirm(**right),
        ConfirmOk(**right),
        Expired(**right),
        Drained(**right),
        KvFound(xid=xid, rid="r", part=choices.pick(9), position=_number(choices), reason="wrong"),
    )  # fmt: skip
    message = kinds[choices.pick(len(kinds))]
    return decode(encode(message, 5, 1)).message


def settings_for(mode: Mode, name: str, incarnation: int) -> Any:
    """Of an engine whose only backend works in this mode."""
    capabilities = Capabilities(mode=mode, fence=Fence.CLOSE if mode is Mode.PUSH else Fence.NONE)
    return make_settings(name, incarnation, backends=("b",), capabilities={"b": capabilities}, lease_s=5.0)


def run_decode(choices: Choices, steps: int) -> None:
    """A decode side, some requests, and a peer that says anything."""
    mode = MODES[choices.pick(3)]
    side = DecodeSide(settings_for(mode, "d", 1), mint=iter(f"x{i}" for i in range(10_000)).__next__)
    now, asked, due = 0.0, set[str](), list[Any]()

    def tell(event: Any) -> None:
        for action in side.handle(event, now):
            if isinstance(action, (TakeIn, FencePeer)):
                due.append(action)
            elif isinstance(action, Recompute):
                asked.discard(action.rid)

    def perform(action: Any) -> None:
        if isinstance(action, FencePeer):
            tell(PeerFenced(peer=action.peer, all_peers=bool(choices.pick(2)), endpoints=(b"new",)))
        else:
            error = "bad" * (not choices.pick(4))
            found = b"" if error or action.digests else bytes(8 * len(action.pages))
            place = {"xid": action.xid, "piece": action.piece, "source": action.source, "rank": action.rank}
            tell(TakenIn(**place, error=error, digests=found))

    for step in range(steps):
        roll = choices.pick(16)
        if roll == 0 and not side.granted(f"r{step}"):
            asked.add(f"r{step}")
            tell(start_event(f"r{step}", length=1 + choices.pick(12)))
        elif roll == 1 and asked:
            tell(CancelHandoff(rid=sorted(asked)[choices.pick(len(asked))]))
        elif roll == 2:
            now += (0.3, 2.0, 400.0)[choices.pick(3)]
            tell(Tick())
        elif roll in (3, 4) and due:
            perform(due.pop(choices.pick(len(due))))
        elif roll == 5:
            tell(Gone(peer=side.peers[0].name if side.peers else "p0#1", reason="gone"))
        else:
            name = side.peers[0].name if side.peers and choices.pick(8) else "p0#1"
            tell(PeerMessage(peer=name, incarnation=2, message=message_of(choices, mode)))
        assert side.quarantined_pages == 0 or mode is not Mode.RECEIVER_CHECKED
    for peer in side.peers:
        tell(Gone(peer=peer.name, reason="the end"))
    while due:
        perform(due.pop())
    assert side.handoff_count == 0, "I7: every handoff ended"
    assert side.quarantined_pages == 0, "I11: quarantine empties"
    assert not side._taking


def _sensible(side: PrefillSide, peer: str, choices: Choices) -> Message:
    """What a sound decode engine might say next."""
    client = side._clients.get(peer)
    if client is None:
        return Hello(engine=peer, role="decode", layout=LAYOUT, backends=("b",), host="here")
    orders = [order for order in side._table.under_way.values() if order.peer == peer]
    waiting = [order for order in orders if order.granted_at is None]
    staged = sorted(client.staged)
    if staged and choices.pick(2):
        xid, piece, rank = staged[choices.pick(len(staged))]
        return DataOk(xid=xid, grant=1, piece=piece, rank=rank)
    if waiting and choices.pick(3):
        order = waiting[choices.pick(len(waiting))]
        pages = list(range(1, 1 + order.end - order.held // 4))
        return Grant(xid=order.xid, grant=order.grant, spans=full(order.held // 4, pages), digest_seed=7)
    if orders and not choices.pick(6):
        return Fail(xid=orders[0].xid, grant=orders[0].grant, code="aborted", reason="left")
    grant = max((*client.closed, *client.live, client.floor, 10)) + 1
    return Prepare(
        xid=f"{peer}-{grant}", grant=grant, request=make_request("r", 1 + choices.pick(40)), held=0, deadline_s=100.0,
    )  # fmt: skip


class _Engine:
    """A prefill engine reduced to what a script needs: it computes what it is asked for, and stages what it is told."""

    def __init__(self, choices: Choices) -> None:
        self.mode = MODES[choices.pick(3)]
        self.side = PrefillSide(replace(settings_for(self.mode, "p", 2), staging_pieces=1 + choices.pick(3)))
        self.choices = choices
        self.now = 0.0
        self.due: list[Any] = []
        self.jobs: dict[str, Any] = {}
        self.staged: set[tuple[str, str, int]] = set()
        self.names = ["in-0", "in-1"]
        self._lives = 2

    def tell(self, event: Any) -> None:
        for action in self.side.handle(event, self.now):
            name = type(action).__name__
            if isinstance(action, (MovePiece, DigestPiece)):
                self.due.append(action)
            elif isinstance(action, ClosePeer):
                self.left(action.peer)
            elif isinstance(action, Unstage):
                self.staged.remove((action.peer, action.xid, action.piece))
            elif isinstance(action, AddPrefill):
                assert action.xid not in self.jobs, f"{action.xid} was added twice"
                self.jobs[action.xid] = action
            elif name in ("PrefillDrained", "AbortPrefill", "ForgetPrefill"):
                self.jobs.pop(action.xid, None)

    def left(self, peer: str) -> None:
        """A name is never used again; what was staged for it is gone."""
        self.staged.difference_update([key for key in self.staged if key[0] == peer])
        if peer in self.names:
            self.names[self.names.index(peer)] = f"in-{self._lives}"
            self._lives += 1

    def lose(self, peer: str) -> None:
        self.left(peer)
        self.tell(Gone(peer=peer, reason="gone"))

    def perform(self, picked: Any) -> None:
        """The first of that peer; some find no room, or fail."""
        action = next(action for action in self.due if action.peer == picked.peer)
        self.due.remove(action)
        common = {"peer": action.peer, "xid": action.xid, "piece": action.piece, "rank": action.rank}
        if isinstance(action, DigestPiece):
            self.tell(PieceDigested(**common, digests=bytes(8 * len(action.pages))))
            return
        others = sum(peer == action.peer for peer, _xid, _piece in self.staged)
        if self.mode is Mode.PUSH:
            self.tell(PieceMoved(**common, digests=bytes(8)))
        elif self.mode is Mode.PULL or self.choices.pick(4):
            if self.mode is Mode.RECEIVER_CHECKED and action.peer in self.names:
                self.staged.add((action.peer, action.xid, action.piece))
            late = self.mode is Mode.PULL and self.choices.pick(2)
            self.tell(PieceMoved(**common, digests=b"" if late else bytes(8)))
        elif self.choices.pick(2) or not others:
            self.tell(PieceMoved(**common, status=PieceStatus.FAILED, reason="bad"))
        else:
            self.tell(PieceMoved(**common, status=PieceStatus.FULL, others=others))

    def compute(self) -> None:
        job = self.jobs.pop(sorted(self.jobs)[self.choices.pick(len(self.jobs))])
        count = -(-len(job.request.prompt) // 4) - job.held // 4
        pages = np.arange(1, count + 1, dtype=np.int32)
        self.tell(ChunkReady(xid=job.xid, spans=full(job.held // 4, pages), last=True, token=1))


def run_prefill(choices: Choices, steps: int) -> None:
    """A prefill side with clients that say anything; its engine computes what it is asked for."""
    engine = _Engine(choices)
    side = engine.side
    for _ in range(steps):
        roll, peer = choices.pick(16), engine.names[choices.pick(2)]
        if roll in (0, 1) and engine.jobs:
            engine.compute()
        elif roll == 2:
            engine.now += (0.3, 2.0, 400.0)[choices.pick(3)]
            engine.tell(Tick())
        elif roll in (3, 4) and engine.due:
            engine.perform(engine.due[choices.pick(len(engine.due))])
        elif roll == 5:
            engine.lose(peer)
        elif roll > 8:
            message = _sensible(side, peer, choices)
            engine.tell(PeerMessage(peer=peer, incarnation=5 + int(peer[3:]), message=message))
        else:
            engine.tell(PeerMessage(peer=peer, incarnation=5, message=message_of(choices, engine.mode)))
    for xid in list(side._table.under_way):
        engine.tell(EndPrefill(xid=xid, code="error"))
    for action in list(engine.due):
        if engine.mode is Mode.RECEIVER_CHECKED and action in engine.due:
            engine.perform(action)
    taken = {(client.peer, *key[:2]) for client in side.clients for key in client.staged}
    assert engine.staged == taken, "what is staged is what the peer has still to take"
    for peer in list(engine.names):
        engine.lose(peer)
    while engine.due:
        engine.perform(engine.due[0])
    assert side.handoff_count == 0, "I12: every order ended"


def run_codec(data: bytes, parts: Sequence[int]) -> str:
    """Arbitrary bytes, cut anywhere: a frame ("") or a reject with its reason, never anything else (I15)."""
    cuts = sorted({min(len(data), part) for part in parts})
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    try:
        decode(pieces)
    except FrameError as error:
        return error.reason
    return ""
