"""Clients that leave and engines that are killed: no wrong token, no leaked page, nobody waits for the dead."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from serinus.testing.servers import Server

from .cluster import Reference, engines, generate, idle, metric, until
from .conftest import small

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def long_prompts(reference: Reference) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(reference.vocab_size) for _ in range(rng.randint(300, 400))] for _ in range(12)]


@pytest.fixture(scope="module")
def expected(reference: Reference, long_prompts: list[list[int]]) -> list[list[int]]:
    return [reference.greedy(prompt, 24) for prompt in long_prompts]


@pytest.fixture(scope="module")
def cluster(checkpoint: Path) -> Iterator[Server]:
    words = ["up", str(checkpoint), "--prefill", "1", "--decode", "1", *small()]
    with Server(*words) as server:
        yield server


@pytest.fixture(scope="module")
def two_decodes(checkpoint: Path) -> Iterator[Server]:
    words = ["up", str(checkpoint), "--prefill", "1", "--decode", "2", *small()]
    with Server(*words) as server:
        yield server


def kill_engine(url: str, name: str) -> None:
    os.kill(int(engines(url)[name]["info"]["pid"]), signal.SIGKILL)


def is_back(url: str, name: str, incarnation: str) -> bool:
    info = engines(url).get(name)
    return info is not None and info["incarnation"] != incarnation


def leave_early(url: str, prompt: list[int], events: int) -> int:
    """Stream an answer and hang up after so many events (0: before the first); returns how many came."""
    body = {"input_ids": prompt, "stream": True, "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
    seen = 0
    timeout = httpx.Timeout(60, read=0.02 if events == 0 else 60)
    try:
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=timeout) as answer:
            for line in answer.iter_lines():
                seen += line.startswith("data:")
                if seen >= events:
                    break
    except httpx.ReadTimeout:
        assert events == 0
    return seen


@pytest.mark.parametrize("events", [0, 1, 2, 5])
def test_clients_that_hang_up_in_any_phase_leave_nothing_behind(
    cluster: Server, long_prompts: list[list[int]], events: int
) -> None:
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda prompt: leave_early(cluster.url, [events, *prompt], events), long_prompts))
    idle(cluster.url)


def test_abort_request_ends_everything_and_tells_the_clients(cluster: Server, long_prompts: list[list[int]]) -> None:
    before = metric(cluster.url, "num_requests_total", engine="decode-0")
    with ThreadPoolExecutor(12) as pool:
        body = {"sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        waiting: list[Future[httpx.Response]] = [
            pool.submit(httpx.post, f"{cluster.url}/generate", json={"input_ids": [9, *p[:99]], **body}, timeout=60)
            for p in long_prompts
        ]
        taken = before + len(long_prompts)
        until(lambda: metric(cluster.url, "num_requests_total", engine="decode-0") == taken, "all run or wait")
        assert httpx.post(f"{cluster.url}/abort_request", json={"abort_all": True}).status_code == 200
        answers = [future.result() for future in waiting]
    assert all(answer.status_code in (200, 499) for answer in answers)
    assert all("abort" in answer.text for answer in answers)
    idle(cluster.url)


def test_a_killed_prefill_engine_costs_its_clients_time_but_no_token(
    cluster: Server, long_prompts: list[list[int]], expected: list[list[int]]
) -> None:
    before = engines(cluster.url)["prefill-0"]["incarnation"]
    httpx.post(f"{cluster.url}/flush_cache")
    with ThreadPoolExecutor(len(long_prompts)) as pool:
        waiting = [pool.submit(generate, cluster.url, prompt, 24) for prompt in long_prompts]
        until(lambda: metric(cluster.url, "kv_transfer_pages_total", direction="sent") > 0, "pages travel")
        kill_engine(cluster.url, "prefill-0")
        answers: list[dict[str, Any]] = [future.result() for future in waiting]
    assert [answer["output_ids"] for answer in answers] == expected
    assert any(answer["meta_info"]["local_reason"] == "peer_gone" for answer in answers)
    idle(cluster.url)
    until(lambda: is_back(cluster.url, "prefill-0", before), "prefill-0 was started again", 60)

    def handed_over() -> bool:
        httpx.post(f"{cluster.url}/flush_cache")
        return bool(generate(cluster.url, long_prompts[0], 4)["meta_info"]["handoff_tokens"])

    until(handed_over, "prompts are handed over to the new prefill engine")


def test_a_killed_decode_engine_is_an_error_at_once_and_prefill_frees_everything(
    cluster: Server, long_prompts: list[list[int]]
) -> None:
    before = engines(cluster.url)["decode-0"]["incarnation"]
    sampling = {"max_new_tokens": 100, "ignore_eos": True}
    with ThreadPoolExecutor(len(long_prompts)) as pool:
        waiting = [
            pool.submit(httpx.post, f"{cluster.url}/generate", json=body, timeout=60)
            for body in ({"input_ids": [5, *prompt], "sampling_params": sampling} for prompt in long_prompts)
        ]
        until(lambda: metric(cluster.url, "num_running_reqs", engine="decode-0") > 0, "a request runs")
        kill_engine(cluster.url, "decode-0")
        answers = [future.result() for future in waiting]
    assert {answer.status_code for answer in answers} <= {200, 502, 503}
    assert any(answer.status_code != 200 for answer in answers)
    assert all("message" in answer.json()["error"] for answer in answers if answer.status_code != 200)
    until(lambda: is_back(cluster.url, "decode-0", before), "decode-0 was started again", 60)
    idle(cluster.url)
    assert len(generate(cluster.url, long_prompts[0], 8)["output_ids"]) == 8


def test_the_router_asks_another_decode_engine_where_nothing_was_streamed(
    two_decodes: Server, long_prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with ThreadPoolExecutor(len(long_prompts)) as pool:
        waiting = [pool.submit(generate, two_decodes.url, prompt, 24) for prompt in long_prompts]
        until(lambda: metric(two_decodes.url, "num_requests_total", engine="decode-1") > 0, "decode-1 has work")
        kill_engine(two_decodes.url, "decode-1")
        answers = [future.result() for future in waiting]
    assert [answer["output_ids"] for answer in answers] == expected
    idle(two_decodes.url)
