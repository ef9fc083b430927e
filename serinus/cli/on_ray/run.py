"""The group of `serinus up --ray`: engines of each role, a router on every node, and the loop that looks after them.

It lives in the command's own process. When that ends, however it ends, Ray ends its actors, and they their processes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import ray

from serinus.cli.on_ray.engine import RayEngine, State
from serinus.cli.on_ray.lines import ActorLines
from serinus.cli.on_ray.placement import shown_resources
from serinus.cli.on_ray.routers import RayRouters
from serinus.cli.on_ray.seen import Looks
from serinus.cli.shape import check_shape
from serinus.core.addresses import split_host_port
from serinus.core.clock import Clock
from serinus.core.config import RouterConfig, ServeConfig, UpConfig
from serinus.core.errors import ConfigError
from serinus.core.fleet_settings import RouteSettings
from serinus.core.ids import new_token
from serinus.core.log import get_logger
from serinus.scale import Bounds, Memory, ScalePace, plan

_log = get_logger("cli")
_LOOK_S: Final = 0.5
"""Between two looks at nodes, routers and engines."""
_SCALE_S: Final = 5.0
"""Between two decisions on the number of engines."""
_REACH_S_MAX: Final = 5.0
_ROUTER_POLL_S: Final = 0.5


def run_on_ray(config: UpConfig, clock: Clock, started: float, ready_fd: int | None) -> int:
    """Place engines and routers on the cluster, look after them until told to stop; the exit code.

    Raises ConfigError: no such cluster, or settings that do not go with one.
    """
    if config.server.ssl_certfile:
        raise ConfigError("--ssl-certfile: got one with --ray, expected none: end TLS before the routers of the nodes")
    for role in _roles(config):
        check_shape(config.engine(role=role, name=role, port=0, threads=1))
    _join(config)
    try:
        return asyncio.run(_Group(config, clock, started, ready_fd).live())
    finally:
        ray.shutdown()


def _roles(config: UpConfig) -> tuple[str, ...]:
    """Of the engines that there are."""
    return ("prefill", "decode") if config.up.prefill else ("unified",)


def _join(config: UpConfig) -> None:
    """Become a driver of the cluster. Raises ConfigError."""
    address = config.ray.ray_address
    if address != "auto":
        host, port = split_host_port(address, "config: --ray-address")
        try:
            socket.create_connection((host, port), _REACH_S_MAX).close()
        except OSError as err:
            raise ConfigError(
                f"--ray-address is {address!r}, which does not answer ({err}), expected the head of a Ray cluster"
                f" (`ray start --head` prints it)"
            ) from err
    try:
        ray.init(
            address=address, namespace=config.ray.ray_namespace, logging_level=logging.WARNING, log_to_driver=False
        )
    except (ConnectionError, RuntimeError, ValueError) as err:
        raise ConfigError(
            f"--ray-address is {address!r}: {str(err).strip().splitlines()[0]}, expected a Ray cluster of this version"
            f" ({ray.__version__}); `ray start --head` starts one here"
        ) from err


class _Group:
    """Engines and routers on one cluster."""

    def __init__(self, config: UpConfig, clock: Clock, started: float, ready_fd: int | None) -> None:
        server = config.server
        self._made_key = not (server.admin_api_key or server.api_key)
        if self._made_key:  # by it the routers are told of engines
            server = replace(server, admin_api_key=new_token().hex())
        pd = replace(config.pd, cluster_secret=config.pd.cluster_secret or new_token().hex())
        resources = ray.cluster_resources()
        self._has_gpus = bool(resources.get("GPU"))
        kernels = replace(config.kernels, threads=config.kernels.threads or 1)
        self._config = replace(config, server=server, pd=pd, kernels=kernels)
        on_gpus = {role: self._settings(role, role).model.device == "cuda" for role in _roles(config)}
        _log.info(
            "serinus: a Ray cluster of %d nodes with %s: %s", len(ray.nodes()), shown_resources(resources),
            ", ".join(f"{'a GPU' if gpu else 'cores'} for each rank of {role}" for role, gpu in on_gpus.items()),
        )  # fmt: skip
        self._clock = clock
        self._started = started
        self._ready_fd = ready_fd
        self._s_max = server.drain_s_max
        self._lines = ActorLines(server.log_format, clock)
        route = RouteSettings(poll_s=_ROUTER_POLL_S, cluster_secret=pd.cluster_secret, policy=config.up.policy)
        self._routers = RayRouters(RouterConfig(server=server, route=route), clock, self._lines)
        self._engines: dict[RayEngine, asyncio.Task[None]] = {}
        self._bounds = {
            role: Bounds(low=low, high=high)
            for role in ("prefill", "decode")
            for low, high in [config.ray.between(role, getattr(config.up, role))]
        }
        self._code = 0

    async def live(self) -> int:
        """Start everything, look after it, stop everything; the exit code."""
        told, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told, told)
        work = asyncio.create_task(self._work())
        stop = asyncio.create_task(told.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            stop.cancel()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self._stop()
        return self._code

    def _told(self, told: asyncio.Event) -> None:
        if told.is_set():
            self._s_max = 0.0
        else:
            _log.info("serinus: draining, at most %g s; a second signal stops now", self._s_max)
        told.set()

    async def _work(self) -> None:
        for role in ("prefill", "decode"):
            self._become(role, getattr(self._config.up, role))
        scaling: asyncio.Task[None] | None = None
        is_ready = False
        while not self._code:  # not ready in time
            await self._routers.look([(each.url, each.kind) for each in self._engines if each.state is State.READY])
            for engine in [each for each in self._engines if each.state is State.GONE]:
                await self._engines.pop(engine)
                _log.info("serinus: %s is gone", engine.name)
                if engine.fatal:
                    self._fail(f"{engine.name} {engine.why}", 2 if engine.is_first and not engine.report else 1)
            if self._code:
                return
            staying = [each for each in self._engines if each.stays]
            for engine in staying if is_ready else ():
                engine.is_first = False
            if not is_ready and all(self._routers.know(each.url) for each in staying):
                is_ready = True
                self._say_ready(staying)
                if self._config.ray.scales:
                    scaling = asyncio.create_task(self._scale())
            elif not is_ready and self._clock.now() - self._started > self._config.up.ready_s_max:
                late = "; ".join(
                    f"{each.name} {each.state}{each.why and ': '}{each.why}" for each in staying if not each.url
                )
                self._fail(f"not ready within {self._config.up.ready_s_max:g} s: {late}", 1)
            if scaling is not None and scaling.done():
                scaling.result()
            await asyncio.sleep(_LOOK_S)

    def _fail(self, reason: str, code: int) -> None:
        _log.error("serinus: %s", reason)
        self._code = code

    # ---- the number of engines --------------------------------------------------------------------------------

    async def _scale(self) -> None:
        memory, looks = Memory(), Looks()
        pace = ScalePace(up_s=self._config.ray.scale_up_s, down_s=self._config.ray.scale_down_s)
        while True:
            await asyncio.sleep(_SCALE_S)
            seen = looks.look(self._clock.now(), list(self._engines), self._routers.engines)
            made = plan(seen, memory, prefill=self._bounds["prefill"], decode=self._bounds["decode"], pace=pace)
            memory = made.memory
            for why in made.why:
                _log.info("serinus: scale %s", why)
            self._become("prefill", made.prefill)
            self._become("decode", made.decode)

    def _become(self, role: str, count: int) -> None:
        """Add engines of a role, or let some leave: those that are not ready first, then the last that came."""
        staying = [each for each in self._engines if each.kind == role and each.stays]
        staying.reverse()
        for engine in sorted(staying, key=lambda each: each.state is State.READY)[: max(0, len(staying) - count)]:
            engine.leave()
        taken = {each.name for each in self._engines}
        kind = "unified" if role == "decode" and not self._config.up.prefill else role
        for _ in range(count - len(staying)):
            name = next(name for number in range(len(taken) + 1) if (name := f"{kind}-{number}") not in taken)
            taken.add(name)
            config = self._settings(kind, name)
            engine = RayEngine(
                config=config,
                gpus=config.model.device == "cuda",
                clock=self._clock,
                lines=self._lines,
                namespace=self._config.ray.ray_namespace,
                drain_s_max=self._config.server.drain_s_max,
                left_routers=self._routers.left,
                no_restart=self._config.up.no_restart,
            )
            self._engines[engine] = asyncio.create_task(engine.live())

    def _settings(self, kind: str, name: str) -> ServeConfig:
        config = self._config
        own = config.engine(role=kind, name=name, port=0, threads=config.kernels.threads or 1)
        is_gpu = own.model.device == "cuda" or (own.model.device == "auto" and self._has_gpus)
        model = replace(own.model, device="cuda" if is_gpu else "cpu")
        return replace(own, model=model, memory=config.memory_of(kind))  # its devices are its own

    # ---- what is said -----------------------------------------------------------------------------------------

    def _say_ready(self, engines: Sequence[RayEngine]) -> None:
        urls = self._routers.urls
        if self._config.server.log_format == "text":
            _table(engines, urls, self._clock.now() - self._started)
        if not self._config.server.no_dashboard:
            key = f"#key={self._config.server.admin_api_key}" if self._made_key else ""
            _log.info("serinus: the dashboard: %s/dashboard%s", urls[0], key)
        _log.info("The server is fired up and ready to roll! %s", " ".join(urls))
        if self._ready_fd is not None:
            report: dict[str, Any] = {
                "url": urls[0], "routers": urls, "engines": {each.name: each.report for each in engines},
                "seconds": self._clock.now() - self._started,
            }  # fmt: skip
            os.write(self._ready_fd, json.dumps(report).encode() + b"\n")
            os.close(self._ready_fd)

    async def _stop(self) -> None:
        """Routers first: what runs through them ends. Then engines, all together."""
        await self._routers.stop(self._s_max)
        for task in self._engines.values():
            task.cancel()
        await asyncio.gather(*self._engines.values(), return_exceptions=True)
        await asyncio.gather(*(engine.end(5.0 if self._s_max else 0.0) for engine in self._engines))
        await self._lines.end()
        _log.info("serinus: all engines have stopped")


def _table(engines: Sequence[RayEngine], urls: Sequence[str], seconds: float) -> None:
    """Print where each engine is."""
    from rich.table import Table

    from serinus.cli.show import console

    table = Table(title=f"serinus up: ready in {seconds:.1f} s, routers on {', '.join(urls)}", title_justify="left")
    for name in ("engine", "nodes", "http", "control", "KV tokens", "ready in"):
        table.add_column(name, justify="right" if name in ("KV tokens", "ready in") else "left", no_wrap=True)
    for each in engines:
        report = each.report
        table.add_row(
            each.name, ", ".join(each.nodes), each.url, report["pd_address"] or "-", f"{report['tokens']:,}",
            f"{report['seconds']:.1f} s",
        )  # fmt: skip
    console(stderr=True).print(table)
