"""A bad network between two processes: a TCP proxy that delays, cuts and flips bits when it is told to.

    with FaultyProxy("127.0.0.1:7001", seed=3) as proxy:
        ...  # talk to proxy.address
        proxy.weather = Weather(delay_s=0.05, flips_per_mb=2.0)
        proxy.cut()

Runs in a thread of its own; whatever is set holds for the next bytes of all connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from types import TracebackType

from serinus.core.addresses import split_host_port
from serinus.core.rng import Rng

_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What happens to the bytes that pass."""

    delay_s: float = 0.0
    """Each piece of up to 64 KB waits up to so long, in its order."""
    flips_per_mb: float = 0.0
    """Bits that change, on average, per megabyte."""
    cuts_per_mb: float = 0.0
    """Connections that break midway, on average, per megabyte that passes."""
    is_closed: bool = False
    """New connections are refused as soon as they are made."""


CALM = Weather()
"""All passes as it came."""


class FaultyProxy:
    """Passes bytes on to `target` (host:port), both ways."""

    def __init__(self, target: str, *, seed: int = 0) -> None:
        self.weather = CALM
        self.flipped = 0
        """Bits that were changed."""
        self.cut_count = 0
        """Connections that were broken."""
        self.port = 0
        self._target = target
        self._rng = Rng(seed)
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    @property
    def address(self) -> str:
        """Where it listens: 127.0.0.1:port."""
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Break every connection now; returns when all are broken."""
        asyncio.run_coroutine_threadsafe(self._cut_all(), self._loop).result(30)

    # ---- life -------------------------------------------------------------------------------------------------

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        assert self._ready.wait(30), "testing: the proxy does not listen"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive(), "testing: the proxy did not stop"

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        await self._cut_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _cut_all(self) -> None:
        self.cut_count += len(self._open) // 2
        for writer in list(self._open):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()

    # ---- bytes ------------------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = split_host_port(self._target, "testing: the target")
        if self.weather.is_closed:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()  # no server there: refused, as without a proxy
            return
        both = (writer, far_writer)
        self._open.update(both)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.get_running_loop().create_task(self._pump(source, sink, both))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, both: tuple[asyncio.StreamWriter, ...]
    ) -> None:
        """Pass one direction on until an end; either end ends both directions."""
        whole = False
        try:
            while data := await source.read(_CHUNK_BYTES):
                weather = self.weather
                if weather.delay_s:
                    await asyncio.sleep(weather.delay_s * self._rng.random())
                if self._hits(weather.cuts_per_mb, len(data)):
                    self.cut_count += 1
                    return
                sink.write(self._flip(data, weather.flips_per_mb))
                await sink.drain()
            whole = True
        except (OSError, asyncio.CancelledError):
            return  # broken by one of the two, or by us
        finally:
            for writer in both:
                self._open.discard(writer)
                if whole:
                    writer.close()  # what was said before the end still arrives
                else:
                    writer.transport.abort()

    def _hits(self, per_mb: float, byte_count: int) -> bool:
        return per_mb > 0 and self._rng.random() < per_mb * byte_count / 1e6

    def _flip(self, data: bytes, per_mb: float) -> bytes:
        if not self._hits(per_mb, len(data)):
            return data
        changed = bytearray(data)
        at = int(self._rng.random() * len(changed))
        changed[at] ^= 1 << int(self._rng.random() * 8)
        self.flipped += 1
        return bytes(changed)
