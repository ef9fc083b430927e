"""What the end-to-end stories share: the reference, a mixed load, and questions to a running cluster."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.reference_cache import cache_argument

HTTP = httpx.Client(timeout=120, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
"""One for all threads: to make a client costs more than to ask. Each question has a connection of its own."""


class Reference:
    """Greedy continuations by `transformers` itself, in fp32, one prompt at a time."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        self._torch, self._cache = torch, DynamicCache
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.vocab_size = int(self._model.config.vocab_size)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` tokens, end-of-sequence ignored."""
        torch = self._torch
        with torch.inference_mode():
            out, fed = [], torch.tensor([prompt])
            given = {cache_argument(self._model): self._cache(config=self._model.config)}
            for _ in range(count):
                step = self._model(fed, use_cache=True, **given)
                out.append(int(step.logits[0, -1].argmax()))
                fed = torch.tensor([[out[-1]]])
        return out


def mixed_prompts(count: int, vocab: int, seed: int) -> list[tuple[list[int], int]]:
    """(prompt, tokens to generate): short, long and shared beginnings, in random order."""
    rng = random.Random(seed)
    shared = [[rng.randrange(vocab) for _ in range(length)] for length in (40, 97, 160)]
    load = []
    for index in range(count):
        tail = [rng.randrange(vocab) for _ in range(rng.choice((1, 3, 8, 20, 75)))]
        load.append(((shared[index % 4] if index % 4 < 3 else []) + tail, rng.randint(4, 24)))
    rng.shuffle(load)
    return load


def generate(url: str, prompt: list[int], count: int, **more: Any) -> dict[str, Any]:
    """One greedy /generate call."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    answer = HTTP.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling, **more})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def generate_all(url: str, load: list[tuple[list[int], int]]) -> list[dict[str, Any]]:
    """The answers to all of these, asked at the same time."""
    with ThreadPoolExecutor(len(load)) as pool:
        return list(pool.map(lambda item: generate(url, *item), load))


def metric(url: str, name: str, **labels: str) -> float:
    """Sum of the series `serinus:NAME` that carry these labels."""
    total = 0.0
    for line in HTTP.get(f"{url}/metrics").text.splitlines():
        found = re.match(rf"serinus:{name}(?:{{(.*)}})? (\S+)$", line)
        if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
            total += float(found[2])
    return total


def engines(url: str) -> dict[str, dict[str, Any]]:
    """/server_info of the engines behind a router, by name."""
    members = HTTP.get(f"{url}/server_info").json()["engines"]
    return {m["server_info"]["engine"]: m["server_info"] for m in members if m["server_info"]}


def ask_all(pool: ThreadPoolExecutor, url: str, prompts: list[list[int]], count: int) -> list[Future[httpx.Response]]:
    """One greedy /generate call per prompt, all at once, whatever comes of it."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]
    return [pool.submit(HTTP.post, f"{url}/generate", json=body) for body in bodies]


def url_of(url: str, name: str) -> str:
    """The own address of an engine behind a router: it answers whatever the others do."""
    members = HTTP.get(f"{url}/server_info").json()["engines"]
    return next(m["url"] for m in members if m["server_info"] and m["server_info"]["engine"] == name)


def pid_of(url: str, name: str) -> int:
    """The engine process (not its front) behind a router, or of a server of its own."""
    info = engines(url)[name] if name else HTTP.get(f"{url}/server_info").json()
    return int(info["info"]["pid"])


def kill_engine(url: str, name: str) -> None:
    """SIGKILL to an engine process."""
    os.kill(pid_of(url, name), signal.SIGKILL)


@contextlib.contextmanager
def paused(url: str, name: str = "") -> Iterator[None]:
    """An engine process stands still meanwhile: what is sent to it waits, and so do callers that need its answer.

    Its front lives and takes requests. The engine may be killed inside.
    """
    pid = pid_of(url, name)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


QUEUES = (
    "num_running_reqs",
    "num_queue_reqs",
    "num_prefill_bootstrap_queue_reqs",
    "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
    "kv_used_tokens",
)


def busy(url: str) -> dict[str, float]:
    """The gauges that must be zero without requests, as far as they are not."""
    return {name: value for name in QUEUES if (value := metric(url, name))}


def until(check: Callable[[], bool], what: str, limit_s: float = 120.0) -> None:
    """Ask until it holds; every question goes over HTTP, so this does not spin."""
    end = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < end, f"after {limit_s} s still not: {what}"


def idle(url: str) -> None:
    """All gauges come back to zero (an engine may hear of an end a moment after the client did)."""
    until(lambda: not busy(url), f"all queues of {url} empty and all pages free or cached: {busy(url)}")


def has_open(url: str, count: int) -> bool:
    """Has a front so many requests? Its engine may be paused (then this takes seconds)."""
    return bool(HTTP.get(f"{url}/server_info").json()["open_requests"] == count)


def handed_over(url: str, prompt: list[int]) -> bool:
    """Is a prompt that is not cached computed by a prefill engine?"""
    HTTP.post(f"{url}/flush_cache")
    return bool(generate(url, prompt, 4)["meta_info"]["handoff_tokens"])
