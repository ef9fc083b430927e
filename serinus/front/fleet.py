"""The engines a router knows: which are alive, how loaded they are, and which of them a request goes to."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import xxhash

from serinus.core.addresses import reachable
from serinus.core.clock import Clock
from serinus.core.errors import CapacityError
from serinus.front.metrics import RouterMetrics
from serinus.front.settings import RouterSettings
from serinus.front.upstream import Upstream, UpstreamBroken, fetch

__all__ = ["Fleet", "FleetEngine", "NoEngineAlive", "reason_of"]

_PROMPT_KEYS = (b'"messages"', b'"prompt"', b'"text"', b'"input_ids"')


def reason_of(body: bytes) -> str:
    """The words of an answer that is an error, 400 characters at most."""
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:400].decode(errors="replace")
    error = said.get("error", said) if isinstance(said, dict) else said
    return str(error.get("message", error) if isinstance(error, dict) else error)[:400]


class NoEngineAlive(CapacityError):
    """No engine is alive that could own the request."""

    kind = "service_unavailable_error"


class FleetEngine:
    """One engine as the router sees it."""

    def __init__(self, url: str, kind: str) -> None:
        self.url = url.rstrip("/")
        self.kind = kind
        """decode (owns requests; may be a unified engine) or prefill."""
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


class Fleet:
    """All engines; looks at each of them every `poll_s`."""

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics, clock: Clock) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self.decode = [FleetEngine(url, "decode") for url in settings.decode_urls]
        self.prefill = [FleetEngine(url, "prefill") for url in settings.prefill_urls]
        self._turn = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._headers = [("authorization", f"Bearer {settings.api_key}")] if settings.api_key else []

    @property
    def members(self) -> list[FleetEngine]:
        """Decode engines, then prefill engines."""
        return [*self.decode, *self.prefill]

    def start(self) -> None:
        """Begin to look at all engines, each at its own pace."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._follow(member)) for member in self.members]

    async def stop(self) -> None:
        """Stop looking; drop every open request."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self.members:
            self._take_back(member)

    async def _follow(self, member: FleetEngine) -> None:
        while True:
            await self.look(member)
            await asyncio.sleep(self._settings.poll_s)

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
        member.alive, member.why = False, why
        self._metrics.engine_up(member.url, False)

    @staticmethod
    def _take_back(member: FleetEngine) -> None:
        for upstream in list(member.open):
            upstream.abort()

    # ---- choosing -----------------------------------------------------------------------------------------------

    def pick_decode(self, body: bytes, *, but: Collection[FleetEngine] = ()) -> FleetEngine:
        """The owner of a request: the least loaded, or the one its prompt's beginning prefers. Raises NoEngineAlive."""
        alive = [member for member in self.decode if member.alive and member not in but]
        if not alive:
            why = "; ".join(f"{member.url}: {member.why or 'failed this request'}" for member in self.decode)
            raise NoEngineAlive(f"front: no decode engine is alive, expected one of {len(self.decode)} ({why[:400]})")
        least = self._least(alive, [member.load for member in alive])
        count = self._settings.affinity_chars
        if not count or len(alive) == 1:
            return least
        start = next((at for key in _PROMPT_KEYS if (at := body.find(key)) >= 0), 0)
        head = body[start : start + count]
        liked = max(alive, key=lambda member: xxhash.xxh3_64_intdigest(head + member.url.encode()))
        return liked if liked.load <= least.load + self._settings.affinity_load_max else least

    def pick_prefill(self) -> FleetEngine | None:
        """The prefill engine with the least work waiting; None where none is alive (decode then prefills itself)."""
        alive = [member for member in self.prefill if member.alive and member.pd_address]
        if not alive:
            return None
        return self._least(alive, [member.waiting_bytes for member in alive])

    def _least(self, members: Sequence[FleetEngine], loads: Sequence[int]) -> FleetEngine:
        """Of equally loaded ones, the one that was chosen longest ago."""
        low = min(loads)
        best = [member for member, load in zip(members, loads, strict=True) if load == low]
        chosen = min(best, key=lambda member: member.turn)
        self._turn += 1
        chosen.turn = self._turn
        return chosen

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
