"""Clients that leave, engines that are killed: no wrong token, no leaked page, no client waiting for a dead engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from serinus.testing.servers import Server
from tests.cells import some

from .cluster import (
    HTTP,
    Reference,
    ask_all,
    busy,
    engines,
    generate,
    handed_over,
    has_open,
    idle,
    kill_engine,
    metric,
    paused,
    until,
    url_of,
)
from .conftest import HANDS_OVER, small

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def long_prompts(reference: Reference) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(reference.vocab_size) for _ in range(rng.randint(300, 400))] for _ in range(12)]


@pytest.fixture(scope="module")
def expected(reference: Reference, long_prompts: list[list[int]]) -> list[list[int]]:
    return [reference.greedy(prompt, 24) for prompt in long_prompts]


@pytest.fixture(scope="module")
def two_decodes(checkpoint: Path) -> Iterator[Server]:
    words = ["up", str(checkpoint), "--prefill", "1", "--decode", "2", *HANDS_OVER, *small()]
    with Server(*words) as server:
        yield server


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


@pytest.mark.parametrize("events", some([0, 1, 2, 5], 0, 5))
def test_clients_that_hang_up_in_any_phase_leave_nothing_behind(
    cluster: Server, long_prompts: list[list[int]], events: int
) -> None:
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda prompt: leave_early(cluster.url, [events, *prompt], events), long_prompts))
    idle(cluster.url)


def waiting_for_prefill(url: str, count: int) -> None:
    """Return when so many requests of decode-0 (by its own address) have pages and no KV."""
    until(lambda: metric(url, "num_decode_transfer_queue_reqs") == count, f"{count} handoffs are under way")


def right_or_said(answer: httpx.Response, expected: list[int]) -> bool:
    """Is this the whole right answer, or an error in words?"""
    if answer.status_code == 200:
        return bool(answer.json()["output_ids"] == expected)
    return answer.status_code in (502, 503) and bool(answer.json()["error"]["message"])


def test_abort_request_ends_what_waits_for_a_prefill_engine_and_tells_the_clients(
    cluster: Server, long_prompts: list[list[int]]
) -> None:
    until(lambda: handed_over(cluster.url, long_prompts[0]), "prompts are handed over")
    decode = url_of(cluster.url, "decode-0")
    with ThreadPoolExecutor(12) as pool:
        with paused(cluster.url, "prefill-0"):
            waiting = ask_all(pool, cluster.url, [[9, *prompt[:99]] for prompt in long_prompts], 400)
            waiting_for_prefill(decode, len(long_prompts))
            assert HTTP.post(f"{decode}/abort_request", json={"abort_all": True}).status_code == 200
            answers = [future.result() for future in waiting]
            until(lambda: not busy(decode), "decode-0 is empty while prefill-0 still stands")
        assert all(answer.status_code == 200 for answer in answers)
        assert {answer.json()["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
        assert not any(answer.json()["output_ids"] for answer in answers)
    idle(cluster.url)


def test_abort_request_ends_what_runs_and_tells_the_clients(cluster: Server, long_prompts: list[list[int]]) -> None:
    with ThreadPoolExecutor(12) as pool:
        waiting = ask_all(pool, cluster.url, [[9, *prompt[:99]] for prompt in long_prompts], 400)
        until(lambda: metric(cluster.url, "num_running_reqs", engine="decode-0") > 0 or waiting[0].done(), "one runs")
        assert HTTP.post(f"{cluster.url}/abort_request", json={"abort_all": True}).status_code == 200
        answers = [future.result() for future in waiting]
    for answer in answers:
        assert answer.status_code == 200
        ended, count = answer.json()["meta_info"]["finish_reason"]["type"], len(answer.json()["output_ids"])
        assert (ended, count == 400) in (("abort", False), ("length", True))
    idle(cluster.url)


def test_a_killed_prefill_engine_costs_its_clients_time_but_no_token(
    cluster: Server, long_prompts: list[list[int]], expected: list[list[int]]
) -> None:
    before = engines(cluster.url)["prefill-0"]["incarnation"]
    until(lambda: handed_over(cluster.url, long_prompts[0]), "prompts are handed over")
    HTTP.post(f"{cluster.url}/flush_cache")
    decode = url_of(cluster.url, "decode-0")
    failed = metric(decode, "num_transfer_failed_reqs_total", cause="peer_gone")
    few = long_prompts[:8]
    with ThreadPoolExecutor(len(few)) as pool:
        with paused(cluster.url, "prefill-0"):
            waiting = [pool.submit(generate, cluster.url, prompt, 24) for prompt in few]
            waiting_for_prefill(decode, len(few))
            kill_engine(cluster.url, "prefill-0")
        answers: list[dict[str, Any]] = [future.result() for future in waiting]
    assert [answer["output_ids"] for answer in answers] == expected[: len(few)]
    assert {answer["meta_info"]["local_reason"] for answer in answers} == {"peer_gone"}
    assert metric(decode, "num_transfer_failed_reqs_total", cause="peer_gone") == failed + len(few)
    idle(cluster.url)
    until(lambda: is_back(cluster.url, "prefill-0", before), "prefill-0 was started again")
    until(lambda: handed_over(cluster.url, long_prompts[0]), "prompts are handed over to the new prefill engine")


@pytest.mark.proof
def test_a_prefill_engine_may_die_while_pages_travel(
    cluster: Server, long_prompts: list[list[int]], expected: list[list[int]]
) -> None:
    until(lambda: handed_over(cluster.url, long_prompts[0]), "prompts are handed over")
    HTTP.post(f"{cluster.url}/flush_cache")
    before = engines(cluster.url)["prefill-0"]["incarnation"]
    sent = metric(cluster.url, "kv_transfer_pages_total", direction="sent")
    with ThreadPoolExecutor(len(long_prompts)) as pool:
        waiting = [pool.submit(generate, cluster.url, prompt, 24) for prompt in long_prompts]
        until(lambda: metric(cluster.url, "kv_transfer_pages_total", direction="sent") > sent, "pages travel")
        kill_engine(cluster.url, "prefill-0")
        answers: list[dict[str, Any]] = [future.result() for future in waiting]
    assert [answer["output_ids"] for answer in answers] == expected
    idle(cluster.url)
    until(lambda: is_back(cluster.url, "prefill-0", before), "prefill-0 was started again")
    until(lambda: handed_over(cluster.url, long_prompts[0]), "prompts are handed over to the new prefill engine")


def test_a_killed_decode_engine_is_an_error_at_once_and_prefill_frees_everything(
    cluster: Server, long_prompts: list[list[int]]
) -> None:
    until(lambda: handed_over(cluster.url, long_prompts[0]), "prompts are handed over")
    before = engines(cluster.url)["decode-0"]["incarnation"]
    few = [[5, *prompt] for prompt in long_prompts[:8]]
    with ThreadPoolExecutor(len(few)) as pool:
        with paused(cluster.url, "prefill-0"):
            waiting = ask_all(pool, cluster.url, few, 100)
            waiting_for_prefill(url_of(cluster.url, "decode-0"), len(few))
            kill_engine(cluster.url, "decode-0")
            answers = [future.result() for future in waiting]
        assert {answer.status_code for answer in answers} <= {502, 503}
        assert all("message" in answer.json()["error"] for answer in answers)
        idle(url_of(cluster.url, "prefill-0"))
    until(lambda: is_back(cluster.url, "decode-0", before), "decode-0 was started again")
    idle(cluster.url)
    assert len(generate(cluster.url, long_prompts[0], 8)["output_ids"]) == 8


@pytest.mark.proof
def test_a_decode_engine_may_die_while_its_requests_run(
    cluster: Server, long_prompts: list[list[int]], expected: list[list[int]]
) -> None:
    before = engines(cluster.url)["decode-0"]["incarnation"]
    asked = metric(cluster.url, "num_requests_total", engine="decode-0")
    with ThreadPoolExecutor(len(long_prompts)) as pool:
        waiting = ask_all(pool, cluster.url, long_prompts, 24)
        until(lambda: metric(cluster.url, "num_requests_total", engine="decode-0") > asked, "a request is there")
        kill_engine(cluster.url, "decode-0")
        answers = [future.result() for future in waiting]
    assert all(right_or_said(answer, tokens) for answer, tokens in zip(answers, expected, strict=True))
    until(lambda: is_back(cluster.url, "decode-0", before), "decode-0 was started again")
    idle(cluster.url)


@pytest.mark.proof
def test_the_router_asks_another_decode_engine_where_nothing_was_streamed(
    two_decodes: Server, long_prompts: list[list[int]], expected: list[list[int]]
) -> None:
    sick = url_of(two_decodes.url, "decode-1")
    with ThreadPoolExecutor(len(long_prompts)) as pool:
        with paused(two_decodes.url, "decode-1"):
            waiting = [pool.submit(generate, two_decodes.url, prompt, 24) for prompt in long_prompts]
            until(lambda: not has_open(sick, 0), "it has work")
            kill_engine(two_decodes.url, "decode-1")
        answers = [future.result() for future in waiting]
    assert [answer["output_ids"] for answer in answers] == expected
    assert metric(two_decodes.url, "router_retries_total") > 0
    idle(two_decodes.url)
