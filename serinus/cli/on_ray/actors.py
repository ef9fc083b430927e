"""What runs on the nodes: actors that host one server process each, which ends with them.

`RankHost` hosts one rank of an engine (`serinus serve`; the first rank's also answers HTTP), `RouterHost` a
`serinus router`, which it tells of engines by its own /workers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections import deque
from typing import Any, Final

import msgspec
import ray

from serinus.cli.processes import child_order, server_words
from serinus.core.config import ConfigTree, RouterConfig, ServeConfig
from serinus.core.cores import threads_env
from serinus.core.errors import SerinusError
from serinus.core.free_ports import free_ports
from serinus.front import UpstreamBroken, fetch

_ASK_S_MAX: Final = 5.0
_END_S: Final = 10.0
"""Beyond what its requests may take, a server that was told to stop has this long."""
_LAST_LINES: Final = 3
"""So many tell why a process ended."""
_LINES_S: Final = 1.0
"""The last lines of a process are waited for so long to be asked for."""
_LINES_LOOK_S: Final = 0.02
_LINES_MAX: Final = 2000
"""Lines that wait for the terminal; older ones are in this actor's log alone."""


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """How a hosted process ended."""

    code: int
    """Its exit code; negative: the signal that ended it."""
    last_words: str
    """The last lines that it wrote."""


