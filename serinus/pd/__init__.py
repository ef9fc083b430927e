"""pd: prefill and decode in different engines. Pure machines agree, backends move bytes, ports join both to the world.

How an engine loop drives it (both ports are single-threaded; nothing blocks but `poll(timeout_s)`):

    clock = WallClock()
    backends = make_backends("auto")
    settings = PdSettings(engine="decode-0", incarnation=incarnation, layout=layout, vocab_size=vocab,
                          backends=tuple(b.name for b in backends), host=host_identity())

A decode engine connects on demand, to as many prefill engines as its requests name:

    post = Post(ZmqChannel(), incarnation=incarnation, clock=clock)
    port = DecodePort(settings, post=post, backends=backends, store=pool, clock=clock)
    # a request with a prefill address: remote only if that engine can be asked now, else local with the code as reason
    code, reason = port.machine.refusal(address)          # ("", "") = ask; e.g. ("peer_gone", "the connection broke")
    # every turn of the loop:
    for r in sched.take_reservations(now):
        act(port.handle(StartHandoff(rid=r.rid, request=r.request, address=address, held=r.held, spans=r.spans)))
    act(port.poll(0.0 if busy else TICK_S, load=load, turn=turn))
    # an abort, in whatever phase; the pages are free on return, but for those that it asks to be quarantined:
    act(port.handle(CancelHandoff(rid=rid))); sched.abort(rid, reason)

    def act(results):                                      # each StartHandoff ends with one Landed or one Recompute,
        for result in results:                             # unless it was cancelled
            match result:
                case Landed(): sched.landed(result.rid, result.token, result.logprobs, now, ...)
                case Recompute(): sched.recompute(result.rid, result.code)     # or an error, by --...-on-failure
                case Quarantine(): sched.quarantine(result.spans)              # comes before the Recompute
                case QuarantineOver(): sched.quarantine_over(result.spans)
                case PeerChanged(): log and count

A prefill engine binds and serves as many decode engines as come (requests are called by their xid there):

    post = Post(ZmqChannel("tcp://127.0.0.1:0"), incarnation=incarnation, clock=clock)     # channel.address = where
    port = PrefillPort(settings, post=post, backends=backends, store=pool, clock=clock)
    # after each commit:
    for chunk in outcome.chunks:                           # ChunkReady, as it is
        act(port.handle(chunk))
    act(port.poll(0.0 if busy else TICK_S, load=load, turn=turn))
    # a request that ended here on its own (an operator's abort, an error):
    act(port.handle(EndPrefill(xid=xid, code="aborted", reason=reason)))

    def act(results):                                 # each AddPrefill ends with one PrefillDrained or AbortPrefill
        for result in results:
            match result:
                case AddPrefill():                         # sched.add may refuse: EndPrefill(code="rejected")
                    sched.add(result.request, handoff=HandoffSpec(xid=result.xid, held=result.held))
                case ReleaseChunk(): sched.chunk_drained(result.xid, result.spans)
                case StopPrefill(): sched.abort(result.xid, result.reason)     # its holds stay until AbortPrefill
                case ForgetPrefill(): sched.handoff_ended(result.xid)          # AddPrefill may come again
                case PrefillDrained(): sched.handoff_drained(result.xid)
                case AbortPrefill(): sched.handoff_ended(result.xid)
                case PeerChanged(): log and count

An engine of several ranks gives its ports no store but a `crew`: each rank has a `Hand` for its own pages, which obeys
what comes down the rank's one ordered line; an engine of one rank (or of ranks in one thread) gives the stores, and the
port makes hands of them that obey at once.

Before the end: `port.handle(Drain())` on a prefill engine; what runs goes on, nothing new is taken.
To wait for a front and for peers at once: `wire.wait_any([front_channel, pd_channel], timeout_s)`, then poll both with
0. At the end: `port.handle(Shutdown())`, `port.close()`. Knows nothing of schedulers, caches, models or HTTP.
"""

from __future__ import annotations

