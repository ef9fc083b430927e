"""Engines of several ranks as real processes: right answers, and an end as a whole, with a reason, when one is lost."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serinus.core.free_ports import free_ports
from serinus.testing.servers import Server

from .cluster import HTTP, ask_all, generate_all, has_open, idle, metric, until
from .grid import (
    MISSED_SOON,
    SMALL,
    Node,
    all_gone,
    ended,
    have_namespaces,
    prompts,
    ranks_of,
    right,
    signal_rank,
    toy,
    two_hosts,
)
from .plant import plant
from .rank_chaos import Storm

pytestmark = pytest.mark.slow

HOSTS = "namespaces" if have_namespaces() else "two loopback addresses, as no namespace can be made here"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.proof)], ids=["1 slice", "2 slices"])
def slices(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def grid(checkpoint: Path, slices: int) -> Iterator[Server]:
    """Two stages of so many slices each; a rank that is stopped for a while is not missed."""
    words = ("--tp-size", str(slices), "--pp-size", "2", "--rank-timeout", "60")
    with Server("serve", str(checkpoint), *words, *SMALL) as server:
        yield server


def test_a_grid_of_ranks_answers_what_one_process_would(grid: Server, checkpoint: Path) -> None:
    load = [(prompt, 12) for prompt in prompts(12, seed=1)]
    answers = generate_all(grid.url, load)
    assert [answer["output_ids"] for answer in answers] == [right(checkpoint, *item) for item in load]
    idle(grid.url)


@pytest.mark.proof
def test_a_rank_without_memory_for_a_step_fails_its_requests_and_no_rank_ends(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signs = plant(tmp_path, monkeypatch)
    words = ("--tp-size", "2", "--pp-size", "2", "--kv-canary", "raise", "--kv-canary-real-data", "all")
    with Server("serve", str(checkpoint), *words, *SMALL) as server:
        before = ranks_of(server.url)
        for rank, prompt in enumerate(prompts(4, seed=3)):
            sign = signs / str(rank)
            sign.write_text("import torch; torch.empty(1 << 60, dtype=torch.uint8)")
            answer = HTTP.post(f"{server.url}/generate", json={"input_ids": prompt})
            assert answer.status_code == 500, answer.text
            assert "no memory on" in answer.json()["error"]["message"]
            assert not sign.exists()
            (answers,) = generate_all(server.url, [(prompt, 12)])
            assert answers["output_ids"] == right(checkpoint, prompt, 12)
        assert ranks_of(server.url) == before
        assert metric(server.url, "kv_canary_violations_total") == 0
        idle(server.url)


def test_every_rank_is_shown_with_its_place_its_queues_and_its_time(grid: Server, slices: int) -> None:
    ranks = ranks_of(grid.url)
    assert list(ranks) == [f"TP{tp} PP{pp}" for pp in range(2) for tp in range(slices)]
    assert len({rank["pid"] for rank in ranks.values()}) == 2 * slices
    generate_all(grid.url, [(prompt, 4) for prompt in prompts(4, seed=2)])
    for rank in ranks.values():
        where = {"rank": rank["name"], "tp_rank": str(rank["tp_rank"]), "pp_rank": str(rank["pp_rank"])}
        assert metric(grid.url, "rank_compute_seconds_total", **where) > 0
        assert metric(grid.url, "num_running_reqs", **where) == 0
        text = HTTP.get(f"{grid.url}/metrics").text
        assert f'rank="{rank["name"]}"' in text
    assert metric(grid.url, "control_bytes_total") > 0
    assert metric(grid.url, "rank_steps_total") > 0


def test_a_storm_of_aborts_leaves_nothing_behind_on_any_rank(grid: Server, checkpoint: Path) -> None:
    storm = Storm(grid.url, checkpoint, random.Random(5), 40)
    with ThreadPoolExecutor(80) as pool:
        storm.judge(storm.begin(pool), calm=True)
    assert storm.seen["right"]
    idle(grid.url)


def test_a_killed_rank_ends_the_engine_in_words_and_its_client_hears_them(grid: Server, slices: int) -> None:
    last, pids = f"TP{slices - 1} PP1", [rank["pid"] for rank in ranks_of(grid.url).values()]
    with ThreadPoolExecutor(1) as pool:
        signal_rank(grid.url, last, signal.SIGSTOP)  # so that the request is there when it dies
        (answer,) = ask_all(pool, grid.url, [[1, 2, 3]], 400)
        until(lambda: has_open(grid.url, 1), "the request is there")
        signal_rank(grid.url, last, signal.SIGKILL)
        assert ended(grid) == 3
        assert answer.result().status_code in (500, 503)
        assert f"rank {last}" in answer.result().json()["error"]["message"]
    assert "died of SIGKILL" in grid.wait_line("the engine unified-0 ended with exit code 3")
    all_gone(pids)


@pytest.mark.proof
def test_a_leader_that_stands_still_is_ended_and_so_is_the_engine(checkpoint: Path) -> None:
    with (
        Server("serve", str(checkpoint), "--pp-size", "2", *SMALL, *MISSED_SOON) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        pids = [rank["pid"] for rank in ranks_of(server.url).values()]
        signal_rank(server.url, "TP0 PP0", signal.SIGSTOP)
        (answer,) = ask_all(pool, server.url, [[1, 2, 3]], 4)
        assert ended(server) == 3
        assert answer.result().status_code == 503
        assert "rank TP0 PP0" in answer.result().json()["error"]["message"]
        assert "gave no sign of life for 2 s" in server.output
        all_gone(pids)


@pytest.mark.proof
@pytest.mark.parametrize("hosts", [HOSTS, "IPv6"])
def test_two_hosts_are_one_engine_and_end_together(checkpoint: Path, hosts: str) -> None:
    with two_hosts(hosts) as pair:
        words = (str(checkpoint), "--tp-size", "2", "--nnodes", "2", *SMALL, *MISSED_SOON)
        words += ("--dist-init-addr", f"{pair.address}:{free_ports(1)[0]}")
        with Node(pair, *words, "--node-rank", "1") as node, Server("serve", *words) as server:
            load = [(prompt, 8) for prompt in prompts(4, seed=3)]
            answers = generate_all(server.url, load)
            assert [answer["output_ids"] for answer in answers] == [right(checkpoint, *item) for item in load]
            signal_rank(server.url, "TP1 PP0", signal.SIGSTOP)
            assert ended(server) == 3
            assert "rank TP1 PP0" in server.output
            assert "no sign of life for 2 s" in server.output
            code, output = node.end()
            assert code == 3, output
            assert "TP1 PP0 did not end with the engine" in output, "a rank that stands still says nothing itself"


@pytest.mark.proof
def test_a_rank_that_cannot_load_ends_the_start_with_its_reason(checkpoint: Path, tmp_path: Path) -> None:
    with two_hosts("loopback") as pair:
        words = ("--tp-size", "2", "--nnodes", "2", *SMALL, "--dist-init-addr", f"{pair.address}:{free_ports(1)[0]}")
        with Node(pair, str(tmp_path / "nowhere"), *words, "--node-rank", "1") as node:
            server = Server("serve", str(checkpoint), *words)
            try:
                assert server.process.wait(60) == 2
                assert "rank TP1 PP0" in server.output
                assert "nowhere" in server.output
            finally:
                server.kill()
            code, output = node.end()
            assert code == 2, output
