"""Every message between two processes, as strict msgspec structs.

Three conversations: front <-> engine (one machine, zmq ipc), decode <-> prefill control (PD.md section 1), and the
pages themselves (Data). `codec.py` frames them; nobody else turns them into bytes. Token ids travel as little-endian
int32 bytes (`ids_to_bytes`, `bytes_to_ids`): a list of 128k integers would cost a millisecond to decode.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Abort",
    "Ack",
    "Data",
    "DataOk",
    "Done",
    "DoneOk",
    "EngineCall",
    "EngineReply",
    "Fail",
    "Generate",
    "Grant",
    "Hello",
    "HelloNo",
    "HelloOk",
    "Keepalive",
    "LayoutSignature",
    "Message",
    "Prepare",
    "Ready",
    "Sampling",
    "Shutdown",
    "TokenLp",
    "TokenOut",
    "Tokens",
    "UsageOut",
    "bytes_to_ids",
    "ids_to_bytes",
]

Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=16_384)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Pages = Annotated[list[Count], msgspec.Meta(max_length=1 << 20)]
# Containers are bounded one by one: their length is checked before anything of that length is allocated.
Ids = Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 20)]
TopIds = Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 10)]
TopLogprobs = Annotated[tuple[float, ...], msgspec.Meta(max_length=1 << 10)]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)]
Tiers = Annotated[dict[str, int], msgspec.Meta(max_length=16)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, array_like=False):
    """A message: immutable, tagged with its class name, unknown fields refused."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece of a message."""


