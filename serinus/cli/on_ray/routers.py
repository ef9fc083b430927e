"""A router on every node of a Ray cluster, each told of the same engines: a client may ask any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serinus.cli.on_ray.actors import RouterHost
from serinus.cli.on_ray.engine import end_actors, new_actor
from serinus.cli.on_ray.lines import ActorLines
from serinus.core.addresses import http_url, is_wildcard
from serinus.core.clock import Clock
from serinus.core.config import RouterConfig
from serinus.core.errors import ConfigError, SerinusError
from serinus.core.log import get_logger

_log = get_logger("cli")
_TELL_S_MAX: Final = 15.0
_RETRY_S: Final = 5.0
"""A router that could not be started is tried again after this."""


class _Router:
    """The router of one node."""

    def __init__(self, node: str, address: str) -> None:
        self.node = node
        self.name = f"router-{node[:8]}"
        self.address = address
        self.actor: Any = None
        self.url = ""
        self.view: dict[str, Any] = {}
        """What it said last: `workers` and `engines`."""
        self.retry_at = 0.0


class RayRouters:
    """The routers of one group."""

    def __init__(self, config: RouterConfig, clock: Clock, lines: ActorLines) -> None:
        """`config`: what they are told; the first on an address has the port, others there get a free one."""
        self._config = config
        self._clock = clock
        self._lines = lines
        self._routers: dict[str, _Router] = {}
        """By the id of the node."""

    @property
    def urls(self) -> list[str]:
        """Of those that are ready, in the order of their nodes."""
        return [router.url for router in self._routers.values() if router.url]

    @property
    def engines(self) -> list[dict[str, Any]]:
        """The engines as the first router that knows any saw them last: of its /server_info."""
        return next((each.view["engines"] for each in self._routers.values() if each.view.get("engines")), [])

    def know(self, url: str) -> bool:
        """Whether every router has this engine, and found it alive."""
        views = [router.view.get("workers", []) for router in self._routers.values() if router.url]
        return bool(views) and all(any(w["url"] == url and w["is_healthy"] for w in view) for view in views)

    def left(self, url: str) -> bool:
        """Whether no router has requests for this engine any more."""
        return all(
            worker["url"] != url for router in self._routers.values() for worker in router.view.get("workers", [])
        )

    async def look(self, wanted: Sequence[tuple[str, str]]) -> None:
        """Start routers on nodes that came, forget those of nodes that went, tell all of these engines (URL and role).

        Raises ConfigError: no router at all can be started.
        """
        nodes = {each["NodeID"]: each for each in await asyncio.to_thread(ray.nodes) if each["Alive"]}
        for gone in set(self._routers) - set(nodes):
            router = self._routers.pop(gone)
            _log.warning("serinus: the node at %s is gone, and its router %s", router.address, router.url)
        for node, facts in nodes.items():
            if node not in self._routers:
                self._routers[node] = _Router(node, facts["NodeManagerAddress"])
        # One after the other while they start: which one of an address has its port must be known.
        for router in list(self._routers.values()):
            if not router.url and self._clock.now() >= router.retry_at:
                await self._start(router)
        await asyncio.gather(*(self._tell(each, wanted) for each in self._routers.values() if each.url))

    async def _start(self, router: _Router) -> None:
        server = replace(self._config.server, name=router.name)
        if any(each.url and each.address == router.address for each in self._routers.values()):
            server = replace(server, port=0)
        strategy = NodeAffinitySchedulingStrategy(router.node, soft=False)
        try:
            router.actor = await new_actor(
                RouterHost, router.name, self._lines, num_cpus=0, scheduling_strategy=strategy
            )
            url = await router.actor.start.remote(replace(self._config, server=server).to_json())
        except (RayError, ConfigError) as err:
            why = str(err).strip().splitlines()[-1]
            await self._lose(router, f"does not start: {why}")
            if isinstance(err, ConfigError) or (not self.urls and "exit code 2 " in why):
                raise ConfigError(f"cli: the router on {router.address}: {why}") from err
            return
        port = int(url.rsplit(":", 1)[1])
        router.url = http_url(router.address if is_wildcard(server.host) else server.host, port)
        _log.info("serinus: router on %s, on the node at %s", router.url, router.address)

    async def _tell(self, router: _Router, wanted: Sequence[tuple[str, str]]) -> None:
        try:
            async with asyncio.timeout(_TELL_S_MAX):
                router.view = await router.actor.tell.remote(list(wanted))
        except (RayError, SerinusError, TimeoutError) as err:
            if router.node in self._routers and not (await self._alive(router)):
                await self._lose(router, f"is lost: {str(err).strip().splitlines()[-1:] or type(err).__name__}")

    @staticmethod
    async def _alive(router: _Router) -> bool:
        try:
            async with asyncio.timeout(_TELL_S_MAX):
                return bool((await router.actor.state.remote())["alive"])
        except (RayError, TimeoutError):
            return False

    async def _lose(self, router: _Router, why: str) -> None:
        _log.warning("serinus: the router on %s %s; tried again in %g s", router.address, why, _RETRY_S)
        router.url, router.view, router.retry_at = "", {}, self._clock.now() + _RETRY_S
        if router.actor is not None:
            await end_actors([router.actor], 0.0)
            router.actor = None

    async def stop(self, s_max: float) -> None:
        """Let each answer what it has, for `s_max` seconds at most, and end."""
        await end_actors([each.actor for each in self._routers.values() if each.actor is not None], s_max)