class _Host:
    """An actor with one server process, which cannot outlive it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._said: deque[str] = deque(maxlen=_LINES_MAX)
        """Lines that wait to be asked for."""
        self._news = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return self.name  # as `ray list actors` calls it

    async def _run(self, command: str, config: ConfigTree, threads: int) -> dict[str, Any]:
        """Start the process; what it says when it is ready, empty where it says nothing (a rank without HTTP).

        Raises SerinusError where it ends before.
        """
        read_end, write_end = os.pipe()
        # Not in a thread of a pool: the process ends with the thread that started it.
        self.process = subprocess.Popen(
            server_words(command, write_end),
            env=threads_env(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(write_end,),
            process_group=0,
        )
        os.close(write_end)
        assert self.process.stdin is not None, "cli: a child without stdin"
        assert self.process.stdout is not None, "cli: a child without stdout"
        self.process.stdin.write(child_order(config))
        self.process.stdin.close()
        self._reader = asyncio.create_task(self._echo(self.process.stdout.fileno()))
        self._reader.add_done_callback(lambda _: self._news.set())
        if isinstance(config, ServeConfig) and config.parallel.node_rank:
            os.close(read_end)
            return {}
        with os.fdopen(read_end, "rb") as pipe:
            line = await asyncio.to_thread(pipe.readline)
        if not line:
            fate = await self.ended()
            raise SerinusError(f"it ended with exit code {fate.code} before it was ready: {fate.last_words}")
        report: dict[str, Any] = json.loads(line)
        self.url = str(report["url"])
        return report

    async def _echo(self, descriptor: int) -> None:
        """Keep the lines of the process for `lines`, and write them to this actor's own log (`ray logs actor`)."""
        with os.fdopen(os.dup(descriptor), "r", errors="replace") as lines:
            while line := await asyncio.to_thread(lines.readline):
                self._last.append(line.rstrip())
                self._said.append(line.rstrip())
                self._news.set()
                print(line.rstrip(), flush=True)

    async def lines(self) -> list[str]:
        """What the process has written since the last call; waits for some. Empty: it has ended."""
        while not self._said and not (self._reader is not None and self._reader.done()):
            self._news.clear()
            await self._news.wait()
        found = list(self._said)
        self._said.clear()
        return found

    async def ended(self) -> Fate:
        """Wait for the end of the process."""
        assert self.process is not None, "cli: nothing was started"
        code = await asyncio.to_thread(self.process.wait)
        if self._reader is not None:
            await self._reader
        return Fate(code=code, last_words=" / ".join(self._last))

    async def state(self) -> dict[str, Any]:
        """For people and for the driver: what this actor hosts, and whether it lives."""
        alive = self.process is not None and self.process.poll() is None
        pid = self.process.pid if self.process else 0
        node = ray.get_runtime_context().get_node_id()
        gpus = ray.get_gpu_ids()
        return {"name": self.name, "url": self.url, "pid": pid, "alive": alive, "node": node, "gpus": gpus}

    async def stop(self, s_max: float) -> int:
        """Let the process answer what it has, for `s_max` seconds at most, and end; 0 = at once. Its exit code."""
        if self.process is None:
            return 0
        code = await self._stop(self.process, s_max)
        for _ in range(int(_LINES_S / _LINES_LOOK_S)):
            if not self._said:
                break
            await asyncio.sleep(_LINES_LOOK_S)
        return code

    @staticmethod
    async def _stop(process: subprocess.Popen[bytes], s_max: float) -> int:
        for number in (signal.SIGTERM, *(() if s_max > 0 else (signal.SIGINT,))):
            if process.poll() is None:
                process.send_signal(number)
        try:
            return await asyncio.to_thread(process.wait, s_max + _END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return await asyncio.to_thread(process.wait)


class RankHost(_Host):
    """One rank of an engine: the first leads and answers HTTP."""

    async def place(self, host: str) -> list[int]:
        """Two free ports at this node's address: for HTTP, and where the other ranks report."""
        return free_ports(2, host)

    async def start(self, config: str) -> dict[str, Any]:
        """Serve with these settings; what it says when it is ready, empty from other ranks than the first.

        Raises SerinusError where it ends before.
        """
        settings = ServeConfig.from_json(config)
        self._key = settings.server.api_key
        return await self._run("serve", settings, settings.kernels.threads or 1)

    async def unfinished(self) -> int:
        """Requests that this engine has, those of its peers included; 0 where it does not answer any more."""
        try:
            status, body = await fetch(
                self.url, "GET", "/server_info", headers=[("authorization", f"Bearer {self._key}")], s_max=_ASK_S_MAX
            )
        except UpstreamBroken:
            return 0
        info: dict[str, Any] = msgspec.json.decode(body) if status == 200 else {"load": {}, "open_requests": 0}
        own: int = sum(value for name, value in info["load"].items() if name.endswith("_reqs"))
        return max(int(info["open_requests"]), own)


class RouterHost(_Host):
    """The router of a node."""

    async def start(self, config: str) -> str:
        """Route with these settings; its address. Raises SerinusError where it ends before."""
        settings = RouterConfig.from_json(config)
        self._key = settings.server.admin_api_key or settings.server.api_key
        self._user_key = settings.server.api_key or self._key
        self._ca_certs = settings.server.ssl_ca_certs
        await self._run("router", settings, 1)
        return self.url

    async def tell(self, wanted: list[tuple[str, str]]) -> dict[str, Any]:
        """Have the router know these engines (URL and role) and no others, which are drained.

        Returns `workers` and `engines`, as its /workers and /server_info say them; raises UpstreamBroken.
        """
        here = {each["url"]: each for each in (await self._ask("GET", "/workers"))["workers"]}
        for url, role in wanted:
            if url not in here or here[url]["draining"]:
                await self._ask("POST", "/workers", {"url": url, "worker_type": role})
        for url, each in here.items():
            if not each["draining"] and url not in {known for known, _ in wanted}:
                await self._ask("DELETE", f"/workers?url={url}")
        workers = (await self._ask("GET", "/workers"))["workers"]
        return {"workers": workers, "engines": (await self._ask("GET", "/server_info"))["engines"]}

    async def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        key = self._user_key if path == "/server_info" else self._key
        headers = [("authorization", f"Bearer {key}"), ("content-type", "application/json")]
        status, answer = await fetch(
            self.url, method, path, headers=headers, body=b"" if body is None else msgspec.json.encode(body),
            s_max=_ASK_S_MAX, ca_certs=self._ca_certs,
        )  # fmt: skip
        if status >= 300:
            raise UpstreamBroken(f"front: {self.url} answered {status} to {method} {path}: {answer[:200].decode()}")
        found: dict[str, Any] = msgspec.json.decode(answer)
        return found
