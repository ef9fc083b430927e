"""A decode and a prefill engine in one thread, joined by the `local` backend: real cores, real roles, real machines.

What `serinus up` runs in processes, without sockets and without time of its own: whoever drives it decides who moves
next. The toy model makes every wrong page a wrong token (testing/oracle.py knows the right ones).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serinus.core.clock import ManualClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.request import Request, TokenDelta
from serinus.engine.build import Built, build_core
from serinus.engine.decode_role import DecodeRole
from serinus.engine.handoffs import pd_settings
from serinus.engine.prefill_role import PrefillRole
from serinus.pd import Backend, DecodePort, LocalBackend, PrefillPort
from serinus.wire import LocalHub, Post

__all__ = ["EnginePair"]

_ADDRESS = "local://prefill"


class EnginePair:
    """`decode` owns requests, `prefill` helps. `deltas` holds what clients would have got, by request."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        decode_settings: Mapping[str, Any] | None = None,
        prefill_settings: Mapping[str, Any] | None = None,
        backend: Backend | None = None,
        **settings: Any,
    ) -> None:
        """`settings`: of both engines, by their names (docs/settings.md); the other two of one of them. `backend`: how
        pages travel, `local` where none is given."""
        self.clock = ManualClock()
        self.deltas: dict[str, list[TokenDelta]] = {}
        backend, hub = backend or LocalBackend(), LocalHub()
        self.decode = self._build(checkpoint, "decode", {**settings, **(decode_settings or {})})
        self.prefill = self._build(checkpoint, "prefill", {**settings, **(prefill_settings or {})})
        prefill_post = Post(hub.channel(_ADDRESS), incarnation=1, clock=self.clock)
        self.prefill_port = PrefillPort(
            pd_settings(self.prefill, 1, (backend,)),
            post=prefill_post,
            backends=(backend,),
            store=self.prefill.core.guard.outgoing(self.prefill.pools),
            clock=self.clock,
        )
        self.prefill_role = PrefillRole(
            scheduler=self.prefill.core.scheduler,
            port=self.prefill_port,
            channels=(),
            metrics=self.prefill.metrics,
            clock=self.clock,
        )
        self.decode_role = DecodeRole(
            scheduler=self.decode.core.scheduler,
            port=DecodePort(
                pd_settings(self.decode, 2, (backend,)),
                post=Post(hub.channel(), incarnation=2, clock=self.clock),
                backends=(backend,),
                store=self.decode.pools,
                clock=self.clock,
            ),
            channels=(),
            metrics=self.decode.metrics,
            clock=self.clock,
            addresses=(_ADDRESS,),
            on_failure="recompute",
            optimistic=self.decode.config.pd.optimistic_prefill,
            guard=self.decode.core.guard,
        )

        self.decode.core.leaving = lambda rid: self.decode_role.aborted(rid, self.clock.now())
        self.prefill.core.leaving = lambda rid: self.prefill_role.aborted(rid, self.clock.now())

    def _build(self, checkpoint: Path, role: str, settings: dict[str, Any]) -> Built:
        names = {"model_path": str(checkpoint), "mode": role, "decode_log_interval": 0, "min_remote_tokens": 1}
        return build_core(from_names(ServeConfig, {**names, **settings}), self.clock)

    def add(self, request: Request) -> None:
        """A request of a client; remote where its `prefill_address` or a greeted peer says so."""
        self.deltas[request.rid] = []
        self.decode_role.admit(request)

    def abort(self, rid: str) -> None:
        """The client left."""
        self.decode_role.aborted(rid, self.clock.now())
        self._keep(self.decode.core.scheduler.abort(rid, "test"))

    def turn_decode(self) -> None:
        """One turn of the decode engine."""
        self.clock.advance(0.01)
        for delta in self.decode_role.turn(self.clock.now(), self.decode.core.turns):
            self._keep(delta)
        outcome = self.decode.core.step()
        for delta in outcome.deltas if outcome is not None else ():
            self._keep(delta)

    def turn_prefill(self) -> None:
        """One turn of the prefill engine."""
        self.clock.advance(0.01)
        self.prefill_role.turn(self.clock.now(), self.prefill.core.turns)
        outcome = self.prefill.core.step()
        if outcome is not None:
            self.prefill_role.computed(outcome.chunks, self.clock.now())

    def run_until_idle(self, turns_max: int = 10_000) -> None:
        """Turns, one of each, until both engines hold nothing. Raises AssertionError after turns_max."""
        for _ in range(turns_max):
            if self.idle:
                return
            self.turn_decode()
            self.turn_prefill()
        raise AssertionError(f"testing: not idle after {turns_max} turns")

    @property
    def idle(self) -> bool:
        """No request anywhere."""
        return self.decode.core.scheduler.idle and self.prefill.core.scheduler.idle

    def tokens(self, rid: str) -> list[int]:
        """What the client has got."""
        return [token for delta in self.deltas[rid] for token in delta.token_ids]

    def check(self) -> None:
        """Every invariant of both schedulers and caches; raises InvariantError."""
        for built in (self.decode, self.prefill):
            built.core.scheduler.sanity_check()

    def _keep(self, delta: TokenDelta | None) -> None:
        if delta is not None:
            self.deltas[delta.rid].append(delta)
