"""Runs an app under uvicorn. A port in use is an error before the start; SIGTERM drains, a second one stops now."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from serinus.core.errors import ConfigError
from serinus.front.connection import HttpConnection

__all__ = ["HttpServer", "bind", "serve"]

_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; `port` 0 takes a free one. Raises ConfigError where the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as err:
        raise ConfigError(f"front: host {host!r}, port {port}: {err}, expected an address of this machine") from err
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


class HttpServer(uvicorn.Server):
    """One HTTP server. `stop()` drains (no new connections, running answers end first), `stop(now=True)` does not."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        *,
        on_drain: Callable[[], None] | None = None,
        log_level: str = "warning",
    ) -> None:
        """`on_drain` is called once, when draining begins (in the loop's thread)."""
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
            backlog=_BACKLOG,
        )
        super().__init__(config)
        self._sock = sock
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
        """SIGTERM and SIGINT end this server, and nothing else: its caller decides what comes after."""
        loop = asyncio.get_running_loop()
        taken: list[signal.Signals] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread: its owner calls stop()
                loop.add_signal_handler(number, self.stop)
                taken.append(number)
        try:
            yield
        finally:
            for one in taken:
                loop.remove_signal_handler(one)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn skips this then, but the engine client must let go of its socket
            await self.lifespan.shutdown()

    def run_here(self) -> None:
        """Serve in this thread, in a loop of its own, until stopped."""
        with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
            runner.run(self.serve(sockets=[self._sock]))


def serve(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 30000,
    *,
    sock: socket.socket | None = None,
    on_drain: Callable[[], None] | None = None,
    log_level: str = "warning",
) -> None:
    """Serve an app until SIGTERM or SIGINT; see HttpServer. Raises ConfigError (port in use)."""
    HttpServer(app, sock or bind(host, port), on_drain=on_drain, log_level=log_level).run_here()
