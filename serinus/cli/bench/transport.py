"""One request of the load generator: sends it and notes which bytes of the answer came when.

Understanding them waits until the clock has stopped. Knows nothing of JSON, events or models.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from serinus.core.clock import Clock
from serinus.core.errors import ConfigError
from serinus.front import Upstream, UpstreamBroken


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Address and keys of the server under test."""

    url: str
    """Address as http(s)://host:port, without a path."""
    path: str = ""
    """What goes before every path, where the server is behind a proxy."""
    api_key: str = ""
    """Sent as a bearer token."""

    @classmethod
    def from_url(cls, url: str, api_key: str = "") -> Target:
        """The server of a --base-url. Raises ConfigError for anything but http(s)://host:port."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"bench: --base-url is {url!r}, expected http://host:port or https://host:port")
        return cls(url=f"{parts.scheme}://{parts.netloc}", path=parts.path.rstrip("/"), api_key=api_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Bytes of the body that came together."""

    time: float
    data: bytes


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """One request and what came back."""

    sent: float = 0.0
    """When it was sent."""
    ended: float = 0.0
    """When the last byte came, or the connection broke."""
    status: int = 0
    """HTTP status; 0 = no answer at all."""
    arrivals: list[Arrival] = field(default_factory=list)
    """The body, as it came."""
    failure: str = ""
    """Why there is no whole answer; empty where there is one."""

    @property
    def body(self) -> bytes:
        """All of the body that came."""
        return b"".join(arrival.data for arrival in self.arrivals)


async def trace_request(
    target: Target, method: str, path: str, body: bytes, clock: Clock, *, s_max: float = 3600.0
) -> RequestTrace:
    """Send one request and wait for its whole answer. What goes wrong on the way is in `failure`, never raised."""
    headers = [("content-type", "application/json")]
    if target.api_key:
        headers.append(("authorization", f"Bearer {target.api_key}"))
    trace = RequestTrace(sent=clock.now())
    add, now = trace.arrivals.append, clock.now
    try:
        async with asyncio.timeout(s_max), Upstream(target.url, connect_s_max=s_max) as upstream:
            await upstream.send(method, target.path + path, headers, body)
            trace.status = upstream.status
            async for data in upstream.parts():
                add(Arrival(time=now(), data=data))
    except TimeoutError:
        trace.failure = f"no whole answer within {s_max} s"
    except UpstreamBroken as error:
        whole = "the server closed the connection before its answer was whole"
        trace.failure = f"{whole} ({error})" if trace.status else str(error)
    trace.ended = trace.arrivals[-1].time if trace.arrivals and not trace.failure else clock.now()
    return trace