from serinus.pd.actions import (
    AbortPrefill,
    AddPrefill,
    AttachPeer,
    CancelReads,
    CheckIn,
    ClosePeer,
    CopyIn,
    DecodeAction,
    FencePeer,
    ForgetPrefill,
    HandoffOver,
    Landed,
    OfferPiece,
    OpenPeer,
    PeerChanged,
    PrefillAction,
    PrefillDrained,
    Quarantine,
    QuarantineOver,
    ReadIn,
    Recompute,
    ReleaseChunk,
    Send,
    StagePiece,
    StopPrefill,
    Unstage,
    WritePiece,
)
from serinus.pd.backends import (
    Backend,
    Fenced,
    LocalBackend,
    OneSided,
    OpResult,
    OpState,
    Region,
    ShmBackend,
    TcpBackend,
    host_identity,
    make_backends,
    make_one_sided,
    shm_works,
)
from serinus.pd.clients import (
    Client,
)
from serinus.pd.crew import Crew, LocalCrew
from serinus.pd.decode import (
    DecodeSide,
)
from serinus.pd.decode_port import DecodePort, DecodeResult
from serinus.pd.events import (
    CancelHandoff,
    Copied,
    DecodeEvent,
    Drain,
    EndPrefill,
    PeerFenced,
    PeerLost,
    PieceStaged,
    PieceWritten,
    PrefillEvent,
    PrepareHandoff,
    Received,
    Shutdown,
    Squeeze,
    StageFailed,
    StageFull,
    StartHandoff,
    Tick,
    WantPeer,
)
from serinus.pd.hand import Hand
from serinus.pd.integrity import (
    check_pages,
    digest_pages,
    digest_seed,
    first_bad_page,
)
from serinus.pd.layout import (
    Cut,
    RankLayout,
    Shard,
    cut,
    difference,
    recut,
    target_range,
)
from serinus.pd.modes import (
    Capabilities,
    Fence,
    Mode,
)
from serinus.pd.orders import (
    HAND_ANSWERS,
    HAND_ORDERS,
    FillPages,
    HandAnswer,
    HandOrder,
    JoinPeer,
    LeavePeer,
    PagesFilled,
)
from serinus.pd.ports import MOVING_S, TICK_S, AnyBackend, frame_backends
from serinus.pd.prefill import (
    PrefillSide,
)
from serinus.pd.prefill_port import PrefillPort, PrefillResult
from serinus.pd.registry import (
    Peer,
    PeerState,
)
from serinus.pd.settings import (
    PdSettings,
)
from serinus.pd.stores import (
    Intake,
    PageStore,
    Routes,
    Stores,
)

__all__ = [
    "HAND_ANSWERS",
    "HAND_ORDERS",
    "MOVING_S",
    "TICK_S",
    "AbortPrefill",
    "AddPrefill",
    "AnyBackend",
    "AttachPeer",
    "Backend",
    "CancelHandoff",
    "CancelReads",
    "Capabilities",
    "CheckIn",
    "Client",
    "ClosePeer",
    "Copied",
    "CopyIn",
    "Crew",
    "Cut",
    "DecodeAction",
    "DecodeEvent",
    "DecodePort",
    "DecodeResult",
    "DecodeSide",
    "Drain",
    "EndPrefill",
    "Fence",
    "FencePeer",
    "Fenced",
    "FillPages",
    "ForgetPrefill",
    "Hand",
    "HandAnswer",
    "HandOrder",
    "HandoffOver",
    "Intake",
    "JoinPeer",
    "Landed",
    "LeavePeer",
    "LocalBackend",
    "LocalCrew",
    "Mode",
    "OfferPiece",
    "OneSided",
    "OpResult",
    "OpState",
    "OpenPeer",
    "PageStore",
    "PagesFilled",
    "PdSettings",
    "Peer",
    "PeerChanged",
    "PeerFenced",
    "PeerLost",
    "PeerState",
    "PieceStaged",
    "PieceWritten",
    "PrefillAction",
    "PrefillDrained",
    "PrefillEvent",
    "PrefillPort",
    "PrefillResult",
    "PrefillSide",
    "PrepareHandoff",
    "Quarantine",
    "QuarantineOver",
    "RankLayout",
    "ReadIn",
    "Received",
    "Recompute",
    "Region",
    "ReleaseChunk",
    "Routes",
    "Send",
    "Shard",
    "ShmBackend",
    "Shutdown",
    "Squeeze",
    "StageFailed",
    "StageFull",
    "StagePiece",
    "StartHandoff",
    "StopPrefill",
    "Stores",
    "TcpBackend",
    "Tick",
    "Unstage",
    "WantPeer",
    "WritePiece",
    "check_pages",
    "cut",
    "difference",
    "digest_pages",
    "digest_seed",
    "first_bad_page",
    "frame_backends",
    "host_identity",
    "make_backends",
    "make_one_sided",
    "recut",
    "shm_works",
    "target_range",
]
