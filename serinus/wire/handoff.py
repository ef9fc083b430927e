"""Messages between a decode and a prefill engine (docs/HANDOFF.md tells the protocol)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serinus.core.bounds import Count, Name, Seconds, Text, Tiers, TopIds
from serinus.core.parts import PageSpan
from serinus.core.request import Request, TokenLogprobs
from serinus.wire.fields import Blobs, Mac, MessageBase, Names, Pages, PartBase


class LayoutSignature(PartBase, frozen=True, kw_only=True):
    """What shapes KV bytes. What must be equal between two engines and what may differ: pd/layout.py."""

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
    layer_parts: Annotated[bytes, msgspec.Meta(max_length=4096)] = b""
    """Part (core.parts) of each layer; empty = all FULL."""
    window: Count = 0
    """Positions that a layer of part SWA sees; 0 = there is none."""
    stamp_bytes: Count = 0
    """Per token and part, behind the KV of a page: what the canary keeps with it."""
    stamp_data: Name = ""
    """Which KV bytes these stamps digest: none, partial, all; empty where there are no stamps."""
    stage_layers: TopIds = ()
    """Layers of each pipeline stage; empty = as even as possible, the first stages get one more."""


class Hello(MessageBase, frozen=True, kw_only=True):
    """D -> P, first on every link (and again after a reconnect, or with a MAC after HelloAgain)."""

    engine: Name
    role: Name
    layout: LayoutSignature
    backends: Names
    """Data backends this side can receive with, best first: local, shm, tcp..."""
    host: Name = ""
    """Identity of the machine (boot id): shm needs the same one."""
    endpoints: Annotated[dict[Name, Blobs], msgspec.Meta(max_length=16)] = msgspec.field(default_factory=dict)
    """What one-sided backends need to reach our memory: per backend, one text of its own per rank."""
    address: Name = ""
    """Where it connected to: a decode engine may know one prefill engine by several."""
    nonce: Mac = b""
    """Fresh random bytes, which the other side's MAC must cover."""
    mac: Mac = b""
    """Over this message and the other side's nonce (pd/secret.py)."""
    step_s_max: Seconds = 0.0
    """As in Keepalive: the longest silence of the sender, computing."""


class HelloOk(MessageBase, frozen=True, kw_only=True):
    """P -> D: accepted; the chosen data backend, and the layout once more, for decode to check as well."""

    engine: Name
    role: Name
    backend: Name
    mode: Name = "receiver_checked"
    """How that backend keeps pages safe (pd/modes.py); decode must think the same."""
    layout: LayoutSignature
    endpoints: Blobs = ()
    """Of the chosen backend: one per rank."""
    hold: Name = ""
    """Pull: where decode reads whether prefill still holds what it offered over this connection; empty = it asks, with
    CONFIRM."""
    mac: Mac = b""
    step_s_max: Seconds = 0.0
    """As in Keepalive: the longest silence of the sender, computing."""


class HelloNo(MessageBase, frozen=True, kw_only=True):
    """P -> D: refused, and why in words."""

    reason: Text


class Keepalive(MessageBase, frozen=True, kw_only=True):
    """Both ways, also when idle."""

    grant_floor: Count = 0
    """D -> P: lowest grant still alive (open or in quarantine); below it nothing is owed any more."""
    load: Count = 0
    """Requests running or waiting."""
    turn: Count = 0
    """Scheduler turns: a hung scheduler is visible, not only a dead socket."""
    step_s_max: Seconds = 0.0
    """The longest that the sender was silent lately because it computed; 0 = it has no idea."""
    queue_s: Seconds = 0.0
    """P -> D: seconds until it would begin with a prompt that comes now..."""
    token_s: Seconds = 0.0
    """...and those of a prompt token; 0 = not measured yet."""


Spans = Annotated[tuple[PageSpan, ...], msgspec.Meta(max_length=8)]


class _OfGrant(MessageBase, frozen=True, kw_only=True):
    """What the two sides say of one grant of one handoff."""

    xid: Name
    grant: Count


class Grant(_OfGrant, frozen=True, kw_only=True):
    """D -> P: permission to fill these pages of decode."""

    spans: Spans
    """One per part that has bytes, each up to the end of the prompt, in decode's pages."""
    digest_seed: Count = 0


class Prepare(MessageBase, frozen=True, kw_only=True):
    """D -> P: compute this prompt; decode holds its first `held` tokens."""

    xid: Name
    grant: Count
    """Number of the grant that is to come: orders PREPARE, GRANT and ends of one handoff, however they arrive."""
    request: Request
    """As decode knows it, under decode's name for it; its timeout is what is left of it."""
    held: Count
    """Page-aligned (by decode's pages), at most prompt length - 1."""
    deadline_s: float = 300.0
    """Seconds from receipt after which prefill may end it with FAIL."""
    spans: Spans = ()
    """As in GRANT, where decode has pages for it already; else GRANT comes later."""
    digest_seed: Count = 0


