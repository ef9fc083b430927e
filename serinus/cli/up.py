"""`serinus up`: prefill engines, decode engines and the router before them, on this machine, from one command.

Every engine is a `serinus serve` of its own on loopback; the router runs here. An engine that dies is started again
(with growing pauses); when this process ends, however it ends, all of them end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from serinus.cli.parser import Command, add_settings, make_parser, need_model, read_config
from serinus.cli.processes import read_report, start_server, stop_server, told_to_end
from serinus.cli.router import drain_within, router_settings
from serinus.cli.shape import check_shape
from serinus.core.addresses import http_url
from serinus.core.clock import Clock, WallClock
from serinus.core.config import ServeConfig, UpConfig
from serinus.core.cores import engine_threads, threads_env
from serinus.core.errors import ConfigError
from serinus.core.fleet_settings import RouteSettings
from serinus.core.free_ports import free_ports
from serinus.core.heap import settle_heap
from serinus.core.lifeline import end_with_parent
from serinus.core.log import child_line, get_logger, setup_logging
from serinus.models import check_path

if TYPE_CHECKING:
    from serinus.front import Fleet, HttpServer, ServerTls

_log = get_logger("cli")
_BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses before an engine is started again; the last one repeats."""
_LOOK_EVERY_S = 0.5
"""Between two looks of the router at an engine."""
_LOOK_PAUSE_S = 0.05
"""Between two looks at an engine that has just said it is ready."""
_STEADY_S = 60.0
"""An engine that lived this long starts with the first pause again."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(slots=True, kw_only=True)
class Member:
    """One engine of the group."""

    config: ServeConfig
    gpus: tuple[int, ...]
    """Those of its ranks, before all others that it may read; empty = as this process sees them."""
    process: asyncio.subprocess.Process | None = None
    report: dict[str, Any] = field(default_factory=dict)
    """What it said when it was ready."""
    restarts: int = 0

    @property
    def name(self) -> str:
        return self.config.engine_name

    @property
    def url(self) -> str:
        return http_url("127.0.0.1", self.config.server.port)


def members(config: UpConfig) -> list[Member]:
    """The engines of a group, prefill first, each with its port and its share of the cores."""
    roles = ["prefill"] * config.up.prefill + ["decode" if config.up.prefill else "unified"] * config.up.decode
    threads = engine_threads(config.kernels.threads, sum(config.ranks_of(role).size for role in roles))
    group: list[Member] = []
    for role, port in zip(roles, free_ports(len(roles)), strict=True):
        number = sum(member.config.role == role for member in group)
        name = f"{role}-{number}"
        own = config.engine(role=role, name=name, port=port, threads=threads)
        if config.up.gpus_of(role) and own.model.device == "auto":  # else it would take the CPU where there is no GPU
            own = replace(own, model=replace(own.model, device="cuda"))
        group.append(Member(config=own, gpus=visible_gpus(config, role, number)))
    return group


def visible_gpus(config: UpConfig, role: str, number: int) -> tuple[int, ...]:
    """GPUs in the order in which one engine sees them: its own, then those of the others, as it may read memory there;
    empty = no flag names any."""
    if not (config.up.gpus_of("prefill") or config.up.gpus_of("decode")):
        return ()
    roles = {"prefill": config.up.prefill, "decode": config.up.decode}
    others = {gpu for other, count in roles.items() for n in range(count) for gpu in config.gpus_of(other, n)}
    own = config.gpus_of(role, number)
    return (*own, *sorted(others - {*own}))


def gpu_env(gpus: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of an engine that sees these GPUs; numbers are those of CUDA_VISIBLE_DEVICES where it is set.

    Raises ConfigError: that names fewer.
    """
    seen = [word for word in environment.get(_VISIBLE, "").split(",") if word]
    if not gpus:
        return dict(environment)
    if seen and max(gpus) >= len(seen):
        raise ConfigError(
            f"config: GPU {max(gpus)} of {_VISIBLE}={','.join(seen)} is named, expected below {len(seen)}"
        )
    return {**environment, _VISIBLE: ",".join(seen[gpu] if seen else str(gpu) for gpu in gpus)}


