"""pd: prefill and decode in different engines. Pure machines agree, backends move bytes, a port is their border.

How a driver uses it. The port owns no socket and no clock: messages come in and go out as data, `now` is an argument;
`line` (core/line.py) leads to the page workers of the engine's ranks, which obey and answer.

    backends = make_backends("auto")
    settings = HandoffSettings(engine="decode-0", incarnation=incarnation, layout=layout, vocab_size=vocab,
                               backends=tuple(b.name for b in backends), host=host_identity())
    port = HandoffPort(DecodeSide, settings, line=line, backends=backends)            # or PrefillSide

Every turn of the engine, on either side (engine/peers.py moves messages between a Mailbox and a port):

    line.pump()
    act(port.turn(now, messages, load=load, turn=turn))        # messages: PeerMessage | Gone
    outgoing = port.take_outgoing()                            # Send | OpenPeer | ClosePeer, in order: deliver them,
    line.flush()                                               # then let the ranks obey

A decode engine:

    # a request with a prefill address: remote only if that engine can be asked now, else local with the code as reason
    code, reason = port.machine.refusal(address)          # ("", "") = ask; e.g. ("peer_gone", "the connection broke")
    for r in sched.take_reservations(now):
        act(port.handle(StartHandoff(rid=r.rid, request=r.request, address=address, held=r.held, spans=r.spans), now))
    # an abort, in whatever phase; the pages are free on return, but for those that it asks to be quarantined:
    act(port.handle(CancelHandoff(rid=rid), now)); sched.abort(rid, reason)

    def act(results):                                      # each StartHandoff ends with one Landed or one Recompute,
        for result in results:                             # unless it was cancelled
            match result:
                case Landed(): sched.landed(result.rid, result.token, result.logprobs, now, ...)
                case Recompute(): sched.recompute(result.rid, result.code)     # or an error, by --...-on-failure
                case Quarantine(): sched.incoming.quarantine(result.spans)     # comes before the Recompute
                case QuarantineOver(): sched.incoming.quarantine_over(result.spans)
                case PeerChanged(): log and count

A prefill engine serves as many decode engines as come (requests are called by their xid there):

    for chunk in outcome.chunks:                           # after each commit: ChunkReady, as it is
        act(port.handle(chunk, now))
    # a request that ended here on its own (an operator's abort, an error):
    act(port.handle(EndPrefill(xid=xid, code="aborted", reason=reason), now))

    def act(results):                                 # each AddPrefill ends with one PrefillDrained or AbortPrefill
        for result in results:
            match result:
                case AddPrefill():                         # sched.add may refuse: EndPrefill(code="rejected"...)
                    sched.add(result.request, handoff=HandoffSpec(xid=result.xid, held=result.held))
                case ReleaseChunk(): sched.chunk_drained(result.xid, result.spans)
                case StopPrefill(): sched.abort(result.xid, result.reason)     # its holds stay until AbortPrefill
                case ForgetPrefill(): sched.handoff_ended(result.xid)          # AddPrefill may come again
                case PrefillDrained(): sched.handoff_drained(result.xid)
                case AbortPrefill(): sched.handoff_ended(result.xid)
                case PeerChanged(): log and count

Before the end: `port.handle(Drain(), now)` on a prefill engine; what runs goes on, nothing new is taken. At the end:
`port.handle(Shutdown(), now)`, send what is outgoing, `port.close()`.
Knows nothing of schedulers, caches, models or HTTP.
"""

from serinus.pd.actions import (
    AbortPrefill,
    AddPrefill,
    AttachPeer,
    CancelReads,
    ClosePeer,
    FencePeer,
    ForgetPrefill,
    Landed,
    OpenPeer,
    PeerAction,
    PeerChanged,
    PrefillDrained,
    Quarantine,
    QuarantineOver,
    Recompute,
    ReleaseChunk,
    Send,
    StopPrefill,
)
from serinus.pd.backends import (
    AnyBackend,
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
)
from serinus.pd.clients import Client
from serinus.pd.decode import DecodeSide
from serinus.pd.events import (
    CancelHandoff,
    DecodeEvent,
    Drain,
    EndPrefill,
    PeerFenced,
    PrefillEvent,
    PrepareHandoff,
    ReclaimParked,
    Shutdown,
    StartHandoff,
    Tick,
    WantPeer,
)
from serinus.pd.integrity import digest_pages, digest_seed
from serinus.pd.layout import Cut, RankLayout, Routes, cut, difference, recut, target_range
from serinus.pd.modes import (
    Capabilities,
    Fence,
    Mode,
)
from serinus.pd.page_worker import PAGE_ANSWERS, PAGE_COMMANDS, PageAnswer, PageCommand, PageWorker
from serinus.pd.pages import DigestPiece, MovePiece, PieceDigested, PieceMoved, PieceStatus, TakeIn, TakenIn, Unstage
from serinus.pd.port import TICK_S, DecodeResult, HandoffPort, PrefillResult
from serinus.pd.prefill import PrefillSide
from serinus.pd.registry import (
    Peer,
    PeerState,
)
from serinus.pd.settings import HandoffSettings
from serinus.pd.stores import Intake
from serinus.pd.trail import HandoffTrail

__all__ = [
    "PAGE_ANSWERS",
    "PAGE_COMMANDS",
    "TICK_S",
    "AbortPrefill",
    "AddPrefill",
    "AnyBackend",
    "AttachPeer",
    "Backend",
    "CancelHandoff",
    "CancelReads",
    "Capabilities",
    "Client",
    "ClosePeer",
    "Cut",
    "DecodeEvent",
    "DecodeResult",
    "DecodeSide",
    "DigestPiece",
    "Drain",
    "EndPrefill",
    "Fence",
    "FencePeer",
    "Fenced",
    "ForgetPrefill",
    "HandoffPort",
    "HandoffSettings",
    "HandoffTrail",
    "Intake",
    "Landed",
    "LocalBackend",
    "Mode",
    "MovePiece",
    "OneSided",
    "OpResult",
    "OpState",
    "OpenPeer",
    "PageAnswer",
    "PageCommand",
    "PageWorker",
    "Peer",
    "PeerAction",
    "PeerChanged",
    "PeerFenced",
    "PeerState",
    "PieceDigested",
    "PieceMoved",
    "PieceStatus",
    "PrefillDrained",
    "PrefillEvent",
    "PrefillResult",
    "PrefillSide",
    "PrepareHandoff",
    "Quarantine",
    "QuarantineOver",
    "RankLayout",
    "ReclaimParked",
    "Recompute",
    "Region",
    "ReleaseChunk",
    "Routes",
    "Send",
    "ShmBackend",
    "Shutdown",
    "StartHandoff",
    "StopPrefill",
    "TakeIn",
    "TakenIn",
    "TcpBackend",
    "Tick",
    "Unstage",
    "WantPeer",
    "cut",
    "difference",
    "digest_pages",
    "digest_seed",
    "host_identity",
    "make_backends",
    "make_one_sided",
    "recut",
    "target_range",
]
