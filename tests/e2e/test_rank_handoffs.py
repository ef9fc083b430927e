"""Prefill and decode apart, of several ranks each, as real processes: right answers, empty queues, and a lost rank."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serinus.testing.servers import Server

from .cluster import ask_all, generate, generate_all, metric, until
from .grid import SMALL, is_gone, prompts, ranks_of, right, signal_rank, toy

pytestmark = pytest.mark.proof

GAUGES = ("num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs", "num_decode_prealloc_queue_reqs",
          "num_decode_transfer_queue_reqs", "num_running_reqs")  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def grids(checkpoint: Path) -> Iterator[Server]:
    """Two stages that prefill, two slices that decode."""
    words = ("--disaggregation-min-tokens", "1", "--prefill-pp-size", "2", "--decode-tp-size", "2")
    with Server("up", str(checkpoint), "--prefill", "1", "--decode", "1", *words, *SMALL) as server:
        yield server


def url_of(server: Server, engine: str) -> str:
    """The address of an engine, as it said."""
    found = re.search(rf"as {engine} on (http://\S+?),", server.output)
    assert found is not None, server.output
    return found[1]


def queued(url: str) -> dict[str, float]:
    """What each rank of an engine counts in its queues."""
    return {
        f"{name} {gauge}": metric(url, gauge, rank=name, tp_rank=str(rank["tp_rank"]), pp_rank=str(rank["pp_rank"]))
        for name, rank in ranks_of(url).items()
        for gauge in GAUGES
    }


def test_stages_hand_over_to_slices_and_every_queue_of_every_rank_empties(grids: Server, checkpoint: Path) -> None:
    load = [(prompt, 10) for prompt in prompts(12, seed=4)]
    answers = generate_all(grids.url, load)
    assert [answer["output_ids"] for answer in answers] == [right(checkpoint, *item) for item in load]
    assert any(answer["meta_info"]["handoff_tokens"] for answer in answers)
    for engine in ("prefill-0", "decode-0"):
        url = url_of(grids, engine)
        until(lambda url=url: not any(queued(url).values()), f"nothing waits in {engine}")  # type: ignore[misc]
    assert metric(url_of(grids, "decode-0"), "num_transfer_failed_reqs_total") == 0


def test_a_lost_stage_ends_its_engine_and_decode_computes_what_it_waits_for(grids: Server, checkpoint: Path) -> None:
    prefill = url_of(grids, "prefill-0")
    pids = [int(rank["pid"]) for rank in ranks_of(prefill).values()]
    prompt = prompts(20, seed=9)[18]
    with ThreadPoolExecutor(1) as pool:
        signal_rank(prefill, "TP0 PP1", signal.SIGSTOP)  # so that the prompt is there when it dies
        (answer,) = ask_all(pool, grids.url, [prompt], 6)
        signal_rank(prefill, "TP0 PP1", signal.SIGKILL)
        assert answer.result(60).json()["output_ids"] == right(checkpoint, prompt, 6)
    until(lambda: all(map(is_gone, pids)), "the whole prefill engine has ended", 20)
    assert generate(grids.url, prompt, 6)["output_ids"] == right(checkpoint, prompt, 6)