def ids_to_bytes(ids: NDArray[np.int32]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


def bytes_to_ids(data: bytes) -> NDArray[np.int32]:
    """The reverse; raises ValueError where the length is no multiple of four."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)


# ---- shared pieces ------------------------------------------------------------------------------------------------


class Sampling(_Part, frozen=True, kw_only=True):
    """core.SamplingParams on the wire (what the engine needs of it; texts stay with the front)."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[int, float], msgspec.Meta(max_length=1 << 16)] = {}
    stop_token_ids: TopIds = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class TokenLp(_Part, frozen=True, kw_only=True):
    """core.TokenLogprobs on the wire."""

    logprob: float | None
    top_ids: TopIds = ()
    top_logprobs: TopLogprobs = ()


TokenLps = Annotated[tuple[TokenLp, ...], msgspec.Meta(max_length=1 << 20)]


class UsageOut(_Part, frozen=True, kw_only=True):
    """core.Usage on the wire."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: Tiers = {}
    prefill_engine: str = ""
    handoff_tokens: int = 0
    handoff_pages: int = 0
    handoff_bytes: int = 0
    handoff_seconds: float = 0.0
    local_reason: str = ""
    retractions: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0


# ---- front <-> engine ---------------------------------------------------------------------------------------------


class Ready(_Message, frozen=True, kw_only=True):
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
    seconds: Annotated[dict[str, float], msgspec.Meta(max_length=256)] = {}
    """Start-up phases, e.g. imports, weights, pool, warm-up."""
    info: Annotated[dict[str, str | int | float | bool], msgspec.Meta(max_length=1024)] = {}
    """More for /server_info: dtype, model, layout, threads, KV bytes..."""


class Generate(_Message, frozen=True, kw_only=True):
    """Front -> engine: continue this prompt."""

    rid: Name
    prompt: bytes
    """Token ids (ids_to_bytes)."""
    sampling: Sampling
    seed: int
    cache_salt: Name = ""
    prefill_address: Name = ""


class Abort(_Message, frozen=True, kw_only=True):
    """Front -> engine: end this request (or all of them). Unknown ids change nothing."""

    rid: Name = ""
    all: bool = False
    reason: Text = "aborted by the client"
    silent: bool = False
    """No TokenOut wanted: the front has already finished with it (a stop text, a vanished client)."""
    matched_stop: bool = False
    """The answer is complete: the front found a stop text in it. Counts as finished, not as aborted."""


class TokenOut(_Part, frozen=True, kw_only=True):
    """core.TokenDelta on the wire."""

    rid: Name
    ids: Ids = ()
    logprobs: TokenLps = ()
    prompt_logprobs: TokenLps = ()
    finish: str = ""
    """A FinishReason value in the last one, else empty."""
    matched_stop: int | None = None
    error: Text = ""
    error_status: int = 500
    usage: UsageOut | None = None


class Tokens(_Message, frozen=True, kw_only=True):
    """Engine -> front: what one step brought, for all requests of that front."""

    out: Annotated[tuple[TokenOut, ...], msgspec.Meta(max_length=1 << 16)]


class EngineCall(_Message, frozen=True, kw_only=True):
    """Front -> engine: a question or an order; answered by one EngineReply with the same `call`."""

    call: Count
    what: Name
    """flush_cache | metrics | info | load | cache"""
    limit: Count = 0
    """Of `cache`: nodes of the tree at most."""


class EngineReply(_Message, frozen=True, kw_only=True):
    """Engine -> front."""

    call: Count
    ok: bool = True
    body: bytes = b""
    """JSON, or the Prometheus text of `metrics`; with ok=False the reason in words."""


class Shutdown(_Message, frozen=True, kw_only=True):
    """Front -> engine: stop; `drain` = finish the running requests first and take no new ones."""

    drain: bool = True


# ---- every reliable link -------------------------------------------------------------------------------------------


class Ack(_Message, frozen=True, kw_only=True):
    """Nothing but the acknowledgement in the frame's header; also a harmless frame to probe a connection with."""


# ---- decode <-> prefill (PD.md section 1) -------------------------------------------------------------------------


class LayoutSignature(_Part, frozen=True, kw_only=True):
    """What shapes KV bytes. Two engines exchange KV only if these are equal."""

    model: Name
    """Digest of config and weights names: architecture, sizes, rope, revision."""
    kv_dtype: Name
    page_size: Count
    layer_count: Count
    kv_head_count: Count
    head_size: Count
    tp: Count = 1
    pp: Count = 1
    lanes: Names = ("k", "v")
    """Byte strips that move with a page; the canary adds its own."""


class Hello(_Message, frozen=True, kw_only=True):
    """D -> P, first on every link (and again after a reconnect)."""

    engine: Name
    role: Name
    layout: LayoutSignature
    backends: Names
    """Data backends this side can receive with, best first: local, shm, tcp."""
    host: Name = ""
    """Identity of the machine (boot id): shm needs the same one."""
    mac: bytes = b""
    step_s_max: Seconds = 0.0
    """See Keepalive."""


class HelloOk(_Message, frozen=True, kw_only=True):
    """P -> D: welcome; the chosen data backend, and the layout once more, for decode to check as well."""

    engine: Name
    role: Name
    backend: Name
    layout: LayoutSignature
    step_s_max: Seconds = 0.0
    """See Keepalive."""


class HelloNo(_Message, frozen=True, kw_only=True):
    """P -> D: refused, and why in words."""

    reason: Text


class Keepalive(_Message, frozen=True, kw_only=True):
    """Both ways, also when idle."""

    grant_floor: Count = 0
    """D -> P: lowest grant still alive; below it nothing is owed any more."""
    load: Count = 0
    """Requests running or waiting."""
    turn: Count = 0
    """Scheduler turns: a hung scheduler is visible, not only a dead socket."""
    step_s_max: Seconds = 0.0
    """The longest that the sender was silent lately because it computed; 0 = it has no idea."""


class Prepare(_Message, frozen=True, kw_only=True):
    """D -> P: please compute this prompt; I hold its first `held` tokens."""

    xid: Name
    rid: Name
    prompt: bytes
    sampling: Sampling
    seed: int
    held: Count
    """Page-aligned, at most prompt length - 1."""
    cache_salt: Name = ""
    deadline_s: float = 300.0
    """Seconds from receipt after which prefill may end it with FAIL."""


class Grant(_Message, frozen=True, kw_only=True):
    """D -> P: these pages of mine are yours to fill, in order, from position `held` on."""

    xid: Name
    grant: Count
    pages: Pages
    digest_seed: Count = 0


class Data(_Message, frozen=True, kw_only=True):
    """P -> D: pages [first, first + len(digests) / 8) of the grant. Bytes are the frame's payload, or lie in shm."""

    xid: Name
    grant: Count
    chunk: Count
    """0, 1, 2... per grant; a repeated one is dropped."""
    first: Count
    digests: Annotated[bytes, msgspec.Meta(max_length=1 << 19)]
    """One little-endian u64 per page: xxh3-64 (seeded with digest_seed) of its bytes."""
    byte_count: Count
    shm_name: Name = ""
    """shm: segment that holds the bytes..."""
    shm_offset: Count = 0
    """...from here on."""


class DataOk(_Message, frozen=True, kw_only=True):
    """D -> P: chunk taken (or dropped): its staging bytes may be reused."""

    xid: Name
    grant: Count
    chunk: Count


class Done(_Message, frozen=True, kw_only=True):
    """P -> D: all pages were sent; the first token."""

    xid: Name
    grant: Count
    token: Count
    logprobs: TokenLp | None = None
    chunk_count: Count
    page_count: Count
    byte_count: Count
    cached_tokens: Tiers = {}
    """Of the transferred part, what prefill itself found cached."""
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0


class DoneOk(_Message, frozen=True, kw_only=True):
    """D -> P: landed, verified and committed; drop the transfer hold."""

    xid: Name
    grant: Count


class Fail(_Message, frozen=True, kw_only=True):
    """Both ways, always sent on any local end: the other side ends too."""

    xid: Name
    code: Name
    """aborted | deadline | rejected | error | peer_gone | digest | shutdown"""
    reason: Text = ""


Message = (
    Ready
    | Generate
    | Abort
    | Tokens
    | EngineCall
    | EngineReply
    | Shutdown
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
)
"""What a frame can carry."""
