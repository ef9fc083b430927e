"""The soak of the tiers over real HTTP: many requests with shared beginnings on pools so small that every tier evicts.

    python -m tests.e2e.soak [--requests 3000] [--families qwen3 gemma3_text mistral_swa] [--policies ...] [--seed 0]

For each family an engine without any cache answers every request first; then, for each write policy, an engine with
all three tiers must answer the same, token by token, with the invariants of its cache checked all along. At the end
nothing may be held, every tier must have worked and evicted, and after a flush every page is free. The folder of the
storage tier lives on from policy to policy: later engines begin with what earlier ones stored.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx

from serinus.core.clock import WallClock
from serinus.models.small_checkpoints import make_checkpoint
from serinus.testing.servers import Server

FAMILIES = ("qwen3", "gemma3_text", "mistral_swa")
"""FULL alone; both parts; SWA with a FULL part of no layers."""
POLICIES = ("write_through", "write_through_selective", "write_back")
CLIENTS = 16
PAGE, CONTEXT, VOCAB = 8, 512, 512
POOL_TOKENS = 1280
LAYERS = {"qwen3": 3, "gemma3_text": 6, "mistral_swa": 3}
STORED_PAGES = 600
"""More than the 240 pages of the host tier, so that files still hold what it lost; less than the load writes."""
LEFT_EARLY = 0.04
"""Share of the clients that hang up after the first tokens."""
CLOCK = WallClock()


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request of the load."""

    prompt: tuple[int, ...]
    count: int
    salt: str
    leaves: bool


@dataclass(kw_only=True)
class Report:
    """What one engine with tiers did."""

    family: str
    policy: str
    requests: int
    wrong: list[int]
    seconds: float
    figures: dict[str, float]

    def line(self) -> str:
        words = ", ".join(f"{name} {value:,.0f}" for name, value in self.figures.items())
        return (
            f"{self.family} {self.policy}: {self.requests} requests in {self.seconds:.1f} s, "
            f"{len(self.wrong)} wrong; {words}"
        )


