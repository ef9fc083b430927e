"""Watcher: what an engine shows to open dashboards: one frame on demand, and what happened since the last one.

Nothing is noted, and nothing computed, while nothing asks: the first call of `frame` begins to listen to steps and to
handoffs, and some seconds without a call end that. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from serinus.cache import PrefixCache, Tier
from serinus.canary import CanaryLead
from serinus.core.parts import Part
from serinus.core.request import TokenDelta
from serinus.engine.inspect import EngineFacts
from serinus.engine.roles import Handoffs
from serinus.engine.step_metrics import StepMetrics
from serinus.pd import HandoffTrail
from serinus.sched import Outcome, Phase, ReqState, Scheduler
from serinus.wire.watched import CELL_IN_TRANSIT, PoolCells, WatchFrame

WATCHED_S: Final = 10.0
"""So long after the last frame was asked for, nothing is noted any more."""
_FLOOR_EVERY: Final = 8
"""Of so many decode steps one is held against its floor: its requests are counted for that."""
_ENDED_KEPT: Final = 64
_LIVE_MAX: Final = 128
_INCIDENTS_MAX: Final = 64
_STATE_MASK: Final = 7
_ENCODER: Final = msgspec.json.Encoder()


class _Sums:
    """Of the steps since the last frame."""

    def __init__(self, since: float, generated: int) -> None:
        """`generated`: tokens of the engine until then."""
        self.since, self.generated = since, generated
        self.steps = self.decode_steps = self.floors = 0
        self.decode_seconds = self.floor_seconds = 0.0
        self.prompt = self.cached = 0
        self.gaps: list[float] = []
        self.first_tokens: list[float] = []


class Watcher:
    """One for an engine; its thread owns it. Hears steps (`stepped`, `answered`: of StepMetrics) while it is on."""

    def __init__(
        self, *, scheduler: Scheduler, cache: PrefixCache, handoffs: Handoffs, metrics: StepMetrics,
        canary: CanaryLead | None, facts: EngineFacts,
    ) -> None:  # fmt: skip
        self._scheduler, self._cache, self._handoffs = scheduler, cache, handoffs
        self._metrics, self._canary, self._facts = metrics, canary, facts
        self.on = False
        """Whether a dashboard is open."""
        self._now = self._asked_at = 0.0
        self._trail = HandoffTrail()
        self._sums = _Sums(0.0, 0)
        self._ended: deque[msgspec.Raw] = deque(maxlen=_ENDED_KEPT)
        self._live: dict[str, dict[str, Any]] = {}
        """As the last frame had them."""
        self._decoded_at: float | None = None
        """When the last step ended, if it decoded."""
        self._story: tuple[object, bytes] = (None, b"{}")

    def turn(self, now: float) -> None:
        """A turn of the engine begins, while a dashboard is open."""
        self._now = now
        if now - self._asked_at > WATCHED_S:
            self._listen(False)

    def frame(self, now: float) -> bytes:
        """A WatchFrame. Cost: some array operations over all pages, 1 us a request."""
        if not self.on:
            self._sums, self._trail, self._live = _Sums(now, self._generated()), HandoffTrail(), {}
            self._ended.clear()
            self._listen(True)
        self._now = self._asked_at = now
        rates, live = self._rates(now), self._requests()
        sections = {
            "about": self._about(), "health": self._health(), "rates": rates, "requests": live,
            "ended": list(self._ended), "handoffs": self._trail.as_json(),
        }  # fmt: skip
        raw = {name: _ENCODER.encode(section) for name, section in sections.items()}
        raw["incidents"] = self._incidents()
        return msgspec.msgpack.encode(WatchFrame(now=now, pools=self._cells(), sections=raw))

    # ---- what it hears ----------------------------------------------------------------------------------------------

    def stepped(self, outcome: Outcome, seconds: float, now: float) -> None:
        """A step of the model ended."""
        sums = self._sums
        sums.steps += 1
        sums.prompt += outcome.prompt_tokens
        sums.cached += outcome.cached_tokens
        if not outcome.decode_tokens:
            self._decoded_at = None
            return
        if self._decoded_at is not None:
            sums.gaps.append(now - self._decoded_at)
        self._decoded_at = now
        if not outcome.prompt_tokens:
            if sums.decode_steps % _FLOOR_EVERY == 0:
                sums.floors += 1
                sums.floor_seconds += self._facts.step_floor_s(self._running_tokens())
            sums.decode_steps += 1
            sums.decode_seconds += seconds

    def answered(self, delta: TokenDelta) -> None:
        """A delta with its costs left for its client."""
        usage = delta.usage
        if usage is None:
            return
        if delta.token_ids and usage.completion_tokens == 1:
            self._sums.first_tokens.append(usage.first_token_seconds)
        if delta.finish is None:
            return
        known = self._live.pop(delta.rid, {})
        arrival = known.get("arrival", self._now - usage.first_token_seconds)
        integrity = usage.kv_integrity
        self._note_end(
            {
                **known, "rid": delta.rid, "client": known.get("client", delta.rid), "phase": "ended",
                "arrival": arrival, "started": arrival + usage.queue_seconds,
                "first_token": arrival + usage.first_token_seconds if usage.first_token_seconds else None,
                "ended": self._now, "finish": delta.finish.value, "error": delta.error[:300],
                "prompt": usage.prompt_tokens, "generated": usage.completion_tokens,
                "cached": sum(usage.cached_tokens.values()), "engine": usage.prefill_engine,
                "local_reason": usage.local_reason, "handoff_s": usage.handoff_seconds,
                "heals": 0 if integrity is None else integrity.heals,
                "repaired": {} if integrity is None else dict(integrity.repaired_from),
                "heal_reasons": [] if integrity is None else list(integrity.heal_reasons[:3]),
            }
        )  # fmt: skip

    def _listen(self, on: bool) -> None:
        self.on = on
        self._metrics.listener = self if on else None
        self._handoffs.tap(self._trail.hear if on else None)

    def _note_end(self, record: Mapping[str, Any]) -> None:
        self._ended.append(msgspec.Raw(_ENCODER.encode(record)))

    # ---- sections ---------------------------------------------------------------------------------------------------

    def _about(self) -> dict[str, Any]:
        facts, settings = self._facts, self._scheduler.settings
        return {
            "engine": facts.engine, "role": facts.role, "page_size": self._cache.page_size,
            "running_max": settings.max_running_requests, "peers": self._handoffs.peers(),
            "coverage": settings.verify_steps, "device": facts.device,
        }  # fmt: skip

    def _health(self) -> dict[str, Any]:
        if self._canary is None:
            return {"mode": "none"}
        return {"mode": self._canary.mode, **self._canary.counts(), "degraded": self._canary.health.degraded}

    def _incidents(self) -> bytes:
        """Only made anew where there is something new."""
        if self._canary is None:
            return self._story[1]
        counts = self._canary.counts()
        if counts != self._story[0]:
            view = self._canary.story()
            for name in ("incidents", "told", "injected"):
                view[name] = view[name][-_INCIDENTS_MAX:]
            self._story = counts, _ENCODER.encode(view)
        return self._story[1]

    def _rates(self, now: float) -> dict[str, Any]:
        """Of the time since the last frame; None where nothing was measured in it."""
        sums, self._sums = self._sums, _Sums(now, self._generated())
        stats, seconds = self._scheduler.stats(), max(now - sums.since, 1e-3)
        return {
            "seconds": seconds, "steps": sums.steps,
            "prompt_rate": sums.prompt / seconds, "generated_rate": (self._sums.generated - sums.generated) / seconds,
            "generated": stats.totals.generation_tokens, "prompt": stats.totals.computed_tokens,
            "hit_rate": sums.cached / (sums.cached + sums.prompt) if sums.cached + sums.prompt else None,
            "ttft_ms": 1e3 * float(np.median(sums.first_tokens)) if sums.first_tokens else None,
            "itl_ms": 1e3 * float(np.median(sums.gaps)) if sums.gaps else None,
            "step_ms": 1e3 * sums.decode_seconds / sums.decode_steps if sums.decode_steps else None,
            "floor_ms": 1e3 * sums.floor_seconds / sums.floors if sums.floor_seconds else None,
            "running": stats.num_running_reqs, "queued": stats.num_queue_reqs + stats.num_decode_prealloc_queue_reqs,
            "transfer": stats.num_decode_transfer_queue_reqs + stats.num_prefill_inflight_queue_reqs,
            "usage": stats.token_usage,
        }  # fmt: skip

    def _requests(self) -> list[dict[str, Any]]:
        """The oldest ones, as many as are shown. Those that went without a last delta have ended: what a prefill engine
        computed for others."""
        live: dict[str, dict[str, Any]] = {}
        for state in self._scheduler.requests:
            if len(live) == _LIVE_MAX:
                break
            live[state.rid] = _live_view(state)
        for rid, record in self._live.items():
            if rid not in live:
                self._note_end({**record, "phase": "ended", "ended": self._now, "finish": ""})
        self._live = live
        return list(live.values())

    def _generated(self) -> int:
        return self._scheduler.totals.generation_tokens

    def _running_tokens(self) -> int:
        return sum(state.computed for state in self._scheduler.requests if state.running)

    # ---- pages ------------------------------------------------------------------------------------------------------

    def _cells(self) -> tuple[PoolCells, ...]:
        pools = []
        granted = self._granted()
        for (tier, part), pool in sorted(self._cache.pools.all.items()):
            state_P = (pool.ledger.owner_P & _STATE_MASK).astype(np.uint8)
            if pool.ledger.held_count:
                state_P[(pool.ledger.hold_P > 0) & (state_P < CELL_IN_TRANSIT)] = CELL_IN_TRANSIT
            if tier is Tier.DEVICE and part in granted:
                state_P[granted[part]] = CELL_IN_TRANSIT
            is_timed = pool.sweep.clock is not None
            seen = pool.sweep.seen_P.astype("<u4").tobytes() if is_timed else b""
            pools.append(
                PoolCells(tier=tier.name.lower(), part=part.name.lower(), state=state_P.tobytes(), seen=seen)
            )  # fmt: skip
        if self._facts.shelf is not None:
            files = np.full(self._facts.shelf.counts().pages + 1, _STATE_CACHED, np.uint8)
            files[0] = _STATE_PADDING
            pools.append(PoolCells(tier="storage", part="full", state=files.tobytes()))
        return tuple(pools)

    def _granted(self) -> dict[Part, NDArray[np.int32]]:
        """Device pages that a prefill engine may be filling now."""
        rids = [state.rid for state in self._scheduler.requests if state.phase is Phase.TRANSFER]
        return self._scheduler.rows_of(rids) if rids else {}


_STATE_CACHED: Final = 2
_STATE_PADDING: Final = 5


def _live_view(state: ReqState) -> dict[str, Any]:
    handoff = state.handoff
    return {
        "rid": state.rid, "client": state.rid if handoff is None else handoff.rid or state.rid,
        "phase": state.phase.name.lower(), "arrival": state.request.arrival, "started": state.started,
        "first_token": state.first_token, "prompt": state.prompt_len, "computed": state.computed,
        "verified": state.verified, "generated": state.generated, "cached": sum(state.found.values()),
        "engine": state.prefill_engine, "local_reason": state.local_reason, "heals": len(state.heals),
        "handoff": "" if handoff is None else handoff.xid,
    }  # fmt: skip
