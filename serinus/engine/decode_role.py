"""The decode engine's part in handoffs: which prompts to send away, and what to do with what comes back.

Every request of the front is owned here from end to end; a prefill engine only ever helps. Whatever goes wrong there,
the prompt is computed here (or, where the operator wants it so, answered with an error).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from serinus.core.clock import Clock
from serinus.core.log import get_logger
from serinus.core.metrics import Metrics
from serinus.core.request import FinishReason, Request, TokenDelta
from serinus.engine.guard import Guard, NoGuard
from serinus.engine.wire_counts import Rarely, WireCounts
from serinus.pd import (
    CancelHandoff,
    DecodePort,
    DecodeResult,
    Landed,
    PeerChanged,
    PeerState,
    PrepareHandoff,
    Quarantine,
    QuarantineOver,
    Recompute,
    Shutdown,
    StartHandoff,
    WantPeer,
)
from serinus.sched import ChunkReady, Scheduler
from serinus.wire import ZmqChannel

__all__ = ["DecodeRole"]

_log = get_logger("engine")
_BEFORE_GRANT = ("refused", "peer_slow")
"""Recompute codes of handoffs that never began."""


class DecodeRole:
    """Handoffs (roles.py) of a decode engine."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        port: DecodePort,
        channels: Sequence[ZmqChannel],
        metrics: Metrics,
        clock: Clock,
        addresses: Sequence[str],
        on_failure: str,
        optimistic: bool = False,
        guard: Guard | None = None,
    ) -> None:
        """`addresses`: prefill engines to use for requests that name none; `on_failure`: recompute or error;
        `optimistic`: ask for a prompt before there are pages for it."""
        self._scheduler = scheduler
        self._port = port
        self._metrics = metrics
        self._clock = clock
        self._addresses = tuple(addresses)
        self._fails = on_failure == "error"
        self._optimistic = optimistic
        self._guard = guard or NoGuard()
        self._waiting: set[str] = set()
        """Remote requests without pages, as far as nobody said otherwise."""
        self._deltas: list[TokenDelta] = []
        self._wire_counts = WireCounts()
        self._rarely = Rarely()
        self.channels = channels
        for address in self._addresses:
            self._act(port.handle(WantPeer(address=address)))

    def admit(self, request: Request) -> None:
        address = request.prefill_address or self._known_address()
        if not address:
            self._scheduler.add(request)
            self._metrics.add("num_local_prompts", 1, "no_prefill_engine")
            return
        request = replace(request, prefill_address=address)
        self._scheduler.add(request, remote=True)
        code, _reason = self._port.machine.refusal(address)
        if code:
            self._go_local(request.rid, code)
        elif not self._scheduler.is_remote(request.rid):
            self._metrics.add("num_local_prompts", 1, "prompt_logprobs")
        else:
            self._waiting.add(request.rid)
            if self._optimistic and len(request.prompt) >= self._scheduler.settings.min_remote_tokens:
                self._act(self._port.handle(PrepareHandoff(rid=request.rid, request=request, address=address)))

    def _known_address(self) -> str:
        """The least loaded of the configured prefill engines that is up."""
        up = [peer for peer in self._port.machine.peers if peer.pinned and peer.state is PeerState.UP]
        return min(up, key=lambda peer: peer.load).address if up else ""

    def _go_local(self, rid: str, code: str) -> None:
        self._waiting.discard(rid)
        if self._scheduler.recompute(rid, code):
            self._metrics.add("num_recomputed_requests", 1, code)

    def turn(self, now: float, turns: int) -> list[TokenDelta]:
        for reservation in self._scheduler.take_reservations(now):
            request = reservation.request
            self._waiting.discard(reservation.rid)
            self._metrics.observe("kv_transfer_alloc_ms", 1e3 * (now - request.arrival))
            self._act(
                self._port.handle(
                    StartHandoff(
                        rid=reservation.rid,
                        request=request,
                        address=request.prefill_address,
                        held=reservation.held,
                        spans=reservation.spans,
                    )
                )
            )
        self._let_go_of_short_ones()
        stats = self._scheduler.stats()
        self._act(self._port.poll(0.0, load=stats.num_running_reqs + stats.num_queue_reqs, turn=turns))
        deltas, self._deltas = self._deltas, []
        return deltas

    def _let_go_of_short_ones(self) -> None:
        """What turned out to lack too little went local: the prefill engine hears of it, if it was asked."""
        for rid in [rid for rid in self._waiting if not self._scheduler.is_remote(rid)]:
            self._waiting.discard(rid)
            self._metrics.add("num_local_prompts", 1, "short")
            self._act(self._port.handle(CancelHandoff(rid=rid, reason="computed by decode itself: too short")))

    def computed(self, chunks: Sequence[ChunkReady], now: float) -> None:
        assert not chunks, f"engine: {len(chunks)} chunks for peers, expected none in a decode engine"

    def aborted(self, rid: str, now: float) -> None:
        self._waiting.discard(rid)
        self._act(self._port.handle(CancelHandoff(rid=rid)))

    def asked_by_peers(self) -> list[str]:
        return []

    def ungranted(self) -> Collection[str]:
        return ()

    def wait_s(self, longest_s: float) -> float:
        return min(longest_s, self._port.wait_s)

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
            for peer in self._port.machine.peers
        ]

    def refresh(self, metrics: Metrics) -> None:
        metrics.set("kv_transfer_late_frames", self._port.machine.rejects["closed_grant"])
        metrics.set("kv_transfer_quarantined_pages", self._port.machine.quarantined_pages)
        self._wire_counts.refresh(metrics, rejects=self._port.rejects, resent_count=self._port.resent_count)

    def drain(self) -> None:
        """Peers ask nothing of a decode engine; its own handoffs go on."""

    def shut_down(self, now: float) -> None:
        self._port.handle(Shutdown())

    def close(self) -> None:
        self._port.close()

    # ---- what the machines ask for ------------------------------------------------------------------------------

    def _act(self, results: Sequence[DecodeResult]) -> None:
        for result in results:
            match result:
                case Landed():
                    self._landed(result)
                case Recompute():
                    self._failed(result)
                case Quarantine():
                    self._scheduler.quarantine(result.spans)
                case QuarantineOver():
                    self._scheduler.quarantine_over(result.spans)
                    self._metrics.observe("kv_transfer_quarantine_ms", 1e3 * result.seconds)
                case PeerChanged():
                    _log.info(
                        "prefill engine %s at %s is %s%s",
                        result.engine or "?", result.address, result.state, f": {result.reason}" * bool(result.reason),
                    )  # fmt: skip

    def _landed(self, result: Landed) -> None:
        wrong = self._guard.arrived(result.rid, self._scheduler.pages_of(result.rid))
        if wrong:
            self._failed(Recompute(rid=result.rid, code="kv_canary", reason=wrong))
            return
        delta = self._scheduler.landed(
            result.rid,
            result.token,
            result.logprobs,
            self._clock.now(),
            prefill_engine=result.engine,
            handoff_bytes=result.byte_count,
            handoff_seconds=result.copy_seconds,
            cached_tokens=result.cached_tokens,
        )
        if delta is not None:
            self._deltas.append(delta)
        metrics = self._metrics
        metrics.add("kv_transfer_pages", result.page_count, "received")
        metrics.add("kv_transfer_bytes", result.byte_count, "received")
        metrics.observe("kv_transfer_latency_ms", 1e3 * result.seconds)
        metrics.observe("kv_transfer_bootstrap_ms", 1e3 * result.wait_seconds)
        metrics.observe("kv_transfer_connect_ms", 1e3 * result.connect_seconds)
        metrics.observe("kv_transfer_queue_ms", 1e3 * result.queue_seconds)
        metrics.observe("kv_transfer_compute_ms", 1e3 * result.compute_seconds)
        if result.confirm_seconds > 0:
            metrics.observe("kv_transfer_confirm_ms", 1e3 * result.confirm_seconds)
        if delta is not None and delta.usage is not None:
            metrics.observe("kv_transfer_first_token_ms", 1e3 * delta.usage.first_token_seconds)
        metrics.observe("kv_transfer_total_mb", result.byte_count / 1e6)
        if result.copy_seconds > 0:
            metrics.observe("kv_transfer_speed_gb_s", result.byte_count / 1e9 / result.copy_seconds)

    def _failed(self, result: Recompute) -> None:
        name = "num_bootstrap_failed_reqs" if result.code in _BEFORE_GRANT else "num_transfer_failed_reqs"
        self._metrics.add(name, 1, result.code)
        if self._rarely.says(result.code, self._clock.now()):
            _log.warning("handoff of %s failed (%s): %s", result.rid, result.code, result.reason)
        if not self._fails:
            self._go_local(result.rid, result.code)
            return
        delta = self._scheduler.abort(result.rid, result.reason)
        if delta is not None:
            reason = f"pd: the handoff failed ({result.code}): {result.reason}"
            self._deltas.append(replace(delta, finish=FinishReason.ERROR, error=reason, error_status=502))
