"""What stories of engines of several ranks share: a toy model with known answers, ranks by name, two hosts."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.testing.oracle import toy_continue
from serinus.testing.servers import Server

from .cluster import HTTP, until

SMALL = (
    "--skip-tokenizer-init", "--device", "cpu", "--dtype", "bfloat16", "--max-total-tokens", "2048", "--page-size",
    "8", "--chunked-prefill-size", "32", "--max-running-requests", "16", "--dist-timeout", "60",
)  # fmt: skip
"""Settings under which pages, chunks and queues all matter."""
MISSED_SOON = ("--rank-timeout", "2")
"""For stories in which a rank stands still; elsewhere a busy machine could be taken for that."""


def toy(folder: Path) -> Path:
    """A checkpoint that two ranks can share by heads, and four by layers."""
    return make_toy(folder, layers=4, kv_heads=4, context=512, tokenizer=False)


def right(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The oracle's greedy tokens."""
    return toy_continue(load_spec(folder), list(prompt), count)


def prompts(count: int, seed: int, longest: int = 90) -> list[list[int]]:
    """Of all lengths, half of them with a beginning that others have too."""
    rng = random.Random(seed)
    shared = [rng.randrange(500) for _ in range(longest // 2)]
    return [
        (shared if index % 2 else []) + [rng.randrange(500) for _ in range(rng.randint(1, longest // 2))]
        for index in range(count)
    ]


def ranks_of(url: str) -> dict[str, dict[str, Any]]:
    """The ranks of an engine by name, as /server_info says."""
    return {rank["name"]: rank for rank in HTTP.get(f"{url}/server_info").json()["ranks"]}


def signal_rank(url: str, name: str, number: signal.Signals) -> int:
    """Send a signal to the process of a rank; its process id."""
    pid = int(ranks_of(url)[name]["pid"])
    os.kill(pid, number)
    return pid


def is_gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    stat = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def all_gone(pids: Sequence[int]) -> None:
    """Wait until no rank is left."""
    until(lambda: all(map(is_gone, pids)), f"all of {pids} have ended", 20)


# ---- two hosts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Two hosts: we are on the first."""

    address: str
    """Of the first, as the second reaches it."""
    prefix: tuple[str, ...]
    """Words before a command that run it on the second."""


def have_namespaces() -> bool:
    """Whether this machine lets us make network namespaces with a cable between them."""
    name = f"serinus-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False) if _has_ip() else None
    if made is None or made.returncode:
        return False
    ends = (f"st{os.getpid()}", "netns", name, "type", "veth", "peer", "name", f"sx{os.getpid()}")
    works = _ip("link", "add", *ends, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return works


def _has_ip() -> bool:
    return sys.platform == "linux" and Path("/usr/sbin/ip").exists() and os.geteuid() == 0


def _ip(*words: str, check: bool = True) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=check).returncode == 0


@contextlib.contextmanager
def two_hosts(how: str) -> Iterator[Hosts]:
    """`namespaces`: the second host has a network stack of its own, and a cable to ours; `IPv6`: it has our loopback
    address; else it has but a second loopback address."""
    if how != "namespaces":
        yield Hosts(address="[::1]" if how == "IPv6" else "127.0.0.2", prefix=())
        return
    tag = os.getpid() % 60_000
    name, ours, theirs = f"serinus-{tag}", f"sa{tag}", f"sb{tag}"
    net = f"10.{77 + tag // 256 % 100}.{tag % 256}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        _ip("addr", "add", f"{net}.1/24", "dev", ours)
        _ip("link", "set", ours, "up")
        _ip("-n", name, "addr", "add", f"{net}.2/24", "dev", theirs)
        _ip("-n", name, "link", "set", theirs, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield Hosts(address=f"{net}.1", prefix=("ip", "netns", "exec", name))
    finally:
        _ip("netns", "del", name, check=False)
        _ip("link", "del", ours, check=False)


class Node:
    """`serinus serve --node-rank 1` on the second host; its whole process group ends with the block."""

    def __init__(self, hosts: Hosts, *words: str) -> None:
        self._log = subprocess.PIPE
        self.process = subprocess.Popen(
            [*hosts.prefix, sys.executable, "-m", "serinus", "serve", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Node:
        return self

    def end(self) -> tuple[int, str]:
        """Wait for its end: exit code and output."""
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def ended(server: Server, s_max: float = 10.0) -> int:
    """The exit code of a server that ends by itself within `s_max` seconds."""
    return server.process.wait(s_max)
