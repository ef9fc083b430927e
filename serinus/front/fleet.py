"""The engines a router knows: which are alive, how loaded they are, and which of them a request goes to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from serinus.core.addresses import reachable
from serinus.core.clock import Clock
from serinus.core.errors import BadRequest, CapacityError, UnknownModel
from serinus.core.log import get_logger
from serinus.core.request import Share
from serinus.core.shown import shown
from serinus.front.circuit import Circuit, CircuitLimits, CircuitState
from serinus.front.keys import share_headers
from serinus.front.metrics import RouterMetrics
from serinus.front.policies import Policy, make_policy
from serinus.front.settings import RouterSettings, split_alias
from serinus.front.upstream import Upstream, UpstreamBroken, fetch

_log = get_logger("front")
_SLACK_REQUESTS: Final = 8
"""A decode engine may have so many requests more than another and still be preferred for its cache..."""
_SLACK_BYTES: Final = 64 << 10
"""...a prefill engine so many bytes of bodies that wait: some ten thousand tokens."""
_DRAIN_LOOK_S: Final = 0.05
"""Between two looks at the requests of an engine that is being drained."""


def reason_of(body: bytes) -> str:
    """The words of an answer that is an error, 400 characters at most."""
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:400].decode(errors="replace")
    error = said.get("error", said) if isinstance(said, dict) else said
    return str(error.get("message", error) if isinstance(error, dict) else error)[:400]


def engine_secrets(settings: RouterSettings) -> tuple[str, ...]:
    """What a router proves itself to its engines with: any of it, an engine may know."""
    return (settings.admin_api_key or settings.api_key, *settings.router_secrets)


class NoEngineAlive(CapacityError):
    """No engine is alive that could own the request."""

    kind = "service_unavailable_error"


class FleetEngine:
    """One engine as the router sees it."""

    def __init__(self, where: str, kind: str, limits: CircuitLimits) -> None:
        """`where`: its URL, or MODEL=URL."""
        self.alias, self.url = split_alias(where)
        """The name that requests use for its model, where it is not the engine's own."""
        self.kind = kind
        """decode (owns requests; may be a unified engine) or prefill."""
        self.circuit = Circuit(limits)
        self.draining = False
        """It gets no new requests, and leaves once it has none."""
        self.life = 0
        """Another number once its cache is empty."""
        self.alive = False
        self.info: dict[str, Any] = {}
        """What its /server_info said last."""
        self.why = "not looked at yet"
        """Why it is not alive."""
        self.seen_at = 0.0
        """When it last answered."""
        self.open: set[Upstream] = set()
        """Requests the router has with it."""
        self.turn = 0
        """When it was chosen last, in choices."""
        self.waiting_bytes = 0
        """prefill: bytes of the requests it was suggested for that have no token yet."""

    @property
    def name(self) -> str:
        """Its own name, once it has said it."""
        return str(self.info.get("engine") or self.url)

    @property
    def own_model(self) -> str:
        """The name that the engine has for its model; empty before it has said it."""
        return str(self.info.get("served_model_name") or "")

    @property
    def model(self) -> str:
        """The name that requests use for its model; empty before it is known."""
        return self.alias or self.own_model

    @property
    def pd_address(self) -> str:
        """prefill: where decode engines reach it; where it listens on every interface, at the host of its URL."""
        return reachable(str(self.info.get("pd_address") or ""), urlsplit(self.url).hostname or "127.0.0.1")

    @property
    def load(self) -> int:
        """Requests it has: those that the router knows of, or those it reported last, whichever is more."""
        said = self.info.get("load")
        rows = said.items() if isinstance(said, dict) else ()
        counts = [value for key, value in rows if key.endswith("_reqs") and isinstance(value, int)]
        return max(len(self.open), sum(counts))


class _Waiting:
    """A prefill engine, loaded with what it has not computed yet."""

    def __init__(self, engine: FleetEngine) -> None:
        self.engine = engine
        self.url, self.load, self.life = engine.url, engine.waiting_bytes, engine.life

    @property
    def turn(self) -> int:
        """When it was chosen last."""
        return self.engine.turn

    @turn.setter
    def turn(self, turn: int) -> None:
        self.engine.turn = turn


class _Named(msgspec.Struct):
    """The part of a body that says for which model it is."""

    model: str | None = None


_NAMES: Final = msgspec.json.Decoder(_Named)


