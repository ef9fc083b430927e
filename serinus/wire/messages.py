"""Every message between two processes, as strict msgspec structs.

Four conversations: front <-> engine (one machine, zmq ipc; here), decode <-> prefill control and the pages themselves
(handoff.py), the ranks of one engine (ranks.py). `codec.py` frames them; only it turns them into bytes.
Dataclasses of core travel inside them as they are, with their limits (core/bounds.py); arrays as arrays.py says.
Unknown fields of a message are refused; msgspec skips those of a dataclass: only the frame version keeps builds apart.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from serinus.core.bounds import Count, Name, Text, TopIds
from serinus.core.request import Request, TokenDelta
from serinus.core.trace import SPANS_MAX, SpanRecord
from serinus.wire.fields import MessageBase
from serinus.wire.handoff import (
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
    LayoutSignature,
    PieceDigests,
    Prepare,
)
from serinus.wire.ranks import EngineEnd, RankAnswers, RankExit, RankHeader, RankHello, RankWelcome

__all__ = [
    "Abort",
    "AbortAck",
    "AbortGrant",
    "Ack",
    "Confirm",
    "ConfirmOk",
    "Data",
    "DataOk",
    "Done",
    "DoneOk",
    "Drained",
    "EngineCall",
    "EngineEnd",
    "EngineReply",
    "Expired",
    "Fail",
    "Generate",
    "Grant",
    "Hello",
    "HelloAgain",
    "HelloNo",
    "HelloOk",
    "Keepalive",
    "KvFound",
    "LayoutSignature",
    "Message",
    "PieceDigests",
    "Prepare",
    "RankAnswers",
    "RankExit",
    "RankHeader",
    "RankHello",
    "RankWelcome",
    "Ready",
    "Spans",
    "StopEngine",
    "Tokens",
]


# ---- front <-> engine ---------------------------------------------------------------------------------------------


class Ready(MessageBase, frozen=True, kw_only=True):
    """Engine -> front, once it can serve: what it serves, and where the start-up time went."""

    engine: Name
    """Name of this engine in metrics and meta_info, e.g. `decode-0`."""
    incarnation: Count
    role: Name
    """unified, prefill or decode."""
    vocab_size: Count
    context_length: Count
    """Tokens of one sequence at most (prompt + output)."""
    max_total_tokens: Count
    """Slots of the KV pool."""
    page_size: Count
    pd_address: Name = ""
    """Control address for peers (prefill engines); empty = none."""
    eos_ids: TopIds = ()
    """Tokens that end an answer."""
    sampling_defaults: Annotated[dict[Name, int | float], msgspec.Meta(max_length=16)] = msgspec.field(
        default_factory=dict
    )
    """Fields of SamplingParams for requests that do not name them."""
    seconds: Annotated[dict[str, float], msgspec.Meta(max_length=256)] = msgspec.field(default_factory=dict)
    """Start-up phases, e.g. imports, weights, pool, warm-up."""
    info: Annotated[dict[str, str | int | float | bool], msgspec.Meta(max_length=1024)] = msgspec.field(
        default_factory=dict
    )
    """More for /server_info: dtype, model, layout, threads, KV bytes..."""


class Generate(MessageBase, frozen=True, kw_only=True):
    """Front -> engine: continue this prompt. The engine sets `arrival` itself."""

    request: Request


class Abort(MessageBase, frozen=True, kw_only=True):
    """Front -> engine: end this request (or all of them). Unknown ids change nothing."""

    rid: Name = ""
    all: bool = False
    reason: Text = "aborted by the client"
    silent: bool = False
    """No delta wanted: the front has already finished with it (a stop text, a vanished client)."""
    matched_stop: bool = False
    """The answer is complete: the front found a stop text in it. Counts as finished, not as aborted."""
    kept: Count = 0
    """With `matched_stop`: tokens of the answer; those behind them do not count."""


class Tokens(MessageBase, frozen=True, kw_only=True):
    """Engine -> front: what one step brought, for all requests of that front."""

    deltas: Annotated[tuple[TokenDelta, ...], msgspec.Meta(max_length=1 << 16)]


class EngineCall(MessageBase, frozen=True, kw_only=True):
    """Front -> engine: a question, or something to do; answered by one EngineReply with the same `call`."""

    call: Count
    what: Name
    """flush_cache | metrics | info | load | cache | canary | perturb | watch | look"""
    limit: Count = 0
    """Of `cache`: nodes of the tree at most."""
    body: Annotated[bytes, msgspec.Meta(max_length=1 << 16)] = b""
    """Of `perturb`: the faults to plant, as JSON; empty = only tell. Of `look`: what is looked at, as JSON."""


class EngineReply(MessageBase, frozen=True, kw_only=True):
    """Engine -> front: the answer to an EngineCall."""

    call: Count
    """That of the EngineCall; 0 = none: the engine has broken, and answers nothing more."""
    ok: bool = True
    body: bytes = b""
    """JSON, the Prometheus text of `metrics`, or for `watch` a frame (watched.py) in msgpack; with ok=False the reason
    in words."""


class Spans(MessageBase, frozen=True, kw_only=True):
    """Engine -> front: parts of traces that have ended, for the front to export."""

    spans: Annotated[tuple[SpanRecord, ...], msgspec.Meta(max_length=SPANS_MAX)]


class StopEngine(MessageBase, frozen=True, kw_only=True):
    """Front -> engine: stop; `drain` = finish the running requests first and take no new ones."""

    drain: bool = True


# ---- every reliable link -------------------------------------------------------------------------------------------


class Ack(MessageBase, frozen=True, kw_only=True):
    """Nothing but the acknowledgement in the frame's header; also a harmless frame to probe a connection with."""


Message = (
    Ready
    | Generate
    | Abort
    | Tokens
    | EngineCall
    | EngineReply
    | StopEngine
    | Ack
    | Hello
    | HelloOk
    | HelloNo
    | Keepalive
    | Prepare
    | Grant
    | Data
    | DataOk
    | Done
    | DoneOk
    | Fail
    | HelloAgain
    | AbortGrant
    | AbortAck
    | Confirm
    | ConfirmOk
    | Expired
    | Drained
    | RankHello
    | RankHeader
    | RankAnswers
    | RankWelcome
    | RankExit
    | EngineEnd
    | KvFound
    | Spans
)
"""What a frame can carry."""