class Data(_OfGrant, frozen=True, kw_only=True):
    """P -> D: pages from `first` on of one part, as one rank of P has them, as many as there are digests (where
    ranks read slices, some of each); where these come with DONE, as there are source pages.

    Receiver-checked: the bytes are the frame's payload, or lie in shm. Push: they lie in decode's pages already.
    Pull: they may be read from `pages` of that rank until the handoff ends; where ranks read slices of them alone, the
    payload is what each gets of their stamps, [rank that takes][page][bytes of stamps].
    """

    piece: Count
    """0, 1, 2... per handoff and rank."""
    rank: Count = 0
    """Of P: pp_rank * tp + tp_rank."""
    part: Count = 0
    first: Count
    """Index of the first page in the prompt, in P's pages."""
    digests: Annotated[bytes, msgspec.Meta(max_length=1 << 19)]
    """One little-endian u64 per page: xxh3-64 (seeded with digest_seed) of its bytes on that rank, or a sum that the
    backend makes; where ranks read slices, one for each rank that takes of it (Routes.digest_count). Pull: empty where
    they are made while decode reads, and come with DONE."""
    byte_count: Count
    shm_name: Name = ""
    """shm: name of the segment that holds the bytes."""
    shm_offset: Count = 0
    """Offset of the bytes in that segment."""
    pages: Pages = msgspec.field(default_factory=list)
    """Pull: page ids of that rank."""


class DataOk(_OfGrant, frozen=True, kw_only=True):
    """D -> P: piece taken (or dropped): its staging bytes may be reused."""

    piece: Count
    rank: Count = 0


class PieceDigests(PartBase, frozen=True, kw_only=True):
    """Digests of one Data message that came without."""

    piece: Count
    rank: Count = 0
    digests: Annotated[bytes, msgspec.Meta(max_length=1 << 19)]
    """Little-endian u64 of each page, as in Data."""


class Done(_OfGrant, frozen=True, kw_only=True):
    """P -> D: all pages were sent; the first token."""

    token: Count
    ends: bool = False
    """The answer is complete with it: its grammar says so."""
    logprobs: TokenLogprobs | None = None
    piece_count: Count
    """Data messages, over all ranks."""
    page_count: Count
    """Sum of their pages."""
    byte_count: Count
    digests: Annotated[tuple[PieceDigests, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Of every Data message without: what was read is compared with them before it lands."""
    cached_tokens: Tiers = msgspec.field(default_factory=dict)
    """Of the transferred part, what prefill itself found cached."""
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0


class DoneOk(_OfGrant, frozen=True, kw_only=True):
    """D -> P: landed, verified and committed; drop the transfer hold."""


class Fail(MessageBase, frozen=True, kw_only=True):
    """Both ways, sent whenever one side ends a handoff: the other side ends it too."""

    xid: Name
    grant: Count = 0
    """Number of its grant, where the sender knows it."""
    code: Name
    """aborted | deadline | rejected | error | peer_gone | digest | transfer | mismatch | expired | shutdown |
    kv_canary"""
    reason: Text = ""
    reading: bool = False
    """D -> P, pull: reads of the source pages are still under way; Drained follows when they are not."""


class HelloAgain(MessageBase, frozen=True, kw_only=True):
    """P -> D: this cluster has a secret; send Hello again with a MAC over this nonce."""

    nonce: Mac


class AbortGrant(MessageBase, frozen=True, kw_only=True):
    """D -> P, push: write nothing more for this grant, and answer when nothing is outstanding."""

    grant: Count
    floor: Count
    """As in Keepalive: what you remember of grants below it may go."""
    xid: Name = ""


class AbortAck(MessageBase, frozen=True, kw_only=True):
    """P -> D: these ranks have nothing outstanding for this grant and will begin nothing."""

    grant: Count
    ranks: TopIds


class Confirm(_OfGrant, frozen=True, kw_only=True):
    """D -> P, pull: everything is read; did the pages stay as they were until now?"""


class ConfirmOk(_OfGrant, frozen=True, kw_only=True):
    """P -> D: they did; they are released now."""


class Expired(_OfGrant, frozen=True, kw_only=True):
    """P -> D: they did not, or the handoff has ended; stop reading and send Drained."""


class Drained(_OfGrant, frozen=True, kw_only=True):
    """D -> P, pull: no read of this handoff is under way any more."""


class KvFound(MessageBase, frozen=True, kw_only=True):
    """Both ways: the canary of the sender found wrong KV on a page that this handoff moved, under way or long over."""

    xid: Name
    rid: Name
    """What the decode engine calls the request."""
    part: Count = 0
    position: Count = 0
    """Of the wrong slot in the prompt; of a recall, from where on KV is in doubt."""
    reason: Text
    """The violation in words."""
    recall: bool = False
    """The sender condemned it: the receiver does so too."""
    salt: Name = ""
    """Of a recall: the cache salt of the request..."""
    tokens: Annotated[bytes, msgspec.Meta(max_length=4 << 20)] = b""
    """...and its tokens from position 0 on, int32; empty: the handoff alone names it."""
    source: bool = False
    """Whether the sender computed these pages; else it took them."""
