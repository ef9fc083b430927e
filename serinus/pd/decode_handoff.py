"""One handoff of a decode engine: what was asked for, how far it is, and the messages that ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from serinus.core.handoff import PageTrace, beyond
from serinus.core.parts import PageSpan
from serinus.core.request import Request
from serinus.pd.actions import Landed, Recompute
from serinus.pd.arrival_account import ArrivalAccount
from serinus.pd.modes import Mode
from serinus.wire.messages import Done, Grant, Prepare

_TIERS: Final = frozenset({"device", "host", "storage"})
_LEFT_S_MIN: Final = 1e-3
"""Of a timeout; 0 would say that there is none."""


@dataclass(slots=True, kw_only=True)
class DecodeHandoff:
    """One handoff as its decode engine sees it."""

    xid: str
    rid: str
    request: Request
    address: str
    grant: int
    seed: int
    begun: float
    """When it was asked for."""
    started: float = 0.0
    """When its pages were there; until then when it was asked for. Its deadline counts from here."""
    held: int = 0
    told: int = 0
    """What PREPARE said of it: less, where it went out before there were pages."""
    spans: tuple[PageSpan, ...] = ()
    """Empty = no pages yet."""
    peer: str = ""
    """Name of the connection it was asked over; empty = the peer is not greeted yet."""
    asked_at: float = 0.0
    mode: Mode = Mode.RECEIVER_CHECKED
    account: ArrivalAccount | None = None
    """The account, from the grant on."""
    copying: int = 0
    """Data messages that ranks have not taken in yet."""
    copy_seconds: float = 0.0
    first_data_at: float = 0.0
    last_data_at: float = 0.0
    done: Done | None = None
    confirming_since: float | None = None
    """Pull: CONFIRM is on its way."""

    def prepare(self, deadline_s: float, now: float) -> Prepare:
        """The message that asks for the prompt to be computed, with what is left of its timeout; where the grant is
        open, as GRANT too."""
        request, self.told = self.request, self.held
        if request.timeout_s:
            request = replace(request, timeout_s=max(_LEFT_S_MIN, request.arrival + request.timeout_s - now))
        return Prepare(
            xid=self.xid, grant=self.grant, request=request, held=self.held, deadline_s=deadline_s,
            spans=self._granted, digest_seed=self.seed if self._granted else 0,
        )  # fmt: skip

    def permission(self) -> Grant:
        """The permission to fill our pages."""
        return Grant(xid=self.xid, grant=self.grant, spans=self._granted, digest_seed=self.seed)

    @property
    def _granted(self) -> tuple[PageSpan, ...]:
        return () if self.account is None else tuple(self.account.spans.values())

    def recompute(self, code: str, reason: str) -> Recompute:
        """The result for the engine: it failed."""
        return Recompute(rid=self.rid, xid=self.xid, code=code, reason=reason, had_grant=self.account is not None)

    def landed(self, done: Done, account: ArrivalAccount, engine: str, backend: str, now: float) -> Landed:
        """The result for the engine: all pages are here, from `engine` by `backend`."""
        since = self.confirming_since
        return Landed(
            rid=self.rid,
            xid=self.xid,
            token=done.token,
            ends=done.ends,
            logprobs=done.logprobs,
            page_count=sum(len(span.pages) for span in account.spans.values()),
            byte_count=account.byte_count,
            seconds=now - self.first_data_at,
            verify_seconds=now - self.last_data_at,
            copy_seconds=self.copy_seconds,
            wait_seconds=self.first_data_at - self.started,
            connect_seconds=max(0.0, self.asked_at - self.begun),
            confirm_seconds=now - since if since is not None else 0.0,
            engine=engine,
            backend=backend,
            cached_tokens=self._cached_there(done, account.source.page_size),
            queue_seconds=done.queue_seconds,
            compute_seconds=done.compute_seconds,
            traces=tuple(
                PageTrace(
                    arrived=True,
                    engine=engine,
                    peer=self.peer,
                    xid=self.xid,
                    rid=self.rid,
                    span=span,
                    pieces=tuple(account.pieces.get(part, ())),
                )
                for part, span in account.spans.items()
            ),
        )

    def _cached_there(self, done: Done, page_size: int) -> dict[str, int]:
        """What the peer found cached of the tokens that are not held here. It counts those behind what PREPARE said of
        these, as far as they are whole pages of its own."""
        found = _believable(done.cached_tokens, len(self.request.prompt))
        return beyond(found, self.held - self.told // page_size * page_size)


def _believable(cached_tokens: Mapping[str, int], prompt_tokens: int) -> dict[str, int]:
    """What a peer says it found cached, as far as it can be: names become labels, values go into the usage."""
    return {tier: count for tier, count in cached_tokens.items() if tier in _TIERS and 0 <= count <= prompt_tokens}
