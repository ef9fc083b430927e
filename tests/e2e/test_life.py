"""How servers end: SIGTERM drains, a second one does not wait, and a start says where its time went."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from serinus.testing.servers import Server

from .cluster import HTTP, generate, handed_over, has_open, paused, until
from .conftest import HANDS_OVER, small
from .plant import plant

pytestmark = pytest.mark.slow


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones(checkpoint: Path) -> None:
    with Server("serve", str(checkpoint), *small()) as server, ThreadPoolExecutor(1) as pool:
        assert f"the dashboard: {server.url}/dashboard" in server.output
        with paused(server.url):
            running = pool.submit(generate, server.url, [1, 2, 3], 100)
            until(lambda: has_open(server.url, 1), "the request is there")
            server.process.send_signal(signal.SIGTERM)
            server.wait_line("drain")
        with pytest.raises(httpx.HTTPError):
            HTTP.post(
                f"{server.url}/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
            ).raise_for_status()
        assert len(running.result()["output_ids"]) == 100
        assert server.process.wait(60) == 0


@pytest.fixture
def hangup() -> Iterator[None]:
    """Children hear SIGHUP, also where these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_closed_ends_what_it_runs(checkpoint: Path, hangup: None) -> None:
    with Server("serve", str(checkpoint), *small()) as server, ThreadPoolExecutor(1) as pool:
        with paused(server.url):
            running = pool.submit(generate, server.url, [1, 2, 3], 100)
            until(lambda: has_open(server.url, 1), "the request is there")
            os.killpg(server.process.pid, signal.SIGHUP)
            server.wait_line("drain")
        assert len(running.result()["output_ids"]) == 100
        assert server.process.wait(60) == 0


@pytest.mark.proof
def test_a_second_sigterm_stops_now(checkpoint: Path) -> None:
    with Server("serve", str(checkpoint), *small()) as server, ThreadPoolExecutor(1) as pool:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 450, "ignore_eos": True, "n": 12}}
        with paused(server.url):
            running = pool.submit(HTTP.post, f"{server.url}/generate", json=body)
            until(lambda: has_open(server.url, 12), "the requests are there")
            server.process.send_signal(signal.SIGTERM)
            server.wait_line("drain")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) is not None
        with pytest.raises((httpx.HTTPError, AssertionError)):
            assert running.result().status_code == 200


@pytest.mark.proof
def test_a_cluster_starts_with_a_word_on_where_the_time_went_and_stops_whole(checkpoint: Path) -> None:
    with Server("up", str(checkpoint), *HANDS_OVER, *small()) as server:
        told = re.findall(r"dashboard: (\S+)", server.output)
        assert told == [f"{server.url}/dashboard"], "no engine's"
        line = server.wait_line(r"decode-0 .*ready in")
        assert re.search(r"imports [\d.]+ s, kernels [\d.]+ s, weights [\d.]+ s, pool [\d.]+ s, warm-up [\d.]+ s", line)
        assert generate(server.url, list(range(40)), 3)["meta_info"]["prefill_engine"] == "prefill-0"
        assert server.stop() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_an_engine_ends_at_once_when_its_front_ended_before_it_began(tmp_path: Path) -> None:
    words = ["--config", str(tmp_path / "none"), "--endpoint", f"ipc://{tmp_path}/x", "--parent", "1"]
    done = subprocess.run([sys.executable, "-m", "serinus.engine.process", *words], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_stands_in_a_step_shows_where_and_is_ended(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    signs = plant(tmp_path, monkeypatch)
    words = ("serve", str(checkpoint), *small(), "--tp-size", str(ranks), "--watchdog-timeout", "10")
    with Server(*words) as server:
        (signs / str(ranks - 1)).write_text("import threading; threading.Event().wait(600)")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(HTTP.post, f"{server.url}/generate", json={"input_ids": [1, 2, 3]})
            until(lambda: HTTP.get(f"{server.url}/health").status_code == 503, "it is seen to stand still")
            assert server.process.poll() is None
            answer = asked.result(60)
        assert answer.status_code == 503
        assert "stood in one step for 10 s (--watchdog-timeout)" in answer.json()["error"]["message"]
        assert server.process.wait(60) == 3
        assert "in before_layer" in server.output, f"the stack of the rank that stands still: {server.output}"


@pytest.mark.proof
def test_engines_and_a_router_at_ipv6_addresses_hand_a_prompt_over(checkpoint: Path) -> None:
    """Prefill listens on every interface: the router names the host of its URL."""
    more = ("--disaggregation-transfer-backend", "tcp", "--cluster-secret", "all know it")
    words = ("serve", str(checkpoint), *small(), *more, "--disaggregation-mode")
    with (
        Server(*words, "prefill", "--disaggregation-bootstrap-host", "::", host="::1") as prefill,
        Server(*words, "decode", *HANDS_OVER, host="::1") as decode,
        Server(
            "router", "--prefill", prefill.url, "--decode", decode.url, "--cluster-secret", "all know it",
            host="::1", ready="router on",
        ) as router,
    ):  # fmt: skip
        assert prefill.url.startswith("http://[::1]:")
        until(lambda: HTTP.get(f"{router.url}/health").status_code == 200, "the router has looked at its engines")
        until(lambda: handed_over(router.url, [7] * 99), "prompts are handed over")
        meta = generate(router.url, list(range(40)), 3)["meta_info"]
        assert (meta["prefill_engine"], meta["handoff_tokens"]) == ("prefill-0", 40)
        assert HTTP.get(f"{prefill.url}/server_info").json()["pd_address"].startswith("tcp://[::]:")
        peers = HTTP.get(f"{decode.url}/server_info").text
        assert "tcp://[::1]:" in peers