class Fleet:
    """All engines; looks at each of them every `poll_s`. Engines come and go."""

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics, clock: Clock) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._limits = CircuitLimits(failures=settings.cb_failure_threshold, open_s=settings.cb_open_s)
        self.decode = [FleetEngine(url, "decode", self._limits) for url in settings.decode_urls]
        self.prefill = [FleetEngine(url, "prefill", self._limits) for url in settings.prefill_urls]
        self._policy: Policy[FleetEngine] = make_policy(settings.policy, slack=_SLACK_REQUESTS)
        self._prefill_policy: Policy[_Waiting] = make_policy(settings.policy, slack=_SLACK_BYTES)
        self._tasks: dict[FleetEngine, asyncio.Task[None]] = {}
        self._headers = share_headers(Share(), engine_secrets(settings))
        if settings.api_key:
            self._headers.append(("authorization", f"Bearer {settings.api_key}"))

    @property
    def members(self) -> list[FleetEngine]:
        """Decode engines, then prefill engines."""
        return [*self.decode, *self.prefill]

    def start(self) -> None:
        """Begin to look at all engines, each at its own pace."""
        for member in self.members:
            self._tasks[member] = asyncio.get_running_loop().create_task(self._follow(member))

    async def stop(self) -> None:
        """Stop looking; drop every open request."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self.members:
            self._take_back(member)

    # ---- engines come and go --------------------------------------------------------------------------------------

    def add(self, where: str, kind: str) -> FleetEngine:
        """An engine that came: it gets requests once it answers a look. One that is here is not drained any more.

        Raises BadRequest: it is here in another role, or as another model.
        """
        member = FleetEngine(where, kind, self._limits)
        here = self.find(member.url)
        if here is None:
            (self.decode if kind == "decode" else self.prefill).append(member)
            self._tasks[member] = asyncio.get_running_loop().create_task(self._follow(member))
            return member
        if (here.kind, here.alias) != (kind, member.alias):
            raise BadRequest("url", member.url, f"another one: it is here as {here.kind} engine {here.alias}".rstrip())
        here.draining = False
        return here

    def find(self, url: str) -> FleetEngine | None:
        """The engine at this address."""
        return next((member for member in self.members if member.url == url.rstrip("/")), None)

    def drain(self, member: FleetEngine) -> None:
        """No new requests for it; it leaves once those that it has have ended."""
        member.draining = True

    def _remove(self, member: FleetEngine) -> None:
        for members in (self.decode, self.prefill):
            if member in members:
                members.remove(member)
        self._metrics.engine_left(member.url)
        del self._tasks[member]

    # ---- looking --------------------------------------------------------------------------------------------------

    async def _follow(self, member: FleetEngine) -> None:
        looked_at = -math.inf
        while not (member.draining and not member.open):
            if self._clock.now() - looked_at >= self._settings.poll_s:
                looked_at = self._clock.now()
                await self.look(member)
            await asyncio.sleep(_DRAIN_LOOK_S if member.draining else self._settings.poll_s)
        self._remove(member)

    async def look(self, member: FleetEngine) -> None:
        """Ask one engine how it is."""
        try:
            status, body = await fetch(
                member.url, "GET", "/server_info", headers=self._headers, s_max=self._settings.poll_s_max,
                ca_certs=self._settings.ssl_ca_certs,
            )  # fmt: skip
            info = msgspec.json.decode(body) if status == 200 else {"error": reason_of(body)}
        except (UpstreamBroken, msgspec.DecodeError) as err:
            self.lost(member, str(err))
            if self._clock.now() - member.seen_at > self._settings.hang_s_max:
                self._take_back(member)
            return
        member.seen_at = self._clock.now()
        if status != 200 or not isinstance(info, dict) or info.get("draining"):
            said = info.get("error", "draining") if isinstance(info, dict) else "no JSON object"
            self.lost(member, f"{member.url} answered {status}: {said}")
            return
        member.info = info
        if info.get("degraded"):
            self.lost(member, f"{member.url} is degraded: {info['degraded']}")
            return
        member.alive, member.why = True, ""
        self._metrics.engine_up(member.url, True)

    def lost(self, member: FleetEngine, why: str) -> None:
        """No new requests for this engine until it answers a look."""
        if member.alive:
            member.life += 1
        member.alive, member.why = False, why
        self._metrics.engine_up(member.url, False)

    @staticmethod
    def _take_back(member: FleetEngine) -> None:
        for upstream in list(member.open):
            upstream.abort()

    # ---- choosing -----------------------------------------------------------------------------------------------

    @property
    def models(self) -> list[str]:
        """The names of the models of the decode engines, as far as they are known."""
        return sorted({member.model for member in self.decode if member.model})

    @property
    def has_one_model(self) -> bool:
        """Whether there is one model alone, under its own name."""
        return len(self.models) < 2 and not any(member.alias for member in self.decode)

    def model_of(self, body: bytes) -> str:
        """The model that a request asks for; empty where there is one alone: its engines know what they answer.

        Raises BadRequest (it names none), UnknownModel.
        """
        if self.has_one_model:
            return ""
        models = self.models
        try:
            named = _NAMES.decode(body).model
        except msgspec.DecodeError:
            return models[0] if models else ""  # no JSON, or a wrong one: an engine says what is wrong with it
        if named is None and len(models) == 1:
            return models[0]
        if named is None:
            raise BadRequest("model", None, f"one of {', '.join(models)}")
        if named not in models:
            raise UnknownModel(f"model: got {shown(named)}, expected one of {', '.join(models)}")
        return named

    def owners(self, model: str = "") -> list[FleetEngine]:
        """The decode engines of a model (empty: of the only one) that stay."""
        return [member for member in self.decode if not member.draining and model in ("", member.model)]

    def pick_decode(self, body: bytes, *, model: str = "", but: Collection[FleetEngine] = ()) -> FleetEngine:
        """The owner of a request, by the policy. Raises NoEngineAlive."""
        return self._policy.choose(body, self.ready(model, but=but))

    def ready(self, model: str = "", *, but: Collection[FleetEngine] = ()) -> list[FleetEngine]:
        """Those that may have a request now, at least one. An open circuit keeps requests away only while another
        engine takes them. Raises NoEngineAlive."""
        now, owners = self._clock.now(), self.owners(model)
        alive = [member for member in owners if member.alive and member not in but]
        if not alive:
            why = "; ".join(f"{member.url}: {member.why or 'failed this request'}" for member in owners)
            of = f" of {model}" if model else ""
            raise NoEngineAlive(f"front: no decode engine{of} is alive, expected one of {len(owners)} ({why[:400]})")
        return [member for member in alive if member.circuit.lets_in(now)] or alive

    def pick_prefill(self, body: bytes, *, model: str = "") -> FleetEngine | None:
        """The prefill engine for a request, by the same policy, loaded with what waits for its first token; None where
        none is alive (decode then prefills itself)."""
        alive = [
            _Waiting(member)
            for member in self.prefill
            if member.alive and member.pd_address and not member.draining and model in ("", member.model)
        ]
        return self._prefill_policy.choose(body, alive).engine if alive else None

    # ---- what became of a request -----------------------------------------------------------------------------------

    def sent(self, member: FleetEngine) -> float:
        """A request goes to it: one of the next three follows, with the time that this returns."""
        now = self._clock.now()
        member.circuit.sent(now)
        return now

    def answered(self, member: FleetEngine, sent_at: float) -> None:
        """The engine answered a request."""
        member.circuit.succeeded(sent_at)
        self._tell_circuit(member)

    def left(self, member: FleetEngine, sent_at: float) -> None:
        """The client went or set too short a time, or the engine had no room: that says nothing of the engine."""
        member.circuit.left(sent_at)

    def failed(self, member: FleetEngine, why: str, sent_at: float) -> None:
        """It answered with an error of its own, or broke."""
        if member.circuit.failed(self._clock.now(), sent_at):
            _log.warning(
                "front: %s failed %d requests in a row, it gets none for %g s: %s",
                member.url, self._limits.failures, self._limits.open_s, why,
            )  # fmt: skip
        self._tell_circuit(member)

    def circuit_of(self, member: FleetEngine) -> CircuitState:
        """Whether requests are kept away from it."""
        return member.circuit.state(self._clock.now())

    def _tell_circuit(self, member: FleetEngine) -> None:
        self._metrics.circuit(member.url, open_=self.circuit_of(member) is not CircuitState.CLOSED)

    # ---- all engines ----------------------------------------------------------------------------------------------

    async def ask_all(
        self, method: str, path: str, *, key: str = "", body: bytes = b"", s_max: float, kind: str = ""
    ) -> list[tuple[FleetEngine, int, bytes]]:
        """The same small request to every engine that is alive (of that kind, where one is given): member, status and
        body; status 0 = did not answer."""
        headers = [("authorization", f"Bearer {key}")] if key else []
        if body:
            headers.append(("content-type", "application/json"))

        async def ask(member: FleetEngine) -> tuple[FleetEngine, int, bytes]:
            try:
                status, answer = await fetch(
                    member.url, method, path, headers=headers, body=body, s_max=s_max,
                    ca_certs=self._settings.ssl_ca_certs,
                )  # fmt: skip
            except UpstreamBroken as err:
                return member, 0, str(err).encode()
            return member, status, answer

        asked = [member for member in self.members if member.alive and kind in ("", member.kind)]
        return list(await asyncio.gather(*map(ask, asked)))
