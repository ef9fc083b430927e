"""Child processes: an engine behind its front, a whole server behind `serinus up`; none outlives its parent.

Knows how processes start and end, not what they say to each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from serinus.core.config import ServeConfig
from serinus.core.cores import cores, threads_env

__all__ = ["EngineProcess", "free_ports", "stop_process"]


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


async def stop_process(process: asyncio.subprocess.Process, *, s_max: float) -> int:
    """SIGTERM, then SIGKILL after `s_max` seconds (0 = at once); returns the exit code."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it ended in between
            process.send_signal(signal.SIGTERM if s_max > 0 else signal.SIGKILL)
    try:
        return await asyncio.wait_for(process.wait(), max(s_max, 5.0))
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


class EngineProcess:
    """One `serinus.engine.process`, with a private directory for its socket and its settings."""

    def __init__(self, config: ServeConfig) -> None:
        """Makes the directory; `start` starts the process."""
        self._config = config
        self._home = tempfile.TemporaryDirectory(prefix="serinus-")
        self.endpoint = f"ipc://{self._home.name}/engine"
        """Where it listens for its front."""
        self.process: asyncio.subprocess.Process | None = None

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._home.cleanup()

    async def start(self) -> None:
        """Start it, with the thread counts of the settings in its environment."""
        settings = Path(self._home.name) / "config.json"
        settings.write_text(self._config.to_json())
        words = ["-m", "serinus.engine.process", "--config", str(settings), "--endpoint", self.endpoint]
        words += ["--parent", str(os.getpid())]
        threads = self._config.kernels.threads or cores()
        # A group of its own: Ctrl-C reaches the front alone, which drains first.
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *words, env=threads_env(threads), stdin=asyncio.subprocess.DEVNULL, process_group=0
        )

    async def ended(self) -> int:
        """Wait for its end; the exit code (negative: the signal that ended it)."""
        assert self.process is not None, "cli: the engine process was not started"
        return await self.process.wait()

    async def stop(self, *, s_max: float) -> int:
        """See stop_process."""
        return 0 if self.process is None else await stop_process(self.process, s_max=s_max)
