"""The decode engine's part in handoffs: which prompts to send away, and what to do with what comes back.

Every request of the front is owned here from end to end; a prefill engine only ever helps. Whatever goes wrong there,
the prompt is computed here (or, where the operator wants it so, answered with an error).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from serinus.canary import ArrivalVerdict
from serinus.core.handoff import HandoffFinding, PageTrace
from serinus.core.log import get_logger
from serinus.core.metrics import Metrics
from serinus.core.parts import OwnPages
from serinus.core.request import FinishReason, Request, TokenDelta
from serinus.engine.roles import PortRole
from serinus.engine.spans import NO_SPANS, SpanLog
from serinus.pd import (
    CancelHandoff,
    DecodeResult,
    DecodeSide,
    HandoffPort,
    Landed,
    PeerChanged,
    PeerState,
    PrepareHandoff,
    Quarantine,
    QuarantineOver,
    Recompute,
    StartHandoff,
    WantPeer,
)
from serinus.sched import ChunkReady, PrefillPace, Scheduler
from serinus.wire import Gone, PeerMessage

_log = get_logger("engine")
_OWN_FAULTS = {"timeout": 504, "grammar": 400}
"""Statuses of requests that end at a prefill engine for their own sake, as they would here: no handoff failed."""


class DecodeRole(PortRole):
    """Handoffs (roles.py) of a decode engine."""

    is_staging = False

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        port: HandoffPort[DecodeSide],
        metrics: Metrics,
        now: float,
        addresses: Sequence[str],
        on_failure: str,
        optimistic: bool = False,
        trace: Callable[[Sequence[PageTrace]], None],
        arrived: Callable[[str, OwnPages | None], ArrivalVerdict] | None = None,
        heard: Callable[[HandoffFinding], None] | None = None,
        spans: SpanLog = NO_SPANS,
    ) -> None:
        """`addresses`: prefill engines to use for requests that name none; `on_failure`: recompute or error;
        `optimistic`: ask for a prompt before there are pages for it; `trace`: notes which pages came from where
        (PrefixCache.trace); `arrived`: the canary's check of pages that came
        (CanaryLead.arrived); `spans`: records what is traced."""
        super().__init__(port)
        self._scheduler = scheduler
        self._metrics = metrics
        self._addresses = tuple(addresses)
        self._fails = on_failure == "error"
        self._optimistic = optimistic
        self._trace, self._arrived, self._heard = trace, arrived, heard
        self._spans = spans
        self._deltas: list[TokenDelta] = []
        for address in self._addresses:
            self._handle(WantPeer(address=address), now)

    def admit(self, request: Request, now: float) -> None:
        address = request.prefill_address or self.port.machine.least_loaded()
        if not address:
            self._scheduler.add(request, local_reason="no_prefill_engine")
            self._metrics.add("num_local_prompts", 1, "no_prefill_engine")
            return
        request = replace(request, prefill_address=address)
        self._scheduler.add(request, remote=True)
        code, _reason = self.port.machine.refusal(address)
        if code:
            self._go_local(request.rid, code)
        elif not self._scheduler.is_remote(request.rid):
            self._metrics.add("num_local_prompts", 1, request.sampling.stays_home)
        elif self._optimistic and len(request.prompt) >= self._scheduler.settings.min_remote_tokens:
            event = PrepareHandoff(rid=request.rid, request=request, address=address)
            self._spans.asked(request.rid)
            self._handle(event, now)

    def _go_local(self, rid: str, code: str) -> None:
        if self._scheduler.recompute(rid, code):
            self._metrics.add("num_recomputed_requests", 1, code)

    def turn(self, now: float, messages: Sequence[PeerMessage | Gone], turns: int) -> list[TokenDelta]:
        for reservation in self._scheduler.take_reservations(now, self._paces(), self.port.machine.still):
            request = reservation.request
            self._metrics.observe("kv_transfer_alloc_ms", 1e3 * (now - request.arrival))
            start = StartHandoff(
                rid=reservation.rid, request=request, address=request.prefill_address, held=reservation.held,
                spans=reservation.spans,
            )  # fmt: skip
            self._spans.asked(reservation.rid)
            self._handle(start, now)
        for rid, reason in self._scheduler.incoming.take_kept():  # the prefill engine hears of it, if it was asked
            self._metrics.add("num_local_prompts", 1, reason)
            event = CancelHandoff(rid=rid, code="kept", reason=f"computed by decode itself: {reason}")
            self._handle(event, now)
        load = self._scheduler.running_count + self._scheduler.waiting_count
        self._act(self.port.turn(now, messages, load=load, turn=turns), now)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _paces(self) -> dict[str, PrefillPace]:
        """Of the prefill engines that are up, by address; none where prompts are asked for before there are pages, as
        these stand in a prefill engine's line already when it is decided where they are computed."""
        up = [] if self._optimistic else [p for p in self.port.machine.peers if p.state is PeerState.UP]
        return {peer.address: PrefillPace(queue_s=peer.queue_s, token_s=peer.token_s) for peer in up}

    def computed(self, chunks: Sequence[ChunkReady], now: float) -> None:
        assert not chunks, f"engine: {len(chunks)} chunks for peers, expected none in a decode engine"

    def aborted(self, rid: str, now: float, *, code: str = "aborted", reason: str = "") -> None:
        event = CancelHandoff(rid=rid, code=code, reason=reason or "aborted by the client")
        self._handle(event, now)

    def can_ask_again(self, rid: str) -> bool:
        address = self._scheduler.heals.address_of(rid)
        return bool(address) and not self.port.machine.refusal(address)[0]

    def asked_by_peers(self) -> list[str]:
        return []

    def peers(self) -> list[dict[str, Any]]:
        return [
            {
                "address": peer.address,
                "engine": peer.engine,
                "state": peer.state.value,
                "backend": peer.backend,
                "load": peer.load,
                "reason": peer.reason,
            }
            for peer in self.port.machine.peers
        ]

    def refresh(self, metrics: Metrics) -> None:
        metrics.set("kv_transfer_late_frames", self.port.machine.rejects["closed_grant"])
        metrics.set("kv_transfer_quarantined_pages", self.port.machine.quarantined_pages)
        states = [PeerState.DOWN if peer.refusal[0] == "peer_gone" else peer.state for peer in self.port.machine.peers]
        for state in PeerState:  # one that was lost is down until it answers, also while it is tried again
            metrics.set("kv_transfer_peers", states.count(state), state.value)
        self._rejects.refresh(metrics, self.port.machine.rejects)

    # ---- what the machines ask for ------------------------------------------------------------------------------

    def _act(self, results: Sequence[DecodeResult], now: float) -> None:
        for result in results:
            match result:
                case Landed():
                    self._landed(result, now)
                case Recompute():
                    self._failed(result, now)
                case Quarantine():
                    self._scheduler.incoming.quarantine(result.spans)
                case QuarantineOver():
                    self._scheduler.incoming.quarantine_over(result.spans)
                    self._metrics.observe("kv_transfer_quarantine_seconds", result.seconds)
                case HandoffFinding() if self._heard is not None:
                    self._heard(result)
                case PeerChanged():
                    say = _log.warning if result.state == PeerState.CONNECTING.value else _log.info
                    say(
                        "prefill engine %s at %s is %s%s",
                        result.engine or "?", result.address, result.state, f": {result.reason}" * bool(result.reason),
                    )  # fmt: skip

    def _landed(self, result: Landed, now: float) -> None:
        self._trace(result.traces)
        self._record_landed(result)
        arrival = ArrivalVerdict()
        if self._arrived is not None:
            arrival = self._arrived(result.rid, self._scheduler.prompt_pages(result.rid))
        if arrival.reason:
            failed = Recompute(rid=result.rid, xid=result.xid, code="kv_canary", reason=arrival.reason, had_grant=True)
            if self.can_ask_again(result.rid):
                self._count(failed, now)
                self._metrics.add("kv_canary_heals", 1, "asked_again")
                self._scheduler.heals.ask_again(result.rid, arrival.reason)
            else:
                self._failed(failed, now)
            return
        delta = self._scheduler.landed(
            result.rid,
            result.token,
            result.logprobs,
            now,
            prefill_engine=result.engine,
            handoff_backend=result.backend,
            handoff_bytes=result.byte_count,
            handoff_seconds=result.copy_seconds,
            cached_tokens=result.cached_tokens,
            ends=result.ends,
            slots_checked=arrival.slots,
        )
        if delta is not None:
            self._deltas.append(delta)
        if delta is not None and delta.usage is not None:
            there_s = result.queue_seconds + result.compute_seconds
            self._scheduler.incoming.choice.landed(
                delta.usage.handoff_tokens, result.wait_seconds + result.seconds - there_s
            )
        metrics = self._metrics
        metrics.add("kv_transfer_pages", result.page_count, "received")
        metrics.add("kv_transfer_bytes", result.byte_count, "received")
        metrics.observe("kv_transfer_latency_ms", 1e3 * result.seconds)
        metrics.observe("kv_transfer_bootstrap_ms", 1e3 * result.wait_seconds)
        metrics.observe("kv_transfer_connect_seconds", result.connect_seconds)
        metrics.observe("kv_transfer_queue_seconds", result.queue_seconds)
        metrics.observe("kv_transfer_compute_seconds", result.compute_seconds)
        if result.confirm_seconds > 0:
            metrics.observe("kv_transfer_confirm_seconds", result.confirm_seconds)
        if delta is not None and delta.usage is not None:
            metrics.observe("kv_transfer_first_token_seconds", delta.usage.first_token_seconds)
        metrics.observe("kv_transfer_total_mb", result.byte_count / 1e6)
        if result.copy_seconds > 0:
            metrics.observe("kv_transfer_speed_gb_s", result.byte_count / 1e9 / result.copy_seconds)

    def _record_landed(self, result: Landed) -> None:
        about: dict[str, str | float] = {
            "serinus.prefill_engine": result.engine, "serinus.xid": result.xid, "serinus.pages": result.page_count,
            "serinus.bytes": result.byte_count, "serinus.connect_s": result.connect_seconds,
            "serinus.queue_s": result.queue_seconds, "serinus.compute_s": result.compute_seconds,
            "serinus.copy_s": result.copy_seconds, "serinus.backend": result.backend,
        }  # fmt: skip
        self._spans.handed_over(result.rid, about, pieces_s=result.seconds, verify_s=result.verify_seconds)

    def _count(self, result: Recompute, now: float) -> None:
        name = "num_transfer_failed_reqs" if result.had_grant else "num_bootstrap_failed_reqs"
        error = f"{result.code}: {result.reason}"
        self._spans.handed_over(result.rid, {"serinus.xid": result.xid, "serinus.code": result.code}, error=error)
        self._metrics.add(name, 1, result.code)
        if self._rarely.says(result.code, now):
            _log.warning(
                "handoff %s of request %s failed (%s): %s", result.xid or "-", result.rid, result.code, result.reason,
                extra={"rid": result.rid, "xid": result.xid, "code": result.code},
            )  # fmt: skip

    def _failed(self, result: Recompute, now: float) -> None:
        self._count(result, now)
        if result.code == "deadline" and not self._scheduler.incoming.is_granted(result.rid):
            return  # it was asked for early, and waits for pages here: when it has some, it is asked for again
        if not self._fails or self._scheduler.heals.count(result.rid):
            self._go_local(result.rid, result.code)
            return
        delta = self._scheduler.abort(result.rid, result.reason)
        if delta is not None:
            own = _OWN_FAULTS.get(result.code)
            reason = result.reason if own else f"pd: the handoff failed ({result.code}): {result.reason}"
            self._deltas.append(replace(delta, finish=FinishReason.ERROR, error=reason, error_status=own or 502))