def make_load(count: int, seed: int) -> list[Ask]:
    """Shared beginnings of several depths, most of them asked for in waves, so that what was evicted comes back."""
    rng = random.Random(seed)

    def text(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(5, VOCAB) for _ in range(length))

    trunks = [text(rng.choice((24, 40, 97, 160, 240))) for _ in range(14)]
    branches = [trunk + text(rng.choice((8, 30, 64, 90))) for trunk in trunks for _ in range(3)]
    asks = []
    for index in range(count):
        wave = (index * 7 // max(count, 1)) % 3
        pool = branches[wave::3] if rng.random() < 0.7 else branches
        kind = rng.random()
        beginning = rng.choice(pool) if kind < 0.85 else rng.choice(trunks) if kind < 0.95 else ()
        tail = text(rng.choice((1, 2, 5, 13, 40)))
        asks.append(
            Ask(
                prompt=beginning + tail,
                count=rng.randint(2, 12),
                salt="tenant" if rng.random() < 0.05 else "",
                leaves=rng.random() < LEFT_EARLY,
            )
        )
    return asks


def answer(port: int, ask: Ask) -> list[int] | None:
    """The tokens of one request; None where the client left. (http.client: httpx would take half of the processor.)"""
    sampling = {"temperature": 0, "max_new_tokens": ask.count, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": ask.prompt, "sampling_params": sampling, "stream": ask.leaves}
    if ask.salt:
        body["cache_salt"] = ask.salt
    connection = HTTPConnection("127.0.0.1", port, timeout=240)
    try:
        connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        if ask.leaves:
            assert reply.readline().startswith(b"data: ")
            return None
        tokens: list[int] = json.loads(reply.read())["output_ids"]
        return tokens
    finally:
        connection.close()


def answers(port: int, asks: Sequence[Ask]) -> list[list[int] | None]:
    """All of them, CLIENTS at a time, in order."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda ask: answer(port, ask), asks))


def metrics(url: str) -> dict[str, float]:
    """Every series of /metrics, its name without prefix but with its labels beside engine, role and rank."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        match = re.match(r"serinus:(\w+)(?:{(.*)})? (\S+)$", line)
        if match:
            labels = re.findall(r'(\w+)="([^"]*)"', match[2] or "")
            kept = ",".join(f"{name}={value}" for name, value in labels if name not in ("engine", "role", "rank"))
            name = f"{match[1]}{{{kept}}}" if kept else match[1]
            found[name] = found.get(name, 0.0) + float(match[3])
    return found


def total(found: dict[str, float], name: str) -> float:
    """Sum over the labels of a series."""
    return sum(value for key, value in found.items() if key.split("{")[0] == name)


def common(checkpoint: Path) -> list[str]:
    return [
        "serve", str(checkpoint), "--dtype", "float32", "--page-size", str(PAGE), "--chunked-prefill-size", "128",
        "--max-running-requests", "12", "--context-length", str(CONTEXT), "--skip-tokenizer-init",
    ]  # fmt: skip


def without_cache(checkpoint: Path, asks: Sequence[Ask]) -> list[list[int] | None]:
    """What an engine answers that keeps nothing and has room for everything."""
    whole = [Ask(prompt=ask.prompt, count=ask.count, salt="", leaves=False) for ask in asks]
    with Server(*common(checkpoint), "--disable-radix-cache", "--max-total-tokens", "16384") as server:
        found = answers(server.port, whole)
        assert server.stop() == 0, server.output
    return found


def page_bytes(family: str) -> int:
    """Bytes of one page over all layers, as the checkpoints of this file have them."""
    return LAYERS[family] * 2 * 2 * 16 * 4 * PAGE


def soak(
    family: str, policy: str, checkpoint: Path, store: Path, asks: Sequence[Ask], expected: Sequence[list[int] | None]
) -> Report:
    """One engine with all tiers; raises AssertionError where anything is not as it must be."""
    store_gb = STORED_PAGES * page_bytes(family) / 1e9
    words = [
        *common(checkpoint), "--max-total-tokens", str(POOL_TOKENS), "--enable-hierarchical-cache",
        "--hicache-ratio", "1.5", "--hicache-write-policy", policy, "--hicache-storage-backend", "file",
        "--hicache-storage-dir", str(store), "--hicache-storage-size", f"{store_gb:.9f}", "--enable-sanity-check",
    ]  # fmt: skip
    begin = CLOCK.now()
    with Server(*words) as server:
        found = answers(server.port, asks)
        wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a is not None and a != b]
        seconds = CLOCK.now() - begin
        figures = drained(server, family)
        assert server.stop() == 0, server.output
        assert "Traceback" not in server.output, server.output
        assert "invariant" not in server.output.lower(), server.output
    report = Report(
        family=family, policy=policy, requests=len(asks), wrong=wrong, seconds=seconds, figures=figures
    )  # fmt: skip
    assert not wrong, f"{report.line()}: first {[(asks[i], found[i], expected[i]) for i in wrong[:3]]}"
    return report


FIGURES = (
    "evicted_tokens_total", "hicache_backup_tokens_total", "load_back_tokens_total", "backuped_tokens_total",
    "prefetched_tokens_total", "hicache_dropped_tokens_total", "cache_sanity_checks_total", "cache_sanity_steps_total",
)  # fmt: skip


def drained(server: Server, family: str) -> dict[str, float]:
    """Wait until nothing is held, look at what every tier did, flush, and see every page free."""
    limit = CLOCK.now() + 30

    def until(holds: Any, what: str) -> dict[str, float]:
        while True:
            seen = metrics(server.url)
            if holds(seen):
                return seen
            assert CLOCK.now() < limit, f"{what}: {seen}\n{server.output[-4000:]}"
            threading.Event().wait(0.02)

    def quiet(seen: dict[str, float]) -> bool:
        busy = ("num_running_reqs", "num_queue_reqs", "kv_used_tokens")
        return not any(total(seen, name) for name in busy) and not pages(seen, "request") and not pages(seen, "copy")

    seen = until(quiet, "everything comes to rest")
    figures = {name.removesuffix("_total"): total(seen, name) for name in FIGURES}
    for name in FIGURES:
        if name not in ("hicache_dropped_tokens_total",):
            assert total(seen, name) > 0, f"{name} is 0: this soak shows nothing; {figures}"
    flushed = httpx.post(f"{server.url}/flush_cache", timeout=30)
    assert flushed.status_code == 200, flushed.text
    until(lambda seen: not pages(seen, "tree") and not pages(seen, "parked") and quiet(seen), "every page is free")
    return figures


def pages(seen: dict[str, float], state: str) -> float:
    """Pages of all pools that are in a state."""
    return sum(value for key, value in seen.items() if key.startswith("pages{") and f"state={state}" in key)


def checkpoint_of(family: str, folder: Path) -> Path:
    """A small fp32 model with windows much shorter than the prompts."""
    more = {} if family == "qwen3" else {"sliding_window": 40}
    return make_checkpoint(
        folder / family, family, layers=LAYERS[family], context=CONTEXT, seed=7, tokenizer=False, **more
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    asks = make_load(arguments.requests, arguments.seed)
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        for family in arguments.families:
            checkpoint = checkpoint_of(family, Path(name))
            expected = without_cache(checkpoint, asks)
            for policy in arguments.policies:
                try:
                    report = soak(family, policy, checkpoint, Path(name) / f"kv-{family}", asks, expected)
                    print(report.line(), flush=True)
                except AssertionError as error:
                    failed += 1
                    print(f"{family} {policy}: FAILED: {error}", flush=True)
    print(f"seed {arguments.seed}: {'ok' if not failed else f'{failed} failed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