def run(command: Command, words: Sequence[str]) -> int:
    """Serve until told to stop. Exit code 0, or 1 when engines do not come up.

    Raises UsageProblem without a model, ConfigError for wrong settings.
    """
    clock = WallClock()
    started = clock.now()
    parser = make_parser(command)
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)  # gets a line of JSON when all are ready
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # the process that started this one: ends with it
    add_settings(parser, UpConfig, positional_model=True)
    config, arguments = read_config(UpConfig, parser, words)
    if arguments.parent is not None:
        end_with_parent(arguments.parent, signal.SIGTERM)
    need_model(command, config.model.model_path)
    setup_logging(config.server.log_level, "up", config.server.log_format)
    if config.server.otlp_traces_endpoint:
        from serinus.front import check_endpoint

        check_endpoint(config.server.otlp_traces_endpoint)
    if config.ray.ray:
        try:
            from serinus.cli.on_ray.run import run_on_ray
        except ModuleNotFoundError as err:
            if err.name != "ray":
                raise
            raise ConfigError("--ray: ray is not installed, expected it: pip install -e '.[ray]'") from err
        return run_on_ray(config, clock, started, arguments.ready_fd)
    check_path(config.model.model_path)  # on a cluster it may be a path of the nodes alone
    return asyncio.run(_up(config, clock, started, arguments.ready_fd))


async def _up(config: UpConfig, clock: Clock, started: float, ready_fd: int | None) -> int:
    told = told_to_end(config.server)
    from serinus.front import KeyFile, bind, server_tls

    if config.server.api_keys_file:
        KeyFile(config.server.api_keys_file)  # a wrong one is refused before anything starts
    tls = server_tls(config.server)
    with bind(config.server.host, config.server.port) as sock:
        return await _Group(config, sock, tls, clock, started, ready_fd).live(told)


def _check(member: Member) -> None:
    """Refuse ranks, GPUs or planned faults that this engine's role or model cannot have. Raises ConfigError."""
    try:
        gpu_env(member.gpus, threads_env(1))
        check_shape(member.config)
    except ConfigError as err:
        raise ConfigError(f"{err} (of {member.name})") from err


