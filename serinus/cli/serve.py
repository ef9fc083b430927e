"""`serinus serve`: one engine process and the HTTP front before it, watched and ended together.

The front listens at once (503 until the engine is loaded), so that a port in use is said before anything is loaded.
With `--child FD` (what `serinus up` does) settings come as JSON on stdin, and a line of JSON goes to FD when ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from serinus.cli.parser import Command, add_settings, make_parser, need_model, read_config
from serinus.cli.processes import EngineProcess, obeyed, told_to_end
from serinus.cli.router import drain_within
from serinus.cli.shape import check_shape
from serinus.core.addresses import http_url
from serinus.core.clock import Clock, WallClock
from serinus.core.config import ServeConfig
from serinus.core.cores import cores, engine_threads
from serinus.core.heap import settle_heap
from serinus.core.log import get_logger, setup_logging
from serinus.core.user_secret import user_secret
from serinus.models import check_path
from serinus.ranks.exit_reason import CONFIG_CODE, LOST_CODE, exit_words

if TYPE_CHECKING:
    from serinus.front import EngineClient, FrontSettings, HttpServer, ServerTls
    from serinus.wire.messages import Ready

_log = get_logger("cli")
_GONE_GRACE_S = 2.0
"""After its engine died, a front gets this long to tell its clients."""


def run(command: Command, words: Sequence[str]) -> int:
    """Serve until told to stop. Exit code 0, 1 when the engine died, 3 when one of its ranks did.

    Raises UsageProblem without a model, ConfigError for wrong settings.
    """
    clock = WallClock()
    started = clock.now()
    parser = make_parser(command)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    add_settings(parser, ServeConfig, positional_model=True)
    config, arguments = read_config(ServeConfig, parser, words)
    child: int | None = arguments.child
    if child is not None:
        config = obeyed(ServeConfig)
    need_model(command, config.model.model_path)
    if config.parallel.nnodes == 1:  # else the first machine is told by the rank that cannot load it
        check_path(config.model.model_path)
    check_shape(config)
    threads = engine_threads(config.kernels.threads, len(config.parallel.local_ranks))
    config = replace(config, kernels=replace(config.kernels, threads=threads))
    if config.parallel.node_rank:
        from serinus.cli.node import run_node

        setup_logging(config.server.log_level, f"node {config.parallel.node_rank}", config.server.log_format)
        return run_node(config)
    setup_logging(config.server.log_level, "" if child is not None else "front", config.server.log_format)
    return asyncio.run(_serve(config, clock, started, child))


async def _serve(config: ServeConfig, clock: Clock, started: float, child: int | None) -> int:
    told = told_to_end(config.server)
    from serinus.front import bind, server_tls
    from serinus.text import check_template

    front_settings(config)  # a wrong one is refused before anything starts
    check_template(config.model.chat_template)
    tls = server_tls(config.server)
    with bind(config.server.host, config.server.port) as sock, EngineProcess(config) as engine:
        return await _Service(config, engine, sock, clock, started, child, tls).live(told)


def front_settings(config: ServeConfig) -> FrontSettings:
    """What the front is told."""
    from serinus.front import FrontSettings

    return FrontSettings(
        model=config.model,
        server=config.server,
        engine=config.engine_name,
        role=config.role,
        router_secrets=(config.pd.cluster_secret, user_secret()),
        prefill_addresses=config.pd.prefill_addresses,
    )


def start_line(phases: Mapping[str, float], seconds: float) -> str:
    """Where the start-up time went: `ready in 4.1 s: imports 1.9 s, weights 1.2 s, ...`."""
    return f"ready in {seconds:.1f} s: " + ", ".join(f"{name} {spent:.1f} s" for name, spent in phases.items())


class _Service:
    """The front's side of one engine's life."""

    def __init__(
        self,
        config: ServeConfig,
        engine: EngineProcess,
        sock: socket.socket,
        clock: Clock,
        started: float,
        child: int | None,
        tls: ServerTls | None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._sock = sock
        self._clock = clock
        self._started = started
        self._child = child
        self._code = 0
        self._phases: dict[str, float] = {}
        self._tls = tls
        self._url = http_url(config.server.host, sock.getsockname()[1], tls=tls is not None)

    async def live(self, told: asyncio.Event) -> int:
        """Start the engine, serve, stop the engine; the exit code. `told`: see `told_to_end`."""
        config = self._config
        here = len(config.parallel.local_ranks)
        _log.info(
            "serinus: %s as %s on %s, %s%s of %s cores",
            config.model.model_path,
            config.engine_name,
            self._url,
            "" if config.parallel.size == 1 else f"{config.parallel.size} ranks, {here} here, each with ",
            config.kernels.threads,
            cores(),
        )
        await self._engine.start()
        # The engine loads while this process imports what HTTP needs.
        from serinus.front import EngineClient, HttpServer, create_app

        client = EngineClient(self._engine.endpoint)
        app = create_app(
            front_settings(config), client, clock=self._clock, on_ready=self._ready, on_failed=self._failed,
            on_stuck=self._engine.end_stuck,
        )  # fmt: skip
        if not config.model.skip_tokenizer_init and config.pd.mode != "prefill":
            began = self._clock.now()
            loading = app.state.front.start_tokenizer()
            loading.add_done_callback(lambda _: self._phases.update(tokenizer=self._clock.now() - began))
        self._server: HttpServer = HttpServer(
            app, self._sock, on_drain=lambda: self._drain(client), metrics=app.state.front.metrics, tls=self._tls,
            keys=app.state.front.keys,
        )  # fmt: skip
        tasks = [asyncio.create_task(self._watch(client)), asyncio.create_task(self._stop_once(told))]
        settle_heap()
        try:
            await self._server.serve(sockets=[self._sock])
        finally:
            for task in tasks:
                task.cancel()
            code = await self._engine.stop(s_max=0 if self._server.force_exit else config.server.drain_s_max)
        return self._code or (1 if code > 0 else 0)

    async def _stop_once(self, told: asyncio.Event) -> None:
        await told.wait()
        self._server.stop()

    async def _watch(self, client: EngineClient) -> None:
        """The engine ended by itself: fail all open requests with its reason, and end too."""
        code = await self._engine.ended()
        reason, ending = exit_words(code), self._engine.ending()
        self._code = CONFIG_CODE if code == CONFIG_CODE else 1
        if self._config.parallel.size > 1 and ending is None:
            self._code = LOST_CODE if self._code == 1 else self._code
            reason = f"has lost rank TP0 PP0, its leader: it {reason}"
        if ending is not None:
            self._code = ending.code if ending.code in (CONFIG_CODE, LOST_CODE) else self._code
            reason = f"{reason}: {ending.reason}"
        _log.error("serinus: the engine %s %s", self._config.engine_name, reason)
        client.engine_gone(f"the engine {self._config.engine_name} {reason}")
        self._server.stop()
        asyncio.get_running_loop().call_later(_GONE_GRACE_S, self._server.stop)

    def _drain(self, client: EngineClient) -> None:
        client.drain()
        if not self._code:
            drain_within(self._server, self._config.server.drain_s_max)

    def _failed(self, reason: str) -> None:
        if not self._code and not self._server.should_exit:  # the watch has said it otherwise
            self._code = 2
            _log.error("serinus: %s", reason)
            self._server.stop()

    def _ready(self, ready: Ready) -> None:
        spent = self._clock.now() - self._started
        engine = {name: phase for name, phase in ready.seconds.items() if name != "engine"}  # that is their sum
        self._phases = {**engine, **self._phases}
        _log.info("%s", start_line(self._phases, spent))
        if self._child is None and not self._config.server.no_dashboard:
            _log.info("serinus: the dashboard: %s/dashboard", self._url)
        _log.info("The server is fired up and ready to roll! %s", self._url)
        if self._child is not None:
            report = {
                "url": self._url,
                "pd_address": ready.pd_address,
                "tokens": ready.max_total_tokens,
                "seconds": spent,
                "phases": self._phases,
            }
            os.write(self._child, json.dumps(report).encode() + b"\n")
            os.close(self._child)
