"""The prefill engine's part in handoffs: computes prompts for decode engines and lets their pages be read.

A prefill engine is a full engine too: requests of its own front are served here from end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from serinus.core.errors import CapacityError, RequestError, TooLate
from serinus.core.handoff import HandoffFinding, PageTrace
from serinus.core.log import get_logger
from serinus.core.metrics import Metrics
from serinus.core.request import Request, TokenDelta
from serinus.engine.roles import PortRole
from serinus.engine.spans import NO_SPANS, SpanLog
from serinus.pd import (
    AbortPrefill,
    AddPrefill,
    Drain,
    EndPrefill,
    ForgetPrefill,
    HandoffPort,
    PeerChanged,
    PrefillDrained,
    PrefillResult,
    PrefillSide,
    ReclaimParked,
    ReleaseChunk,
    StopPrefill,
)
from serinus.sched import ChunkReady, HandoffSpec, Scheduler
from serinus.wire import Gone, PeerMessage

_log = get_logger("engine")


class PrefillRole(PortRole):
    """Handoffs (roles.py) of a prefill engine."""

    def __init__(
        self, *, scheduler: Scheduler, port: HandoffPort[PrefillSide], metrics: Metrics,
        trace: Callable[[Sequence[PageTrace]], None], heard: Callable[[HandoffFinding], None] | None = None,
        spans: SpanLog = NO_SPANS,
    ) -> None:  # fmt: skip
        """`trace`: notes which pages were sent where (PrefixCache.trace); `heard`: takes what canaries of decode
        engines found (CanaryLead.heard); `spans`: records what is traced."""
        self._trace, self._heard, self._spans = trace, heard, spans
        super().__init__(port)
        self._scheduler = scheduler
        self._metrics = metrics
        self._asked: dict[str, AddPrefill] = {}
        """Prompts of decode engines under way here, by xid."""
        self._stuck_turns = 0

    def admit(self, request: Request, now: float) -> None:
        self._scheduler.add(request)

    def turn(self, now: float, messages: Sequence[PeerMessage | Gone], turns: int) -> list[TokenDelta]:
        running, waiting = self._scheduler.running_count, self._scheduler.waiting_count
        is_stuck = waiting and not running and not self.is_staging  # a turn that ends so has planned nothing
        self._stuck_turns = self._stuck_turns + 1 if is_stuck else 0
        if self._stuck_turns > 1:  # a request that came during the last turn has been tried by now
            self._handle(ReclaimParked(), now)
        pace, load = self._scheduler.prefill_pace(), running + waiting
        out = self.port.turn(now, messages, load=load, turn=turns, queue_s=pace.queue_s, token_s=pace.token_s)
        self._act(out, now)
        return []

    def computed(self, chunks: Sequence[ChunkReady], now: float) -> None:
        for chunk in chunks:
            self._trace(self._traces(chunk))
            self._handle(chunk, now)
        self._act(self.port.settle(now), now)

    def _traces(self, chunk: ChunkReady) -> list[PageTrace]:
        """Pages on their way to a decode engine."""
        asked = self._asked.get(chunk.xid)
        client = None if asked is None else self.port.machine.client(asked.peer)
        if asked is None or client is None:
            return []
        return [
            PageTrace(arrived=False, engine=client.engine, peer=client.peer, xid=chunk.xid, rid=asked.rid, span=span)
            for span in chunk.spans
        ]

    @property
    def is_staging(self) -> bool:
        return self.port.is_staging

    def aborted(self, rid: str, now: float, *, code: str = "aborted", reason: str = "") -> None:
        if rid in self._asked:
            event = EndPrefill(xid=rid, code=code, reason=reason or "aborted by an operator")
            self._handle(event, now)

    def can_ask_again(self, rid: str) -> bool:
        return False

    def asked_by_peers(self) -> list[str]:
        return list(self._asked)

    def peers(self) -> list[dict[str, Any]]:
        return [
            {"address": "", "engine": client.engine, "state": "up", "backend": client.backend}
            for client in self.port.machine.clients
        ]

    def refresh(self, metrics: Metrics) -> None:
        metrics.set("num_prefill_bootstrap_queue_reqs", self.port.machine.ungranted_count)
        metrics.set("kv_transfer_parked_tokens", self.port.machine.parked_tokens)
        self._rejects.refresh(metrics, self.port.machine.rejects)

    def drain(self, now: float) -> None:
        self._handle(Drain(), now)

    # ---- what the machines ask for ------------------------------------------------------------------------------

    def _act(self, results: Sequence[PrefillResult], now: float) -> None:
        for result in results:
            match result:
                case AddPrefill():
                    self._add(result, now)
                case ReleaseChunk():
                    self._scheduler.chunk_drained(result.xid, result.spans)
                case PrefillDrained():
                    self._drained(result)
                case StopPrefill():
                    self._scheduler.abort(result.xid, result.reason)
                case ForgetPrefill():
                    self._asked.pop(result.xid, None)
                    self._scheduler.handoff_ended(result.xid)
                    self._spans.failed(result.xid, "gave its pages up before a grant came")
                    self._metrics.add("kv_transfer_forgotten")
                case AbortPrefill():
                    self._ended(result, now)
                case HandoffFinding() if self._heard is not None:
                    self._heard(result)
                case PeerChanged():
                    _log.info(
                        "decode engine %s is %s%s",
                        result.engine or result.peer, result.state, f": {result.reason}" * bool(result.reason),
                    )  # fmt: skip

    def _add(self, result: AddPrefill, now: float) -> None:
        self._asked[result.xid] = result
        self._spans.begin(result.request)
        try:
            self._scheduler.add(result.request, handoff=HandoffSpec(xid=result.xid, held=result.held, rid=result.rid))
        except (RequestError, CapacityError) as error:
            code = "timeout" if isinstance(error, TooLate) else "rejected"
            event = EndPrefill(xid=result.xid, code=code, reason=str(error))
            self._handle(event, now)

    def _drained(self, result: PrefillDrained) -> None:
        self._asked.pop(result.xid, None)
        self._scheduler.handoff_drained(result.xid)
        self._metrics.add("kv_transfer_pages", result.page_count, "sent")
        self._metrics.add("kv_transfer_bytes", result.byte_count, "sent")
        self._metrics.observe("kv_transfer_grant_wait_seconds", result.grant_wait_seconds)
        self._spans.sent(
            result.xid, result.page_count, result.byte_count,
            grant_s=result.grant_wait_seconds, pieces_s=result.seconds,
        )  # fmt: skip

    def _ended(self, result: AbortPrefill, now: float) -> None:
        self._asked.pop(result.xid, None)
        self._scheduler.handoff_ended(result.xid)
        self._spans.failed(result.xid, f"{result.code}: {result.reason}")
        if result.code == "kept":  # decode took the prompt back: no failure
            return
        name = "num_transfer_failed_reqs" if result.had_grant else "num_bootstrap_failed_reqs"
        self._metrics.add(name, 1, result.code)
        if self._rarely.says(result.code, now):
            _log.warning(
                "handoff %s of request %s ended (%s): %s", result.xid, result.rid, result.code, result.reason,
                extra={"rid": result.rid, "xid": result.xid, "code": result.code},
            )  # fmt: skip
