"""A decode and a prefill engine in one thread, joined by the `local` backend: real engines, real roles, real machines.

What `serinus up` runs in processes, without sockets and without time of its own: the caller decides which engine moves
next. The toy model makes every wrong page a wrong token (testing/oracle.py knows the right ones).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serinus.core.clock import Clock, ManualClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.request import Request, TokenDelta
from serinus.engine.build import Built, build_engine
from serinus.engine.decode_role import DecodeRole
from serinus.engine.handoffs import HandoffParts, MadeHandoffs, make_role
from serinus.engine.messages import FrontMessage
from serinus.engine.peers import Peers
from serinus.engine.prefill_role import PrefillRole
from serinus.pd import Backend, HandoffPort, LocalBackend
from serinus.wire import LocalHub, Mailbox
from serinus.wire.messages import Abort

__all__ = ["EnginePair"]

_ADDRESS = "local://prefill"
_FRONT = "test"


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
        self._backend = backend or LocalBackend()
        self._hub = LocalHub()
        self.prefill = self._build(checkpoint, "prefill", {**settings, **(prefill_settings or {})})
        self.decode = self._build(checkpoint, "decode", {**settings, **(decode_settings or {})})

    def _build(self, checkpoint: Path, role: str, settings: dict[str, Any]) -> Built:
        names = {"model_path": str(checkpoint), "mode": role, "decode_log_interval": 0, "min_remote_tokens": 1}
        config = from_names(ServeConfig, {**names, **settings})
        return build_engine(config, self.clock, handoffs_of=self._role, backends=(self._backend,))

    def _role(self, parts: HandoffParts, clock: Clock) -> MadeHandoffs:
        """The role of one engine, on a channel of this process."""
        is_prefill = parts.config.role == "prefill"
        channel = self._hub.channel(_ADDRESS) if is_prefill else self._hub.channel()
        peers = Peers(Mailbox(channel, incarnation=parts.incarnation, clock=clock))
        role = make_role(parts, parts.backends, clock.now(), addresses=(_ADDRESS,))
        return MadeHandoffs(role=role, peers=peers, address=_ADDRESS if is_prefill else "")

    def add(self, request: Request) -> None:
        """A request of a client, taken by the decode engine in a turn; remote where its `prefill_address` or a greeted
        peer says so."""
        self.deltas[request.rid] = []
        self._turn(self.decode, FrontMessage(front=_FRONT, message=request))

    def abort(self, rid: str) -> None:
        """The client left; the decode engine takes that in a turn."""
        self._turn(self.decode, FrontMessage(front=_FRONT, message=Abort(rid=rid, reason="test")))

    def turn_decode(self) -> None:
        """One turn of the decode engine."""
        self.clock.advance(0.01)
        self._turn(self.decode)

    def turn_prefill(self) -> None:
        """One turn of the prefill engine."""
        self.clock.advance(0.01)
        self._turn(self.prefill)

    def _turn(self, built: Built, *messages: FrontMessage) -> None:
        output = built.turn(messages)
        for _, deltas in output.deltas:
            for delta in deltas:
                self.deltas[delta.rid].append(delta)
        built.line.flush()

    @staticmethod
    def port_of(built: Built) -> HandoffPort[Any]:
        """The port of one of the engines."""
        role = built.engine.handoffs
        assert isinstance(role, (DecodeRole, PrefillRole)), f"testing: {built.config.role} has no port"
        return role.port

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
        """Whether neither engine has a request."""
        return self.decode.engine.idle and self.prefill.engine.idle

    def tokens(self, rid: str) -> list[int]:
        """What the client has got."""
        return [token for delta in self.deltas[rid] for token in delta.token_ids]

    def check(self) -> None:
        """Every invariant of both schedulers and caches; raises InvariantError."""
        for built in (self.decode, self.prefill):
            built.engine.scheduler.sanity_check()
