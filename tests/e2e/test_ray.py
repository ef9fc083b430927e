"""Engines on the nodes of a Ray cluster: every answer is the toy's right one, whatever happens to nodes and engines."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.testing.oracle import toy_continue
from serinus.testing.servers import READY
from tests.deploy.promql import scraped

from .cluster import until
from .otlp import Receiver
from .ray_group import KEY, NODE, RayGroup, ray_group

SMALL = (
    "--max-total-tokens", "1024", "--context-length", "256", "--page-size", "8", "--max-running-requests", "4",
    "--disaggregation-min-tokens", "16", "--skip-tokenizer-init", "--threads", "1",
)  # fmt: skip
SCALE = (
    "--prefill", "1", "--decode", "2", "--min-decode", "2", "--max-decode", "3", "--scale-up-after", "5",
    "--scale-down-after", "10",
)  # fmt: skip
SEEN = ("--log-format", "json", "--otlp-traces-endpoint")
READY_JSON = r'ready to roll.*"rank": "up"'
pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(850)]


class Asker:
    """Questions with known answers, to any of some routers."""

    def __init__(self, toy: Path) -> None:
        self._spec = load_spec(toy)
        self.routers: Sequence[str] = ()
        self.right = 0
        self.wrong: list[str] = []

    def ask(self, seed: int) -> None:
        """One question; what is wrong with its answer is noted."""
        rng = random.Random(seed)
        prompt = [rng.randrange(10, 500) for _ in range(rng.choice((5, 30, 60)))]
        count = rng.randint(8, 60)
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
        }
        try:
            answer = httpx.post(f"{self.routers[seed % len(self.routers)]}/generate", json=body, timeout=120)
            found = answer.json()["output_ids"] if answer.status_code == 200 else answer.text
        except httpx.HTTPError as err:
            found = repr(err)
        if found == toy_continue(self._spec, prompt, count):
            self.right += 1
        else:
            self.wrong.append(f"{seed}: {found}")

    @contextlib.contextmanager
    def asking(self, threads: int) -> Iterator[None]:
        """So many callers that ask one question after the other."""
        end = threading.Event()

        def call(first: int) -> None:
            for seed in range(first, 1 << 30, 1000):
                if end.is_set():
                    return
                self.ask(seed)

        with ThreadPoolExecutor(threads) as pool:
            calls = [pool.submit(call, 1000 + number) for number in range(threads)]
            try:
                yield
            finally:
                end.set()
            for each in calls:
                each.result()


def healthy(group: RayGroup, router: str, kind: str) -> set[str]:
    """The URLs of the engines of a kind that this router sends requests to."""
    workers = group.workers(router).values()
    return {each["url"] for each in workers if each["worker_type"] == kind and each["is_healthy"]}


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        return httpx.get(f"{url}/version", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def shown(url: str) -> dict[str, str]:
    """Names of the engines of which the page of this router has had news, by URL."""
    members, news = {}, set()
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.stream("GET", f"{url}/dashboard/events", headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()
        while not members or news < set(members):
            line = next(lines)
            if line.startswith("event: "):
                news.add(line.removeprefix("event: "))
            elif line.startswith('data: {"kind":"fleet"'):
                members = {each["url"]: each["name"] for each in json.loads(line.removeprefix("data: "))["members"]}
    return members


def refused(*words: str) -> str:
    """What a command says that ends with exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "serinus", *words], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_node_dies_engines_come_and_go_and_every_answer_is_right(tmp_path: Path) -> None:
    """Their page, metrics, traces and log are of the whole cluster."""
    toy = make_toy(tmp_path / "toy", context=256)
    asker = Asker(toy)
    with Receiver() as receiver, ray_group(toy, *SMALL, *SCALE, *SEEN, receiver.grpc_url, ready=READY_JSON) as group:
        engines, routers = group.engines(), group.routers()
        assert set(engines) == {"prefill-0", "decode-0", "decode-1"}
        assert len({each["node"] for each in engines.values()}) == 3, "engines are spread over the nodes"
        assert len(routers) == 3, "a router on every node"
        for url in routers.values():
            assert shown(url) == {each["url"]: name for name, each in engines.items()}
        head = group.cluster.head_node.node_id
        lost = next(each for each in engines.values() if each["name"] != "prefill-0" and each["node"] != head)

        asker.routers = [url for node, url in routers.items() if node != lost["node"]]
        # Four at a time fill one engine: on no machine do they call for a third, and the lost one is placed again
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(asker.ask, seed) for seed in range(200)]
            until(lambda: asker.right > 50 or not group.workers(asker.routers[0]), "50 answers")
            group.kill_node(lost["node"])
            for each in asked:
                each.result()
        assert (asker.right, asker.wrong) == (200, [])

        again = rf"{lost['name']} is ready again"
        group.server.wait_line(again, 120)
        for router in asker.routers:
            until(lambda url=router: len(healthy(group, url, "decode")) >= 2, f"two decode engines at {router}")
            assert lost["url"] not in group.workers(router)
        assert group.engines()[lost["name"]]["node"] != lost["node"]
        assert set(group.routers().values()) == set(asker.routers)
        assert "serinus: scale" not in group.server.output

        with asker.asking(12):
            group.server.wait_line(r"scale decode 2 -> 3", 120)
            third = "a third decode engine"  # it starts on cores that the askers keep busy
            until(lambda: len(healthy(group, asker.routers[0], "decode")) == 3, third, 300)
            until(lambda: asker.right > 220, "20 answers, of three engines too")
            (last,) = set(group.engines()) - set(engines)
        with asker.asking(1):
            group.server.wait_line(r"scale decode 3 -> 2", 120)
            group.server.wait_line(f"{last} is drained", 60)
            group.server.wait_line(f"{last} is gone", 120)
        assert asker.wrong == []
        assert asker.right > 220
        assert len(healthy(group, asker.routers[0], "decode")) == 2
        scrape = httpx.get(f"{asker.routers[0]}/metrics", timeout=60).text
        found = {each["engine"] for each in scraped(scrape)["serinus:num_requests_total"]}
        assert found == set(group.engines())
        assert {each["to"] for each in scraped(scrape)["serinus:router_engine_up"]} == set(shown(asker.routers[0]))
        trace = "ab" * 16
        body = {"input_ids": [*range(30, 90)], "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        assert httpx.post(f"{asker.routers[0]}/generate", json=body, headers=headers, timeout=120).status_code == 200
        services = {"serinus-router", "serinus-decode", "serinus-prefill"}
        receiver.wait(lambda: {each["service"] for each in receiver.of(trace)} == services, f"spans of {services}")
    # Ray's own words about the node that died go to stdout, which the test reads together with the log.
    lines = [json.loads(line) for line in group.server.output.splitlines() if line[:1] == "{" or "serinus" in line]
    assert {line.get("engine") for line in lines} >= {*engines, None}
    assert not [name for line in lines for name in line if name.startswith("_")]


def test_an_engine_that_finds_no_room_says_why_and_starts_when_a_node_comes(tmp_path: Path) -> None:
    """Two stages of two ranks, on nodes of two cores each; there is one node at first."""
    toy = make_toy(tmp_path / "toy", context=256, kv_heads=2)
    words = (*SMALL, "--prefill", "0", "--decode", "1", "--tp-size", "2", "--pp-size", "2")
    with ray_group(toy, *words, nodes=0, ready="waits for room") as group:
        said = group.server.wait_line("unified-0 waits for room", 10)
        assert "bundle 0 of 2 (2 CPU on one node) finds no room: 1 nodes" in said
        assert said.endswith("free in all: 2 CPU")
        words = ("--ray", "--ray-address", group.cluster.address, "--ray-namespace", "other")
        no_model = refused("up", str(tmp_path / "none"), *words, "--prefill", "0", "--decode", "1")
        assert "unified-0 is gone" in no_model
        assert "ready to roll" not in no_model
        group.cluster.add_node(**NODE)
        group.server.wait_line(READY, 240)
        ranks = group.engines()
        assert set(ranks) == {"unified-0", "unified-0-TP1-PP0", "unified-0-TP0-PP1", "unified-0-TP1-PP1"}
        node = {name: each["node"] for name, each in ranks.items()}
        assert node["unified-0"] == node["unified-0-TP1-PP0"], "the ranks of a stage are packed"
        assert node["unified-0-TP0-PP1"] == node["unified-0-TP1-PP1"] != node["unified-0"], "stages are spread"
        assert len({each["pid"] for each in ranks.values()}) == 4
        assert len(group.routers()) == 2
        asker = Asker(toy)
        asker.routers = list(group.routers().values())
        for seed in range(8):
            asker.ask(seed)
        lost = ranks["unified-0-TP1-PP1"]
        assert lost["alive"]
        os.killpg(lost["pid"], signal.SIGKILL)

        def has_the_new_one(router: str) -> bool:
            leader = group.engines().get("unified-0", ranks["unified-0"])
            return leader["pid"] != ranks["unified-0"]["pid"] and healthy(group, router, "decode") == {leader["url"]}

        for router in asker.routers:
            until(partial(has_the_new_one, router), f"the engine at {router}", 240)
        group.server.wait_line("unified-0 is ready again", 10)
        for seed in range(8, 16):
            asker.ask(seed)
        assert (asker.right, asker.wrong) == (16, [])

        other = refused("up", str(toy), *SMALL, "--ray", "--ray-address", group.cluster.address, "--admin-api-key", "k")
        assert "is in this namespace of the cluster already, expected none: give another --ray-namespace" in other
        url = group.actor("unified-0")["url"]
        assert answers(url)
        os.kill(group.server.process.pid, signal.SIGKILL)
        until(lambda: not answers(url), "the end of the engine")
        until(lambda: not any(map(answers, asker.routers)), "the end of the routers")


def test_a_cluster_that_does_not_answer_is_named(tmp_path: Path) -> None:
    toy = make_toy(tmp_path / "toy", context=256)
    words = ("up", str(toy), "--ray", "--ray-address", "127.0.0.1:9")
    assert "tp_size is 3, expected a divisor of 1, the model's KV heads" in refused(*words, "--tp-size", "3")
    said = refused(*words)
    assert "--ray-address is '127.0.0.1:9', which does not answer" in said
