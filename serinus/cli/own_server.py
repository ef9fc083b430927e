"""A `serinus serve` of a command's own, on loopback and with a key of its own: started, used, stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from serinus.cli.processes import read_report, start_server, stop_server
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError
from serinus.core.ids import new_token


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnServer:
    """Where it is, and the key that it asks for."""

    url: str
    api_key: str
    process: asyncio.subprocess.Process

    @property
    def ending(self) -> str:
        """That it has ended; empty while it has not."""
        code = self.process.returncode
        return "" if code is None else f"the engine ended with exit code {code}"


@asynccontextmanager
async def own_server(config: ServeConfig) -> AsyncIterator[OwnServer]:
    """Serve a model until left. Only warnings of it are logged, where the settings do not say more than that.

    Raises ConfigError: it ended before it was ready; it has said why.
    """
    key = new_token().hex()
    level = "warning" if config.server.log_level == "info" else config.server.log_level
    server = replace(
        config.server,
        host="127.0.0.1",
        port=0,
        api_key=key,
        admin_api_key="",
        api_keys_file="",
        log_level=level,
        ssl_certfile="",
        ssl_keyfile="",
    )
    process, read_end = await start_server(replace(config, server=server))
    try:
        report = await read_report(read_end)
        if report is None:
            raise ConfigError(f"serve: exit code {await process.wait()} before it was ready, expected an engine")
        yield OwnServer(url=report["url"], api_key=key, process=process)
    finally:
        await stop_server(process, s_max=0.0)
