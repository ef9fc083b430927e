"""Runs an app under uvicorn. A port in use is an error before the start; SIGTERM drains, a second one stops now.

Connections are bounded by the descriptors that the process may have.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from serinus.core.addresses import bare_host
from serinus.core.descriptors import descriptor_limit
from serinus.core.errors import ConfigError
from serinus.core.log import get_logger
from serinus.front.connection import SAID_EVERY_S, ConnectionLimits, ConnectionTable, HttpConnection

if TYPE_CHECKING:
    from serinus.front.keys import Keys
    from serinus.front.metrics import HttpMetrics
    from serinus.front.tls import ServerTls

_log = get_logger("front")

_BACKLOG = 2048
"""Connections that the kernel keeps for the server to accept."""
_ACCEPTED_MAX = 32
"""Connections accepted in one turn of the loop; it takes some turns until one can be refused."""
_CONNECTIONS_MAX = 16_384
_DESCRIPTORS_KEPT = 256
"""Descriptors that are not for connections: files, sockets to the engine, what is accepted to be refused."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; `port` 0 takes a free one, an IPv6 address may have brackets.

    Raises ConfigError where the address cannot be had.
    """
    try:
        found = socket.getaddrinfo(bare_host(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as err:
        raise ConfigError(f"front: host {host!r}, port {port}: {err}, expected an address of this machine") from err
    family, _, _, _, address = found[0]
    # asyncio switches Nagle's algorithm off only where the protocol is named; with it an answer can wait 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as err:
        sock.close()
        raise ConfigError(f"front: port {port} on {host} cannot be had ({err.strerror}), expected a free one") from err
    return sock


def engine_limits() -> ConnectionLimits:
    """As many connections as this process has descriptors for."""
    limit = descriptor_limit()
    return ConnectionLimits(count_max=max(1, min(_CONNECTIONS_MAX, max(limit - _DESCRIPTORS_KEPT, limit // 2))))


def router_limits() -> ConnectionLimits:
    """Half as many: each may need another one, to an engine."""
    limits = engine_limits()
    return replace(limits, count_max=max(1, limits.count_max // 2))


class HttpServer(uvicorn.Server):
    """One HTTP server. `stop()` drains (no new connections, running answers end first), `stop(now=True)` does not."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        *,
        on_drain: Callable[[], None] | None = None,
        log_level: str = "warning",
        limits: ConnectionLimits | None = None,
        metrics: HttpMetrics | None = None,
        tls: ServerTls | None = None,
        keys: Keys | None = None,
    ) -> None:
        """`on_drain` is called once, when draining begins, in the loop's thread; `limits`: default engine_limits().

        `metrics` count the connections; `tls`: it speaks https. Files of certificates and of `keys` are read again
        where they change, and at SIGHUP.
        """
        config = uvicorn.Config(
            app,
            lifespan="on",
            http=HttpConnection,
            ws="none",
            access_log=False,
            log_config=None,
            log_level=log_level,
            server_header=False,
            timeout_keep_alive=75,
            backlog=_ACCEPTED_MAX,
        )
        super().__init__(config)
        self.connections = ConnectionTable(limits or engine_limits())
        self.server_state = self.connections
        if metrics is not None:
            metrics.watch_connections(self.connections)
        self._accept_failed_at = -SAID_EVERY_S
        self._sock = sock
        self._tls = tls
        self._keys = keys
        self._on_drain = on_drain

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._sock.getsockname()[1])

    def stop(self, *, now: bool = False) -> None:
        """End the server; a second call does not wait either."""
        if self.should_exit or now:
            self.force_exit = True
        if not self.should_exit and self._on_drain is not None:
            self._on_drain()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end this server, and nothing else: its caller decides what comes after. SIGHUP (the
        terminal was closed) does so where there is no file to read again, unless it is ignored (nohup)."""
        loop = asyncio.get_running_loop()
        taken: list[signal.Signals] = []
        does: dict[signal.Signals, Callable[[], object]] = dict.fromkeys((signal.SIGTERM, signal.SIGINT), self.stop)
        if self._tls is not None or (self._keys is not None and self._keys.has_file):
            does[signal.SIGHUP] = partial(self._refresh, asked=True)
        elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            does[signal.SIGHUP] = self.stop
        for number, do in does.items():
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread: its owner calls stop()
                loop.add_signal_handler(number, do)
                taken.append(number)
        try:
            yield
        finally:
            for one in taken:
                loop.remove_signal_handler(one)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._loop_error)
        self.config.ssl = None if self._tls is None else self._tls.context
        await super().startup(sockets)
        self._sock.listen(_BACKLOG)  # asyncio took the number that it accepts at a time

    def _loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log what no task is told; that there is no descriptor left for a connection, once a minute."""
        if not str(context.get("message")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif loop.time() - self._accept_failed_at >= SAID_EVERY_S:
            self._accept_failed_at = loop.time()
            _log.error("front: cannot accept connections for now: %s", context.get("exception"))

    async def on_tick(self, counter: int) -> bool:
        now = asyncio.get_running_loop().time()
        self.connections.sweep(now)
        self._refresh()
        return await super().on_tick(counter)

    def _refresh(self, asked: bool = False) -> None:
        """Read certificate and keys again where their files have changed; `asked`: an operator says so."""
        now = asyncio.get_running_loop().time()
        if self._tls is not None:
            self._tls.refresh(now)
        if self._keys is not None:
            self._keys.refresh(now, asked=asked)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.connections.end_leaving()
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn skips this then, but the engine client must let go of its socket
            await self.lifespan.shutdown()

    def run_here(self) -> None:
        """Serve in this thread, in a loop of its own, until stopped."""
        with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
            runner.run(self.serve(sockets=[self._sock]))
