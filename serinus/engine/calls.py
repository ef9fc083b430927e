"""Calls: what an engine answers at once, by the name of the call: metrics, state, cache, faults on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from serinus.cache import PrefixCache
from serinus.canary import CanaryLead, perturb
from serinus.core.errors import InvariantError, SerinusError
from serinus.engine.healing import Healer
from serinus.engine.inspect import EngineFacts, cache_view, engine_info
from serinus.engine.look import Look, look_at
from serinus.engine.roles import Handoffs
from serinus.engine.step_metrics import StepMetrics
from serinus.engine.watcher import Watcher
from serinus.sched import Scheduler
from serinus.wire.messages import EngineCall, EngineReply

_LOOKS = msgspec.json.Decoder(Look)


class EngineCalls:
    """A table of calls; each gives the body of its reply, or raises why it is refused."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        cache: PrefixCache,
        handoffs: Handoffs,
        metrics: StepMetrics,
        canary: CanaryLead | None,
        healer: Healer | None,
        watcher: Watcher,
        facts: EngineFacts,
    ) -> None:
        """The parts of an engine that are asked."""
        self._scheduler = scheduler
        self._cache = cache
        self._handoffs = handoffs
        self._metrics = metrics
        self._canary = canary
        self._healer = healer
        self._facts = facts
        self._table: dict[str, Callable[[EngineCall, float, int], bytes]] = {
            "metrics": self._render_metrics,
            "info": self._info,
            "load": self._info,
            "cache": lambda call, now, turns: _json(cache_view(cache, call.limit, facts)),
            "canary": self._canary_view,
            "perturb": lambda call, now, turns: _json(perturb(canary, call.body)),
            "watch": lambda call, now, turns: watcher.frame(now),
            "look": self._look,
            "flush_cache": self._flush,
        }

    def answer(self, call: EngineCall, now: float, turns: int) -> EngineReply:
        """`turns`: of the engine so far. Raises InvariantError: the engine is broken."""
        answer = self._table.get(call.what)
        if answer is None:
            *names, last = self._table
            reason = f"engine: call {call.what!r}, expected {', '.join(names)} or {last}"
            return EngineReply(call=call.call, ok=False, body=reason.encode())
        try:
            return EngineReply(call=call.call, ok=True, body=answer(call, now, turns))
        except InvariantError:
            raise
        except (SerinusError, msgspec.DecodeError) as error:
            return EngineReply(call=call.call, ok=False, body=str(error).encode())

    def _render_metrics(self, call: EngineCall, now: float, turns: int) -> bytes:
        metrics = self._metrics.metrics
        self._metrics.refresh(self._scheduler, self._cache, turns, now)
        for part in (self._handoffs, self._canary, self._healer):
            if part is not None:
                part.refresh(metrics)
        return metrics.render()

    def _info(self, call: EngineCall, now: float, turns: int) -> bytes:
        own = {
            "turns": turns,
            "busy_seconds": self._metrics.busy_seconds,
            "peers": self._handoffs.peers(),
            "degraded": "" if self._canary is None else self._canary.health.degraded,
        }
        return _json(engine_info(self._scheduler.stats(), own, self._facts))

    def _canary_view(self, call: EngineCall, now: float, turns: int) -> bytes:
        view = {"mode": "none"} if self._canary is None else self._canary.view()
        return _json({"engine": self._facts.engine, "role": self._facts.role, **view})

    def _look(self, call: EngineCall, now: float, turns: int) -> bytes:
        look = _LOOKS.decode(call.body)
        return _json(look_at(look, self._cache, self._scheduler, self._facts.stamps_of))

    def _flush(self, call: EngineCall, now: float, turns: int) -> bytes:
        self._cache.reset()
        return b"cache flushed"


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
