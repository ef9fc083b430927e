"""Heals as clients see them: real processes over real HTTP, behind a router and alone, streamed and not.

Faults are planted by the engine's own order (`/canary/perturb`) into KV that running requests read. Every answer that
ends well is the oracle's; a stream that cannot be ends with the error event that names its first wrong token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serinus.models import load_spec
from serinus.selftest import make_canary_toy
from serinus.testing.oracle import toy_continue
from serinus.testing.servers import Server

from .cluster import HTTP, engines, generate, idle, metric, until, url_of

pytestmark = pytest.mark.proof

ENGINE = (
    "--skip-tokenizer-init", "--device", "cpu", "--dtype", "bfloat16", "--page-size", "8", "--max-total-tokens", "4096",
    "--max-running-requests", "8", "--kv-canary", "heal", "--kv-canary-real-data", "all", "--kv-canary-perturb-api",
    "--kv-canary-retire-max", "1000",
)  # fmt: skip
NEW = 300
AFTER = 6
"""Tokens of a stream after which the fault is ordered."""


@dataclass(kw_only=True)
class Served:
    """An engine that heals, and what its model answers. Clients ask `url`, faults are ordered of `decode`."""

    url: str
    decode: str
    folder: Path
    rng: random.Random = field(default_factory=lambda: random.Random(12))

    def prompt(self) -> list[int]:
        """40 tokens, unlike those of any other prompt."""
        return [self.rng.randrange(5, 500) for _ in range(40)]

    def right(self, prompt: list[int], count: int = NEW) -> list[int]:
        return toy_continue(load_spec(self.folder), prompt, count)

    def plant(self) -> None:
        """One bit of what some running request reads, in its next step."""
        order = {"perturb": {"real_kv_used": 1.0}, "target": "full", "count": 1, "seconds": 20}
        answer = HTTP.post(f"{self.decode}/canary/perturb", json=order)
        assert answer.status_code == 200, answer.text

    def stream(self, prompt: list[int]) -> Stream:
        """A stream during which a fault is planted, to its end."""
        body = {
            "input_ids": prompt, "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True},
        }  # fmt: skip
        got = Stream()
        with HTTP.stream("POST", f"{self.url}/generate", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    got.error = event["error"]
                    continue
                before, got.tokens, got.last = len(got.tokens), event["output_ids"], event
                if before <= AFTER < len(got.tokens):
                    self.plant()
        return got

    def rest(self) -> None:
        """All queues are empty and, once quarantined pages are released, all pages free."""
        until(lambda: HTTP.post(f"{self.url}/flush_cache").status_code == 200, "it has flushed")
        idle(self.url)

    def faults(self) -> int:
        return int(HTTP.get(f"{self.decode}/canary").json()["injected_total"])


@dataclass
class Stream:
    """What a client has of it in the end."""

    tokens: list[int] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None


@contextmanager
def up(folder: Path, *words: str) -> Iterator[Served]:
    """A prefill and a decode engine behind a router."""
    folder = make_canary_toy(folder, "full", context=512)
    pair = ("--prefill", "1", "--decode", "1", "--disaggregation-min-tokens", "1")
    with Server("up", str(folder), *pair, *ENGINE, *words, timeout_s=240) as server:
        until(lambda: len(engines(server.url)) == 2, "the router knows both engines")
        yield Served(url=server.url, decode=url_of(server.url, "decode-0"), folder=folder)


@contextmanager
def serve(folder: Path, *words: str) -> Iterator[Served]:
    """One engine by itself."""
    folder = make_canary_toy(folder, "full", context=512)
    with Server("serve", str(folder), *ENGINE, *words, timeout_s=240) as server:
        yield Served(url=server.url, decode=server.url, folder=folder)


def test_an_eager_stream_behind_a_router_is_right_or_names_its_first_wrong_token(tmp_path: Path) -> None:
    with up(tmp_path, "--kv-canary-coverage", "rotating:16") as served:
        wrong = faults = 0
        while faults < 5 or (not wrong and faults < 50):  # many a bit changes no token before it is found
            faults += 1
            prompt = served.prompt()
            got, right = served.stream(prompt), served.right(prompt)
            if got.error is None:
                assert got.tokens == right
                continue
            wrong += 1
            assert got.error["code"] == "kv_integrity", got.error
            at = int(got.error["param"].removeprefix("output[").removesuffix("]"))
            assert got.tokens[:at] == right[:at]
            assert got.tokens[at] != right[at]
            assert f"token {at} " in got.error["message"]
            assert f"id {got.tokens[at]}, computed again it is {right[at]}" in got.error["message"]
        assert served.faults() == faults
        assert wrong > 0, f"none of {faults} faults changed a token that had left"
        assert metric(served.decode, "kv_canary_heals_total", result="stream_wrong") == wrong
        answers = _asked_while_faults_come(served)
        assert sum(receipt["heals"] for receipt in answers) > 0
        served.rest()


def test_a_confirmed_stream_never_has_a_wrong_token(tmp_path: Path) -> None:
    """Also under rotating coverage, where a fault is found up to 15 steps after it was read first."""
    with up(tmp_path, "--kv-canary-coverage", "rotating:16", "--kv-canary-stream", "confirmed") as served:
        heals = 0
        for _ in range(5):
            prompt = served.prompt()
            got = served.stream(prompt)
            assert got.error is None
            assert got.tokens == served.right(prompt)
            receipt = got.last["meta_info"]["kv_integrity"]
            assert receipt["horizon"] == len(prompt) + NEW - 1
            heals += receipt["heals"]
        assert served.faults() == 5
        assert heals > 0
        assert metric(served.decode, "kv_canary_heals_total", result="stream_wrong") == 0
        served.rest()


def test_with_full_coverage_an_eager_stream_is_healed_unseen_and_its_trailer_says_so(tmp_path: Path) -> None:
    with serve(tmp_path, "--kv-canary-coverage", "full") as served:
        for _ in range(3):
            prompt = served.prompt()
            got = served.stream(prompt)
            assert (got.error, got.tokens) == (None, served.right(prompt))
            receipt = got.last["meta_info"]["kv_integrity"]
            assert receipt["heals"] == 1, receipt
            assert "verify_real_kv_hash" in receipt["heal_reasons"][0]
        _several_answers_of_one_prompt(served)
        _a_deadline_during_a_heal(served)
        served.rest()


def _asked_while_faults_come(served: Served) -> list[dict[str, Any]]:
    """Answers that are not streamed are right, whatever is found meanwhile; their receipts."""
    prompts = [served.prompt() for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        served.plant()
        waiting = [pool.submit(generate, served.url, prompt, NEW) for prompt in prompts]
        answers = [future.result() for future in waiting]
    assert [answer["output_ids"] for answer in answers] == [served.right(prompt) for prompt in prompts]
    return [answer["meta_info"]["kv_integrity"] for answer in answers]


def _several_answers_of_one_prompt(served: Served) -> None:
    """They share the pages of their prompt, and all are healed where one of these is wrong."""
    prompt = served.prompt()
    body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "n": 3, "ignore_eos": True}
    served.plant()
    answer = HTTP.post(f"{served.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    receipts = answer.json()["usage"]["kv_integrity"]
    assert sum(receipt["heals"] for receipt in receipts) >= 1
    assert len({receipt["chain_hash"] for receipt in receipts}) == 1, "the same tokens, three times"
    alone = generate(served.url, prompt, NEW)
    assert alone["output_ids"] == served.right(prompt)
    assert receipts[0]["chain_hash"] == alone["meta_info"]["kv_integrity"]["chain_hash"]


def _a_deadline_during_a_heal(served: Served) -> None:
    """Requests of little time are healed and end in time or with 504; nothing of them stays."""
    seconds = (0.05, 0.15, 0.45, 1.35, 4.0, 100.0)  # the first has too little on any machine, the last enough
    prompts = [served.prompt() for _ in seconds]
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    bodies = [
        {"input_ids": prompt, "sampling_params": sampling, "timeout": timeout}
        for prompt, timeout in zip(prompts, seconds, strict=True)
    ]
    with ThreadPoolExecutor(6) as pool:
        served.plant()
        waiting = [pool.submit(HTTP.post, f"{served.url}/generate", json=body) for body in bodies]
        answers = [future.result() for future in waiting]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.status_code in (200, 504), answer.text
        if answer.status_code == 200:
            assert answer.json()["output_ids"] == served.right(prompt)
    assert answers[0].status_code == 504
    assert answers[-1].status_code == 200
