"""A decode and a prefill engine in one thread: real engines, real roles, real machines.

What `serinus up` runs in processes, but for the processes. The caller decides which engine moves next. By default the
two are joined by the `local` backend, without sockets and in a time of their own. The toy model makes every wrong page
a wrong token (testing/oracle.py knows the right ones).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from serinus.core.clock import Clock, ManualClock, WallClock
from serinus.core.config import ServeConfig, from_names, not_of_role
from serinus.core.request import Request
from serinus.engine.build import RankStarter, build_engine
from serinus.engine.decode_role import DecodeRole
from serinus.engine.handoffs import HandoffParts, MadeHandoffs, make_role
from serinus.engine.peers import Peers
from serinus.engine.prefill_role import PrefillRole
from serinus.pd import Backend, HandoffPort, LocalBackend
from serinus.selftest.driver import EngineDriver
from serinus.wire import LocalHub, Mailbox

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
        starter: Callable[[ServeConfig, Clock], RankStarter] | None = None,
        **settings: Any,
    ) -> None:
        """`settings`: of both engines, by their names (docs/settings.md); the other two of one of them. `backend`: how
        pages travel, `local` where none is given. `starter`: starts the ranks of an engine that do not lead it; time,
        sockets and backends are then real ones, as the settings say."""
        self.clock: Clock = ManualClock() if starter is None else WallClock()
        self._backend, self._starter = backend or LocalBackend(), starter
        self._hub = LocalHub()
        self.prefill = self._made(checkpoint, "prefill", {**settings, **(prefill_settings or {})})
        with ExitStack() as undo:
            undo.callback(self.prefill.built.close)
            self.decode = self._made(checkpoint, "decode", {**settings, **(decode_settings or {})})
            undo.pop_all()
        self.deltas = self.decode.deltas

    def _made(self, checkpoint: Path, role: str, settings: dict[str, Any]) -> EngineDriver:
        names = {"model_path": str(checkpoint), "mode": role, "decode_log_interval": 0, "min_remote_tokens": 1}
        others = {setting.name for setting in not_of_role(role)}
        given = {name: value for name, value in {**names, **settings}.items() if name not in others}
        config = from_names(ServeConfig, given)
        if self._starter is not None:
            return EngineDriver(build_engine(config, self.clock, self._starter(config, self.clock)))
        return EngineDriver(build_engine(config, self.clock, handoffs_of=self._role, backends=(self._backend,)))

    def _role(self, parts: HandoffParts, clock: Clock) -> MadeHandoffs:
        """The role of one engine, on a channel of this process."""
        is_prefill = parts.config.role == "prefill"
        channel = self._hub.channel(_ADDRESS) if is_prefill else self._hub.channel()
        peers = Peers(Mailbox(channel, incarnation=parts.incarnation, clock=clock))
        role = make_role(parts, clock.now(), addresses=(_ADDRESS,))
        return MadeHandoffs(role=role, peers=peers, address=_ADDRESS if is_prefill else "")

    def send(self, request: Request) -> None:
        """A request of a client, taken by the decode engine in a turn; remote where its `prefill_address` or a greeted
        peer says so."""
        self.decode.send(request)
        self.decode.turn()

    def add(self, rid: str, prompt: Any, count: int = 8, *, remote: bool = True, **more: Any) -> None:
        """The same, as EngineDriver's; `remote`: it names the prefill engine."""
        address = self.prefill.built.pd_address if remote else ""
        self.decode.add(rid, prompt, count, prefill=address, **more)
        self.decode.turn()

    def abort(self, rid: str) -> None:
        """The client left; the decode engine takes that in a turn."""
        self.decode.abort(rid)
        self.decode.turn()

    def turn_decode(self) -> None:
        """One turn of the decode engine."""
        self._turn(self.decode)

    def turn_prefill(self) -> None:
        """One turn of the prefill engine."""
        self._turn(self.prefill)

    def _turn(self, driver: EngineDriver) -> None:
        if isinstance(self.clock, ManualClock):
            self.clock.advance(0.01)
        driver.turn()

    @staticmethod
    def port_of(driver: EngineDriver) -> HandoffPort[Any]:
        """The port of one of the engines."""
        role = driver.engine.handoffs
        assert isinstance(role, (DecodeRole, PrefillRole)), f"testing: {driver.built.config.role} has no port"
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
        return self.decode.tokens(rid)

    def check(self) -> None:
        """Every invariant of both schedulers and caches; raises InvariantError."""
        for driver in (self.decode, self.prefill):
            driver.engine.scheduler.sanity_check()

    def close(self) -> None:
        """Close both engines, with the ranks and threads of their tiers."""
        for driver in (self.decode, self.prefill):
            driver.built.close()
