"""One request as the scheduler sees it: its tokens, its place, how far it is. Decides nothing.

Positions: `known` tokens are decided (prompt + generated), the first `planned` of them were handed out to plans, the KV
of the first `computed` is written (their plans are committed), that of the first `verified` is sound, that of the first
`published` lies in the tree. Always published <= verified <= computed <= planned <= known. What is planned and not
computed is under way.

The first `right` tokens are known to be right, whatever becomes of the KV; the first `left` have been given out. A heal
forgets what is not known to be right: tokens given out stay in the buffer behind `known`, to be compared with.

Verified means: a canary has found the KV of these positions sound after it was last read to compute one of them. So the
tokens up to and including position `verified` are right; what lies beyond may have been computed on wrong bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from operator import itemgetter
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from serinus.cache import Lease, LoadPlan
from serinus.core.errors import InvariantError
from serinus.core.handoff import HandoffSpec
from serinus.core.history import TokenHistory
from serinus.core.parts import OwnPages, PageSpan, Part
from serinus.core.plan import SampleSpec, SeqResult, SeqWork
from serinus.core.request import KvIntegrity, Request, TokenLogprobs, Usage
from serinus.core.stamps import ChainHashes
from serinus.sched.page_row import PageRow
from serinus.sched.receipt import Checked, receipt
from serinus.sched.token_chain import TokenChain

_GROWTH = 256
"""Tokens by which a buffer grows at least."""


class Phase(Enum):
    """Where a request is; it is in exactly the queue of its phase."""

    WAITING = auto()
    """Wants pages here; owns nothing."""
    PREFILL = auto()
    """Has a row and pages for all its known tokens; some of them are not computed yet."""
    DECODE = auto()
    """One token to compute a step."""
    PREALLOC = auto()
    """Will be prefilled elsewhere; waits for pages here. Owns nothing."""
    TRANSFER = auto()
    """Pages of its prompt are granted to a prefill engine; no row yet."""
    INFLIGHT = auto()
    """Prefilled for a decode engine; its pages are being read. No row any more."""
    ENDED = auto()
    """Owns nothing, is in no queue."""


NEXT_PHASES: Mapping[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILL, Phase.INFLIGHT, Phase.ENDED}),
    Phase.PREFILL: frozenset({Phase.DECODE, Phase.WAITING, Phase.INFLIGHT, Phase.ENDED}),
    Phase.DECODE: frozenset({Phase.WAITING, Phase.PREALLOC, Phase.ENDED}),
    Phase.PREALLOC: frozenset({Phase.TRANSFER, Phase.WAITING, Phase.ENDED}),
    Phase.TRANSFER: frozenset({Phase.DECODE, Phase.PREFILL, Phase.PREALLOC, Phase.WAITING, Phase.ENDED}),
    Phase.INFLIGHT: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
"""The legal changes. A retracted or recomputed request goes back to WAITING, one whose prompt is
asked for again to PREALLOC; one that ends while chunks of it are still
being read goes to INFLIGHT; nothing leaves ENDED."""


class Healing(Enum):
    """What heals a request that read wrong KV."""

    NOTHING = auto()
    """It is gone, about to end, has gone back already, or owns no KV."""
    RUNNING = auto()
    """It goes back and is computed again."""
    TRANSFER = auto()
    """Its handoff ends, and it is computed here."""
    PEER = auto()
    """It is computed for a decode engine, which computes it again itself."""


@dataclass(slots=True, kw_only=True, eq=False)
class ReqState:
    """Mutable; owned by one Scheduler."""

    request: Request
    page_size: int
    """Tokens of a page."""
    windows: Mapping[Part, int | None]
    """The parts of the cache, FULL first, with their windows; None = the part covers the whole sequence."""
    seq: int
    """Its place in the order of service: lower = older or, under the policy `priority`, more important first. Survives
    retraction, so the first always gets on."""
    deadline: float = math.inf
    """Clock at which it ends, whatever it has."""
    limit: int
    """Known tokens at which it ends with LENGTH: max_new_tokens, the context or the whole pool."""
    stop_ids: tuple[int, ...]
    """Ids that end it."""
    handoff: HandoffSpec | None = None
    """Prefill side: the handoff that the prompt is computed for."""
    remote: bool = False
    """Decode side: the prompt is wanted from a prefill engine."""
    chain_hashes: ChainHashes | None = None
    """Makes the hashes of `chain_at`; None = no canary asks for them."""

    phase: Phase = Phase.WAITING
    aborting: bool = False
    """Ended while steps with it were under way; it leaves at the commit of the last of them."""
    untrusted: bool = False
    """Its KV is not to be trusted: none of it is published when it ends."""
    row: int = 0
    """Row of req_to_token while running, else 0."""
    lease: Lease | None = None
    """Pins the part of its pages that lies in the tree, while it has pages."""
    rows: tuple[PageRow, ...] = field(init=False)
    """Its pages, of each part; of one with a window as far back as that reaches."""
    full: PageRow = field(init=False)
    """The first of them, FULL: all pages from position 0 on."""
    windowed: tuple[PageRow, ...] = field(init=False)
    """Those of parts with a window."""
    tokens: NDArray[np.int32] = field(init=False)
    """Buffer; the first `known` are meant."""
    known: int = field(init=False)
    planned: int = 0
    computed: int = 0
    sure: bool = False
    """Every load that its pages came by has ended well: a chunk of it was committed since, or its pages are granted."""
    verified: int = 0
    """How far a canary vouches for its KV; without one as far as it is computed."""
    vouched: int = 0
    """Its KV as far as it was verified by itself, beside any step."""
    is_fresh: bool = False
    """It was admitted, and no plan has had work for it yet."""
    is_new: bool = False
    """Its KV came from elsewhere, and no step has read it yet: the next one verifies all of it."""
    published: int = 0
    ahead: SeqWork | None = None
    """Its work in the next plan, where that was made before the result of the latest one, and it has kept its pages.
    It is under way when that plan comes, not before."""
    load: LoadPlan | None = None
    """What the host could add to its match, until that is loaded or let go."""
    found: dict[str, int] = field(default_factory=dict)
    """Tokens of its match, by the tier they came from."""
    awaited: frozenset[int] = frozenset()
    """Decode side: loads that must end well before its pages are granted."""
    granted: bool = False
    """Decode side: a prefill engine may know its pages."""
    prefetching: bool = False
    """The storage is asked for its prefix, or is to be, and admission has not looked at the result."""
    unasked: bool = False
    """The storage is to be asked for its prefix when there is room for that."""
    prefetched: bool = False
    """The storage was asked for its prefix..."""
    asked_at: float = 0.0
    """...and when it was: since then it may wait for that."""
    coming: int = 0
    """While it waits: tokens of its prefix that requests under way were about to publish when Admission.has_twin looked
    last; fewer than a page are none."""
    cold: bool = False
    """It must run without a cached prefix: with one there was no room even when no other request ran."""
    asked_again: bool = False
    """Decode side: what a prefill engine sent was or became wrong, and it was asked for that once more."""
    held: int = 0
    """Decode side: prompt tokens found in the own cache when the pages were reserved."""

    chain: TokenChain | None = field(init=False)
    stop_set: frozenset[int] = field(init=False)
    min_new: int = field(init=False)
    prompt_len: int = field(init=False)
    head: bytes = field(init=False)
    """Its prompt tokens up to the first page border: two prompts with different ones share no page."""
    plain: bool = field(init=False)
    """Its next token can be chosen before the one before it is on the host."""
    history: TokenHistory | None = field(init=False)
    """Its tokens as penalties look at them, where it has any: made once, however often it runs again."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Collected so far, where asked for: those of the first len() prompt tokens."""
    states_sum: NDArray[np.float32] | None = None
    """While it `pools`: the sum of the hidden states of its prompt so far; None = the model gives out none."""
    turn: int = 0
    """Number of its last turn to decode, counted over all requests; only where several plans can be under way."""
    skips: int = 0
    """Times lpm let others pass it."""
    twin: ReqState | None = None
    """The request that it was found to wait for (Admission.has_twin)..."""
    twin_published: int = 0
    """...and what that one had published by then."""
    retracted: bool = False
    """Gave its pages back at least once since it last ran."""

    turn_size: int = 0
    """As SchedSettings has it, but a page where that says 0."""
    verify_steps: int = 0
    """As SchedSettings has it."""
    verify_windows: Mapping[Part, int | None] = field(default_factory=dict)
    """The parts that a canary verifies, with their windows."""
    confirmed: bool = False
    """Its tokens are given out when they are known to be right, not before."""
    right: int = field(init=False)
    """Tokens known to be right when it last gave its pages back: the prompt at least."""
    settled: tuple[int, Mapping[str, int], int] = (0, MappingProxyType({}), 0)
    """How far its KV was vouched for when it gave pages back, where that was farthest, with `found` and `landed`."""
    left: int = field(init=False)
    """Tokens given out, the prompt's included; more than `known` while it is computed again."""
    kept: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of tokens behind `left`, where asked for."""
    heals: list[str] = field(default_factory=list)
    """Why it was computed again, each time that its KV was found wrong."""
    healed_at: int = -1
    """Tokens known to be right at its last heal; -1 = there was none."""
    alone: bool = False
    """What it was healed from was wrong too: it reads KV of its own alone, and publishes it when it gives it back."""
    checked: Checked = field(default_factory=Checked)
    """What a canary verified for it."""
    landed: int = 0
    """Tokens of its KV that a handoff brought; 0 once it has been computed again."""
    lost: int = 0
    """Tokens whose KV it gave up at the last heal, until it runs again."""

    retractions: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens found in a cache when it was first admitted, by tier; without those that decode holds already."""
    local_reason: str = ""
    prefill_engine: str = ""
    handoff_backend: str = ""
    handoff_bytes: int = 0
    handoff_seconds: float = 0.0
    handoff_tokens: int = 0
    handoff_pages: int = 0
    started: float | None = None
    """Clock at the first step (or grant) that worked for it."""
    first_token: float | None = None
    """Clock at its first token."""
    sent_pages: int = 0
    """Prefill side: pages of the prompt already announced as chunks (those the peer holds included)."""
    holds: list[tuple[PageSpan, ...]] = field(default_factory=list)
    """Prefill side: pages of chunks that are still being read."""

    def __post_init__(self) -> None:
        prompt = self.request.prompt
        self.prompt_len = self.known = self.right = self.left = len(prompt)
        self.tokens = np.empty(self.known + _GROWTH, np.int32)
        self.tokens[: self.known] = prompt
        self.head = self.tokens[: min(self.page_size, self.known)].tobytes()
        self._begin_rows()
        self.chain = None if self.chain_hashes is None else TokenChain(self.chain_hashes)
        self.stop_set = frozenset(self.stop_ids)
        self.min_new = self.request.sampling.min_new_tokens
        sampling = self.request.sampling
        self.plain = not sampling.looks_back and sampling.logprobs is None
        self.history = TokenHistory(prompt) if sampling.penalised else None
        if self.request.sampling.prompt_logprobs is not None and self.handoff is None:
            self.prompt_logprobs = [TokenLogprobs(logprob=None)]

    def _begin_rows(self) -> None:
        size = self.page_size
        rows = [PageRow(part, size, windowed=window is not None) for part, window in self.windows.items()]
        self.rows, self.full = tuple(rows), rows[0]
        self.windowed = tuple(row for row in rows if row.windowed)

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def next_window_end(self) -> int:
        """The page index up to which one more page takes those of its windowed parts that reach least far."""
        return 1 + min((row.end for row in self.windowed), default=0)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return self.known - self.prompt_len

    @property
    def running(self) -> bool:
        """Whether the request has a row."""
        return self.phase is Phase.PREFILL or self.phase is Phase.DECODE

    @property
    def under_way(self) -> bool:
        """Whether it is in a plan that is not committed: it keeps row and pages until then."""
        return self.planned > self.computed

    @property
    def wants_chunk(self) -> bool:
        """While it prefills: whether some of its prompt is in no plan yet."""
        return self.planned < self.known and not self.aborting

    @property
    def pools(self) -> bool:
        """Whether hidden states of its prompt are pooled: its first token, which they are given out with, is not
        chosen."""
        return self.request.sampling.pooling != "last" and self.known == self.prompt_len

    @property
    def computes_ahead(self) -> bool:
        """Whether chunks of it may be queued before their plan is made: nothing is wanted of each of their tokens, the
        token behind them can be chosen then, and no peer waits for pages of the chunk before, which would be read
        behind them."""
        return self.plain and self.prompt_logprobs is None and not self.pools and self.handoff is None

    def pooled_of(self, start: int, end: int) -> int:
        """Of a chunk, how many positions are pooled, from its first."""
        if not self.pools:
            return 0
        return end - start if self.request.sampling.pooling == "mean" else int(start == 0)

    def take_pooled(self, work: SeqWork, seq: SeqResult) -> None:
        """A chunk of it was computed, in order; behind the last one the pooled state is that of its token."""
        if work.pooled:
            found = np.frombuffer(seq.pooled, "<f4")
            before = None if work.start == 0 else self.states_sum
            self.states_sum = None if not len(found) else found if before is None else before + found
        if self.pools and seq.logprobs is not None and self.states_sum is not None:
            count = self.prompt_len if self.request.sampling.pooling == "mean" else 1
            seq.logprobs = replace(seq.logprobs, hidden=(self.states_sum / np.float32(count)).tobytes())
            self.states_sum = None

    def move(self, phase: Phase) -> None:
        """Change phase; raises InvariantError where that is no legal change."""
        if phase not in NEXT_PHASES[self.phase]:
            raise InvariantError(
                f"sched: request {self.rid} goes from {self.phase.name} to {phase.name},"
                f" expected one of {sorted(p.name for p in NEXT_PHASES[self.phase])}"
            )
        self.phase = phase

    def go_on_from(self, length: int) -> None:
        """The KV of its first `length` tokens was found cached."""
        self.planned = self.computed = self.verified = self.published = length
        self.vouched, self.sure = 0, False

    def step_done(self, work: SeqWork, slots: int) -> None:
        """A step of it has ended, and no canary found anything wrong with it in that step. `slots`: those verified.

        By now every slot that the step with start - verify_steps + 1 read has had its turn since that step read it.
        """
        verify_steps = self.verify_steps
        self.computed = work.start + len(work.tokens)
        self.checked.found += slots
        complete = work.whole or verify_steps <= 1
        if complete:
            self.verified = self.computed
        else:
            self.verified = max(self.verified, work.start - verify_steps + 1, min(self.vouched, self.computed))
        if work.whole and verify_steps:
            self.checked.close(work.start, self.turn_size, verify_steps, self.verify_windows)
            self.checked.whole(work.start, self.computed, self.verify_windows)

    def vouch(self, count: int, slots: int) -> None:
        """A canary found the KV of its first `count` tokens sound, as far as it has pages of them, beside any step; it
        verified so many slots."""
        self.vouched = count
        self.verified = max(self.verified, min(count, self.computed))
        self.rows_checked(count, slots)

    def rows_checked(self, count: int, slots: int) -> None:
        """Its first `count` tokens were due, as far as it has pages of them, beside any step; so many slots of them
        were verified. In each part the last slot counts twice: it is held against the request's own hash."""
        read = [count - row.first * self.page_size for row in self.rows if row.part in self.verify_windows]
        self.checked.slots += sum(due + 1 for due in read if due > 0)
        self.checked.found += slots

    def reserve(self) -> None:
        """Have room for one more token: views of the buffer beyond `known` stay what they are when it comes."""
        known = self.known
        if known == len(self.tokens):
            grown = np.empty(known + max(_GROWTH, known // 2), np.int32)
            grown[:known] = self.tokens
            self.tokens = grown

    def append(self, token: int) -> None:
        """One more known token."""
        self.reserve()
        known = self.known
        if self.chain is not None and known < self.chain.count:  # it went back, and goes on otherwise
            self.chain.cut(known)
        self.tokens[known] = token
        self.known = known + 1
        if self.history is not None:
            self.history.add(token)

    def settle_right(self) -> None:
        """Its pages go: note which of its tokens are known to be right, and what a receipt says of their KV."""
        self.right = max(self.right, min(self.known, self.verified + 1))
        self.settled = self._farthest()

    def contradicts(self, token: int) -> bool:
        """Whether this is its next token, and another one was given out before a heal."""
        return self.known < self.left and int(self.tokens[self.known]) != token

    def rewind(self) -> None:
        """Forget the tokens that are not known to be right; to be called while it has its pages. Cost: with penalties
        one pass over its tokens."""
        self.settle_right()
        del self.kept[max(0, self.right - self.left) :]
        if self.right == self.known:
            return
        self.known = self.right
        if self.history is not None:
            self.history = TokenHistory(self.request.prompt)
            for token in self.tokens[self.prompt_len : self.known].tolist():
                self.history.add(token)

    @property
    def sendable(self) -> int:
        """Tokens that may have been given out by now."""
        return max(self.right, min(self.known, self.verified + 1)) if self.confirmed else self.known

    def chain_at(self, count: int) -> int:
        """Chain hash (core.stamps) of its first `count` known tokens, int64; 0 where no canary asks. Cost: of
        TokenChain."""
        return 0 if self.chain is None else self.chain.at(self.tokens, count)

    def repaired(self) -> int:
        """It runs again after a heal: note where the KV that it gave up comes from. Returns how many tokens are
        computed again; 0 where there was no heal since it ran last."""
        if not self.lost:
            return 0
        again = max(0, min(self.lost, self.known) - self.computed)
        self.checked.repaired.update({**self.found, "peer": self.landed, "computed": again})
        self.lost = 0
        return again

    def drop_pages(self) -> None:
        """Forget pages, row and lease: they were given back. Its arrays begin anew, as plans under way may still name
        the old ones."""
        self.checked.close(self.computed, self.turn_size, self.verify_steps, self.verify_windows)
        self.landed = 0
        self.lease = self.load = self.ahead = None
        self.row = 0
        self.go_on_from(0)
        self._begin_rows()
        self.found = {}
        self.awaited, self.granted = frozenset(), False

    def own_pages(self, count: int) -> OwnPages:
        """The first `count` of its tokens, and the pages that it has now for their KV."""
        spans = [row.span() for row in self.rows]
        copies = (PageSpan(part=span.part, first=span.first, pages=span.pages.copy()) for span in spans)
        return OwnPages(tokens=self.tokens[:count], spans=tuple(copies), row=self.row)

    def sample_spec(self, known: int) -> SampleSpec:
        """How to choose the token behind the first `known`."""
        return SampleSpec(
            params=self.request.sampling,
            seed=self.request.seed,
            position=known,
            generated=known - self.prompt_len,
            stop_ids=self.stop_ids,
            history=self.history,
            output=self.tokens[self.prompt_len : known] if self.request.sampling.grammar is not None else None,
        )

    def usage(self, *, ends: bool = False, kept: int | None = None) -> Usage:
        """What it cost so far; where it `ends`, with the receipt of its KV. `kept`: tokens of the answer that count;
        None = all."""
        arrival = self.request.arrival
        return Usage(
            prompt_tokens=self.prompt_len,
            completion_tokens=self.known - self.prompt_len,
            cached_tokens=dict(self.cached_tokens),
            prefill_engine=self.prefill_engine,
            handoff_tokens=self.handoff_tokens,
            handoff_pages=self.handoff_pages,
            handoff_backend=self.handoff_backend,
            handoff_bytes=self.handoff_bytes,
            handoff_seconds=self.handoff_seconds,
            local_reason=self.local_reason,
            retractions=self.retractions,
            queue_seconds=0.0 if self.started is None else self.started - arrival,
            first_token_seconds=0.0 if self.first_token is None else self.first_token - arrival,
            kv_integrity=self._receipt(kept) if ends and self.verify_steps else None,
        )

    def _farthest(self) -> tuple[int, Mapping[str, int], int]:
        """What `settled` is to be by now."""
        return max((self.verified, self.found, self.landed), self.settled, key=itemgetter(0))

    def _receipt(self, kept: int | None) -> KvIntegrity:
        tokens = self.known if kept is None else min(self.known, self.prompt_len + kept)
        horizon, found, landed = self._farthest()
        slots = self.checked.close(self.computed, self.turn_size, self.verify_steps, self.verify_windows)
        return receipt(
            self.checked, slots, stride=self.verify_steps, horizon=min(horizon, tokens), sources=found, peer=landed,
            heals=self.heals, chain=self.chain_at(tokens),
        )  # fmt: skip
