"""Child processes: an engine behind its front, a whole server behind `serinus up`; none outlives its parent.

Knows how processes start and end, not what they say to each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from serinus.core.config import ConfigTree, ServeConfig
from serinus.core.cores import cores, threads_env
from serinus.core.lifeline import end_with_parent
from serinus.core.log import get_logger
from serinus.core.private_folder import PrivateFolder
from serinus.core.settings import ServerSettings
from serinus.ranks.exit_reason import LOST_CODE, EngineExit, ExitRecord

if TYPE_CHECKING:
    from serinus.wire.messages import Message

_log = get_logger("cli")
_TreeT = TypeVar("_TreeT", bound=ConfigTree)
_LOOK_S = 0.2
"""Seconds between two checks of a connection that only shows whether the process lives."""
_STOP_NOW_S = 5.0
"""A server that does not wait for its requests ends within this time, or is killed."""
_ENDING_S = 2.0
"""From the end of its connection to the end of a process that is not standing still."""
_STACKS_S = 5.0
"""For the threads of an engine that is about to be killed to write where they stand."""
_STACK_S = 0.5
"""Between two of its processes: they share one stream."""
_ENDING_SAID_S = 5.0
"""The same for one that has said why it ends."""


def server_words(command: str, report_to: int) -> list[str]:
    """The command line of a `serinus COMMAND` that gets a `child_order` on stdin and writes a line of JSON to the file
    descriptor `report_to` when it is ready."""
    return [sys.executable, "-m", "serinus", command, "--child", str(report_to)]


def child_order(config: ConfigTree) -> bytes:
    """What such a child, which ends with this process, is told."""
    return json.dumps({"parent": os.getpid(), "config": config.to_json()}).encode() + b"\n"


async def start_server(config: ConfigTree, **options: Any) -> tuple[asyncio.subprocess.Process, int]:
    """Start a `serinus serve` that is told these settings; the process, and the file descriptor of `read_report`.
    `options`: more, as `create_subprocess_exec` takes them."""
    read_end, write_end = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *server_words("serve", write_end),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(write_end,),
            process_group=0,  # Ctrl-C reaches this process alone, which stops its servers in their order
            **options,
        )
    except OSError:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    assert process.stdin is not None, "cli: a child without stdin"
    process.stdin.write(child_order(config))
    return process, read_end


async def read_report(read_end: int) -> dict[str, Any] | None:
    """The line that such a child writes when it is ready; None where it ends before."""
    reader = asyncio.StreamReader()
    with os.fdopen(read_end, "rb") as pipe:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        line = await reader.readline()
        transport.close()
    return json.loads(line) if line else None


def obeyed(tree: type[_TreeT]) -> _TreeT:
    """In the child: the settings it is told; it gets SIGTERM when its parent ends. Raises ConfigError."""
    given = json.loads(sys.stdin.readline())
    end_with_parent(int(given["parent"]), signal.SIGTERM)
    return tree.from_json(given["config"])


def told_to_end(server: ServerSettings) -> asyncio.Event:
    """Set by what tells this process to end, until its HTTP server takes signals (`HttpServer.capture_signals`).

    Call it in the loop. An exception in place of it may come within a callback of the collector, where Python drops it.
    """
    told, loop = asyncio.Event(), asyncio.get_running_loop()
    rereads = server.api_keys_file or server.ssl_certfile  # what SIGHUP asks for then has been read just now
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has SIGHUP
            loop.add_signal_handler(number, (lambda: None) if rereads and number == signal.SIGHUP else told.set)
    return told


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


async def stop_server(process: asyncio.subprocess.Process, *, s_max: float) -> int:
    """The same for a `serinus serve`, which has an engine to end and a folder to remove: with 0 it is told twice, and
    does not let its requests end."""
    if s_max <= 0 and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)  # another signal than the one that follows: two of a kind may merge
    return await stop_process(process, s_max=s_max or _STOP_NOW_S)


async def connection_lost(address: str, silence_s: float, hello: Message | None = None) -> None:
    """Connect to a listening socket of wire, as often as it takes, and return when that connection breaks: its process
    ended, or stood still for `silence_s` seconds. `hello`: what makes us known there, where strangers are cut off."""
    from serinus.wire import Arrived, ZmqChannel, encode

    channel = ZmqChannel(silence_s=silence_s)
    try:
        attempt = 0
        while True:
            attempt += 1
            channel.connect(f"there-{attempt}", address)
            if hello is not None:
                channel.send(f"there-{attempt}", encode(hello))
            reason = ""
            while not reason:
                await asyncio.sleep(_LOOK_S)
                reason = "".join(event.reason for event in channel.poll(0.0) if not isinstance(event, Arrived))
            if "refused" not in reason:
                return
    finally:
        channel.close()


class EngineProcess:
    """One `serinus.engine.process`, with a private directory for its socket and its settings."""

    def __init__(self, config: ServeConfig) -> None:
        """Makes the directory; `start` starts the process."""
        self._config = config
        self._folder = PrivateFolder()
        self.endpoint = f"ipc://{self._folder.path}/engine"
        """Where it listens for its front."""
        self.process: asyncio.subprocess.Process | None = None
        self._words = self._folder.path / "words"
        self._overseer: asyncio.Task[None] | None = None

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.close()

    async def start(self) -> None:
        """Start it, with the thread counts of the settings in its environment."""
        settings = self._folder.path / "config.json"
        settings.write_text(self._config.to_json())
        words = ["-m", "serinus.engine.process", "--config", str(settings), "--endpoint", self.endpoint]
        words += ["--parent", str(os.getpid()), "--words", str(self._words)]
        threads = self._config.kernels.threads or cores()
        # A group of its own: Ctrl-C reaches the front alone, which drains first.
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *words, env=threads_env(threads), stdin=asyncio.subprocess.DEVNULL, process_group=0
        )

        if self._config.parallel.size > 1:
            self._overseer = asyncio.create_task(self._oversee(self.process))

    async def _oversee(self, process: asyncio.subprocess.Process) -> None:
        """End a leader that stands still: its ranks miss it too, but only here it can be ended. (An engine of one rank
        that stands still is waited for: nothing else depends on it, and it may go on.)"""
        silence_s = self._config.parallel.silence_s_max
        while process.returncode is None:
            await connection_lost(self.endpoint, silence_s)
            await self._end_if_silent(process, silence_s)

    async def _end_if_silent(self, process: asyncio.subprocess.Process, silence_s: float) -> None:
        try:
            await asyncio.wait_for(process.wait(), _ENDING_S if self.ending() is None else _ENDING_SAID_S)
        except TimeoutError:
            reason = f"engine: rank TP0 PP0 (pid {process.pid}), the leader, gave no sign of life for {silence_s:g} s"
            _log.error("serinus: %s; it is killed", reason)
            ExitRecord(self._words).record(reason, LOST_CODE)
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def end_stuck(self, reason: str) -> None:
        """It has stood still for too long: have it and the ranks of its machine write their stacks to the log, then
        kill them."""
        _log.error("serinus: the engine %s; it is killed", reason)
        if self.process is not None and self.process.returncode is None:
            ExitRecord(self._words).record(f"engine: it {reason}", LOST_CODE)
            loop, pids = asyncio.get_running_loop(), _group(self.process.pid)
            for place, pid in enumerate(pids):  # one by one: each writes its stacks character by character
                loop.call_later(place * _STACK_S, _signal, pid, signal.SIGUSR1)
            loop.call_later(_STACKS_S + len(pids) * _STACK_S, self._signal_group, signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        assert self.process is not None, "cli: the engine process was not started"
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def ending(self) -> EngineExit | None:
        """The recorded reason of its end, its own or its supervisor's; None = none was recorded."""
        return ExitRecord.read(self._words)

    async def ended(self) -> int:
        """Wait for its end; the exit code (negative: the signal that ended it)."""
        assert self.process is not None, "cli: the engine process was not started"
        return await self.process.wait()

    async def stop(self, *, s_max: float) -> int:
        """Stop the engine process; `s_max` and the result as in `stop_process`."""
        if self._overseer is not None:
            self._overseer.cancel()
        return 0 if self.process is None else await stop_process(self.process, s_max=s_max)


def _group(leader: int) -> list[int]:
    """The processes of a group, in the order of their numbers; without Linux's /proc the leader alone."""
    found = {leader}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(entry.name)) == leader:
                found.add(int(entry.name))
    return sorted(found)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