class _Group:
    """The engines of `serinus up`, and the router."""

    def __init__(
        self, config: UpConfig, sock: socket.socket, tls: ServerTls | None, clock: Clock, started: float,
        ready_fd: int | None,
    ) -> None:  # fmt: skip
        self._config = config
        self._ready_fd = ready_fd
        self._sock = sock
        self._clock = clock
        self._started = started
        self._members = members(config)
        for member in self._members:
            _check(member)
        self._code = 0
        self._ending = False
        self._tls = tls
        self._url = http_url(config.server.host, sock.getsockname()[1], tls=tls is not None)
        self._readers: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """Set when a member became ready."""

    async def live(self, told: asyncio.Event) -> int:
        """Start everything, route, stop everything; the exit code. `told`: see `told_to_end`."""
        for member in self._members:
            await self._spawn(member)
        from serinus.front import HttpServer, create_router_app, router_limits

        config = self._config
        route = RouteSettings(
            decode_urls=tuple(member.url for member in self._members if member.config.role != "prefill"),
            prefill_urls=tuple(member.url for member in self._members if member.config.role == "prefill"),
            poll_s=_LOOK_EVERY_S,
            cluster_secret=config.pd.cluster_secret,
            policy=config.up.policy,
        )
        app = create_router_app(router_settings(config.server, route))
        self._fleet: Fleet = app.state.router.fleet
        self._end_streams: Callable[[], None] = app.state.router.dashboard.drain
        self._server: HttpServer = HttpServer(
            app,
            self._sock,
            on_drain=self._drain,
            limits=router_limits(),
            metrics=app.state.router.metrics,
            tls=self._tls,
            keys=app.state.router.keys,
        )
        tasks = [asyncio.create_task(self._rise()), asyncio.create_task(self._stop_once(told))]
        settle_heap()
        try:
            await self._server.serve(sockets=[self._sock])
        finally:
            self._ending = True
            for task in tasks:
                task.cancel()
            await self._stop_all()
        return self._code

    async def _stop_once(self, told: asyncio.Event) -> None:
        await told.wait()
        self._server.stop()

    def _drain(self) -> None:
        self._ending = True
        self._end_streams()
        if not self._code:
            drain_within(self._server, self._config.server.drain_s_max)

    # ---- start ------------------------------------------------------------------------------------------------

    async def _spawn(self, member: Member) -> None:
        """Start one engine, and follow its output from now on."""
        member.report = {}
        member.process, read_end = await start_server(
            member.config,
            env=gpu_env(member.gpus, threads_env(member.config.kernels.threads or 1)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._keep(self._echo(member, member.process))
        self._keep(self._await_report(member, read_end))

    def _keep(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)

    async def _echo(self, member: Member, process: asyncio.subprocess.Process) -> None:
        """Print the lines of a child with its name before them."""
        assert process.stdout is not None, "cli: a child without stdout"
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line longer than the reader's limit was dropped
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            shown = child_line(text, member.name, self._clock.unix(), self._config.server.log_format)
            print(shown, file=sys.stderr, flush=True)

    async def _await_report(self, member: Member, read_end: int) -> None:
        """A child that is ready says so; nothing where it dies before."""
        report = await read_report(read_end)
        if report is not None:
            await self._let_router_see(member)
            member.report = report
            if member.restarts:
                _log.info("serinus: %s is back after %.1f s", member.name, member.report["seconds"])
        self._changed.set()

    async def _let_router_see(self, member: Member) -> None:
        """Return once the router knows that this engine is there: "ready" is said only when requests are answered."""
        for seen in self._fleet.members:
            while seen.url == member.url and not seen.alive:
                await self._fleet.look(seen)
                await asyncio.sleep(0 if seen.alive else _LOOK_PAUSE_S)

    async def _rise(self) -> None:
        """Wait until all engines are ready, show the table, then watch them."""
        watches = [asyncio.create_task(self._watch(member)) for member in self._members]
        try:
            await asyncio.wait_for(self._all_ready(), self._config.up.ready_s_max)
            self._say_ready()
            await asyncio.gather(*watches)
        except TimeoutError:
            late = [member.name for member in self._members if not member.report]
            self._fail(f"{', '.join(late)} not ready within {self._config.up.ready_s_max:g} s", 1)
        finally:
            for watch in watches:
                watch.cancel()

    async def _all_ready(self) -> None:
        while not all(member.report for member in self._members):
            self._changed.clear()
            await self._changed.wait()

    def _say_ready(self) -> None:
        seconds = self._clock.now() - self._started
        if self._config.server.log_format == "text":
            group_table(self._members, self._url, seconds)
        if not self._config.server.no_dashboard:
            _log.info("serinus: the dashboard: %s/dashboard", self._url)
        _log.info("The server is fired up and ready to roll! %s", self._url, extra={"url": self._url})
        if self._ready_fd is not None:
            engines = {member.name: member.report for member in self._members}
            report = {"url": self._url, "seconds": seconds, "engines": engines}
            os.write(self._ready_fd, json.dumps(report).encode() + b"\n")
            os.close(self._ready_fd)

    # ---- life and end -----------------------------------------------------------------------------------------

    async def _watch(self, member: Member) -> None:
        """Start an engine again when it dies; before the group was ready, its death is the end of all."""
        while True:
            assert member.process is not None, "cli: a member without a process"
            born = self._clock.now()
            code = await member.process.wait()
            if self._ending:
                return
            for seen in self._fleet.members:
                if seen.url == member.url:
                    self._fleet.lost(seen, f"{member.name} ended with exit code {code}")
            was_ready = bool(member.report or member.restarts)  # one that dies while it starts again is tried again
            if not was_ready or self._config.up.no_restart or code == 2:
                when = "and is not restarted" if was_ready else "before it was ready"
                self._fail(f"{member.name} ended with exit code {code} {when}", 2 if code == 2 else 1)
                return
            if self._clock.now() - born > _STEADY_S:
                member.restarts = 0
            await self._spawn_again(member, f"ended with exit code {code}")

    async def _spawn_again(self, member: Member, why: str) -> None:
        """After a pause; after another, longer one where the machine has no process or no file left for it."""
        while why:
            pause = _BACKOFF_S[min(member.restarts, len(_BACKOFF_S) - 1)]
            member.restarts += 1
            _log.warning("serinus: %s %s, restart in %g s", member.name, why, pause)
            await asyncio.sleep(pause)
            try:
                await self._spawn(member)
                why = ""
            except OSError as error:
                why = f"could not be started ({error})"

    def _fail(self, reason: str, code: int) -> None:
        if not self._ending:
            self._code = code
            _log.error("serinus: %s", reason)
            self._server.stop(now=True)

    async def _stop_all(self) -> None:
        """Decode engines and prefill engines together: what ran through the router has ended already."""
        s_max = 0.0 if self._server.force_exit else self._config.server.drain_s_max
        alive = [member.process for member in self._members if member.process is not None]
        await asyncio.gather(*(stop_server(process, s_max=s_max) for process in alive))
        for reader in list(self._readers):
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        _log.info("serinus: all engines have stopped")


def group_table(group: Sequence[Member], url: str, seconds: float) -> None:
    """Print name, role and address of each engine."""
    from rich.table import Table

    from serinus.cli.show import console

    table = Table(title=f"serinus up: ready in {seconds:.1f} s, router on {url}", title_justify="left")
    for name in ("engine", "http", "control", "pid", "threads", "KV tokens", "ready in"):
        right = name in ("pid", "threads", "KV tokens")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for member in group:
        report = member.report
        table.add_row(
            member.name,
            member.url,
            report["pd_address"] or "-",
            str(member.process.pid if member.process else "-"),
            str(member.config.kernels.threads),
            f"{report['tokens']:,}",
            f"{report['seconds']:.1f} s",
        )
    console(stderr=True).print(table)
