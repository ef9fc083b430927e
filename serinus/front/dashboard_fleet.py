"""/dashboard of a router: the events of all its engines in one stream, each named by the address of its engine.

A page at a router has a stream to each engine. What they send is passed on as it is, with a line `event: URL` before
it; where the page reads slowly they wait, and their engines leave deltas out. One that is gone is asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qs, urlencode

import msgspec

from serinus.core.errors import BadRequest, CapacityError
from serinus.front.dashboard import Subscription, down_event, stream
from serinus.front.exchange import HttpExchange
from serinus.front.fleet import Fleet, FleetEngine, reason_of
from serinus.front.upstream import Upstream, UpstreamBroken, fetch

_PAGES_MAX: Final = 8
_FLEET_S: Final = 2.0
"""Seconds between two looks at which engines there are."""
_RETRY_S: Final = 1.0
_LOOK_S_MAX: Final = 30.0
_WAITING_MAX: Final = 64
"""Events of all engines that wait for a page."""


class _Joined(Subscription):
    """Events of several engines; those that bring them wait while there are too many."""

    def __init__(self) -> None:
        super().__init__()
        self._room = asyncio.Event()

    async def pass_on(self, event: bytes) -> None:
        while len(self._events) >= _WAITING_MAX and not self.closed:
            self._room.clear()
            await self._room.wait()
        self._events.append(event)
        self._news.set()

    async def take(self, s_max: float) -> bytes:
        events = await super().take(s_max)
        self._room.set()
        return events


class FleetDashboard:
    """The dashboard of one router."""

    def __init__(self, fleet: Fleet, *, key: str, ca_certs: str = "") -> None:
        """`key`: opens operations at the engines. `ca_certs`: as of Upstream."""
        self._fleet, self._ca_certs = fleet, ca_certs
        self._headers = [("authorization", f"Bearer {key}")] if key else []
        self._open = 0
        self._draining = False

    def drain(self) -> None:
        """This router ends: its streams end too."""
        self._draining = True

    async def events(self, exchange: HttpExchange) -> None:
        """The events of all engines until the page is closed. Raises CapacityError."""
        if self._open >= _PAGES_MAX:
            raise CapacityError(f"dashboard: {_PAGES_MAX} pages are open, expected less")
        self._open += 1
        one = _Joined()
        following = asyncio.get_running_loop().create_task(self._follow_all(one))
        try:
            await stream(exchange, one, lambda: self._draining)
        finally:
            self._open -= 1
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def look(self, exchange: HttpExchange) -> None:
        """What the engine named in the query says. Raises BadRequest."""
        query = {name: values[0] for name, values in parse_qs(exchange.query).items()}
        url = query.pop("engine", "")
        member = self._fleet.find(url)
        if member is None:
            raise BadRequest("engine", url, f"one of {', '.join(each.url for each in self._fleet.members)}")
        status, body = await fetch(
            member.url, "GET", f"/dashboard/look?{urlencode(query)}", headers=self._headers, s_max=_LOOK_S_MAX,
            ca_certs=self._ca_certs,
        )  # fmt: skip
        await exchange.json(body, status)

    async def _follow_all(self, one: _Joined) -> None:
        """Begin to follow engines as they come, tell which there are."""
        following: dict[FleetEngine, asyncio.Task[None]] = {}
        told = b""
        try:
            while True:
                members = self._fleet.members
                for member in members:
                    if member not in following:
                        following[member] = asyncio.get_running_loop().create_task(self._follow(member, one))
                for member in following.keys() - set(members):
                    following.pop(member).cancel()
                event = b"data: " + msgspec.json.encode({"kind": "fleet", "members": list(map(_about, members))})
                if event != told:
                    told = event
                    await one.pass_on(event + b"\n\n")
                await asyncio.sleep(_FLEET_S)
        finally:
            for task in following.values():
                task.cancel()
            await asyncio.gather(*following.values(), return_exceptions=True)

    async def _follow(self, member: FleetEngine, one: _Joined) -> None:
        name = f"event: {member.url}\n".encode()
        while True:
            try:
                why = await self._pass_events(member, lambda event: one.pass_on(name + event))
            except UpstreamBroken as error:
                why = str(error)
            await one.pass_on(name + down_event(why))
            await asyncio.sleep(_RETRY_S)

    async def _pass_events(self, member: FleetEngine, pass_on: Callable[[bytes], Any]) -> str:
        """Until the stream ends; why it did."""
        async with Upstream(member.url, connect_s_max=_LOOK_S_MAX, ca_certs=self._ca_certs) as upstream:
            await upstream.send("GET", "/dashboard/events", self._headers, b"")
            if upstream.status != 200:
                return f"{upstream.status}: {reason_of(await upstream.body())}"
            rest = b""
            async for part in upstream.parts():
                *whole, rest = (rest + part).split(b"\n\n")
                for event in whole:
                    if event.startswith(b"data:"):
                        await pass_on(event + b"\n\n")
        return "its stream ended"


def _about(member: FleetEngine) -> dict[str, Any]:
    return {
        "url": member.url, "kind": member.kind, "name": member.name, "alive": member.alive, "why": member.why[:300],
        "draining": member.draining, "model": member.model,
    }  # fmt: skip
