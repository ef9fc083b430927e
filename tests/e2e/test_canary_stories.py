"""The canary's seed stories as real processes over real HTTP through the router, of a full and of a sliding model.

Every story says of each request whether it succeeds, with the oracle's tokens, or how it fails; afterwards all queues
are empty, and but for planted faults no canary has found anything.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from serinus.cli.main import main
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.testing.oracle import toy_continue
from serinus.testing.servers import Server

from .cluster import HTTP, ask_all, engines, generate, generate_all, idle, metric, until, url_of

pytestmark = pytest.mark.proof

SHAPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "full": ({"layers": 4, "kv_heads": 4}, ("--prefill-pp-size", "2")),
    "swa": ({"layers": 3, "window": 17}, ()),
}
"""Toy models, and the ranks of the engines: the full one is computed in two stages."""
SETTINGS = (
    "--prefill", "1", "--decode", "1", "--skip-tokenizer-init", "--device", "cpu", "--dtype", "bfloat16", "--page-size",
    "8", "--max-total-tokens", "2048", "--chunked-prefill-size", "256", "--max-step-ms", "0",
    "--max-running-requests", "16",
    "--disaggregation-min-tokens", "1", "--disaggregation-optimistic-prefill", "--enable-hierarchical-cache",
    "--hicache-ratio", "4", "--hicache-write-policy", "write_back", "--kv-canary", "raise", "--kv-canary-real-data",
    "all", "--kv-canary-coverage", "full", "--kv-canary-sweep-interval", "4", "--kv-canary-perturb-api",
)  # fmt: skip
QUEUES = (
    "num_running_reqs", "num_queue_reqs", "num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running cluster, and what its model answers."""

    url: str
    prefill: str
    decode: str
    folder: Path
    part: str

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        """All different from their first page on."""
        rng = random.Random(f"{seed} {length}")
        return [[rng.randrange(500) for _ in range(length)] for _ in range(count)]

    def right(self, prompt: list[int], count: int) -> list[int]:
        """What the oracle continues a prompt with."""
        return toy_continue(load_spec(self.folder), prompt, count)

    def canary(self, side: str) -> dict[str, Any]:
        """What an engine's canary says."""
        view: dict[str, Any] = HTTP.get(f"{getattr(self, side)}/canary").json()
        return view

    def is_clean(self) -> None:
        """Nothing was found, and all that was due was checked, check by check."""
        for side in ("prefill", "decode"):
            view = self.canary(side)
            assert view["violations"] == 0, view["incidents"]
            assert all(count["due"] == count["checked"] for count in view["checks"].values()), view["checks"]
            assert view["checks"]["tail"]["checked"] + view["checks"]["sweep"]["checked"]
        assert self.canary("decode")["checks"]["arrival"]["checked"]


@contextmanager
def running(kind: str, folder: Path, *words: str) -> Iterator[Cluster]:
    """A cluster of one toy model."""
    toy, ranks = SHAPES[kind]
    folder = make_toy(folder, context=512, tokenizer=False, **toy)
    with Server("up", str(folder), *SETTINGS, *ranks, *words, timeout_s=240) as server:
        until(lambda: len(engines(server.url)) == 2, "the router knows both engines")
        sides = {side: url_of(server.url, f"{side}-0") for side in ("prefill", "decode")}
        yield Cluster(url=server.url, folder=folder, part=kind, **sides)


@pytest.fixture(scope="module", params=SHAPES)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(request.param, tmp_path_factory.mktemp(request.param)) as made:
        yield made


def test_shared_prompts_are_answered_and_no_request_is_accused(cluster: Cluster) -> None:
    (shared,) = cluster.prompts(1, 50, seed=1)
    answers = generate_all(cluster.url, [(shared, 12)] * 8)
    expected = cluster.right(shared, 12)
    assert [answer["output_ids"] for answer in answers] == [expected] * 8
    assert any(answer["meta_info"]["handoff_tokens"] for answer in answers)
    idle(cluster.url)
    cluster.is_clean()


def test_storms_of_aborts_on_both_sides_cost_no_other_request_a_token(cluster: Cluster) -> None:
    """Clients of decode hang up by their request's name, and an operator ends all that prefill computes, again and
    again: only those that were named end as aborted, all others are answered rightly."""
    prompts = cluster.prompts(24, 90, seed=2)
    ended = threading.Event()

    def storm() -> int:
        count = 0
        while not ended.is_set():
            answer = HTTP.post(f"{cluster.prefill}/abort_request", json={"abort_all": True})
            assert answer.status_code == 200, answer.text
            count += 1
        return count

    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    bodies = [
        {"input_ids": prompt, "sampling_params": sampling, "rid": f"storm-{i}"} for i, prompt in enumerate(prompts)
    ]
    with ThreadPoolExecutor(32) as pool:
        storms = pool.submit(storm)
        waiting = [pool.submit(HTTP.post, f"{cluster.url}/generate", json=body) for body in bodies]
        for i in range(0, 24, 3):
            HTTP.post(f"{cluster.url}/abort_request", json={"rid": f"storm-{i}"})
        answers = [future.result() for future in waiting]
        ended.set()
        assert storms.result() > 0
    for i, (answer, prompt) in enumerate(zip(answers, prompts, strict=True)):
        assert answer.status_code == 200, answer.text
        body, expected = answer.json(), cluster.right(prompt, 40)
        ending = body["meta_info"]["finish_reason"]["type"]
        assert (ending == "length") == (body["output_ids"] == expected), f"request {i}"
        assert body["output_ids"] == expected[: len(body["output_ids"])]
        assert ending == "length" or i % 3 == 0, f"request {i} ended as {ending}, and was not named"
    idle(cluster.url)
    cluster.is_clean()


def queue_series(url: str) -> dict[str, list[tuple[str, float]]]:
    """By queue gauge, the ranks that show it with its value."""
    text = HTTP.get(f"{url}/metrics").text
    return {
        name: [
            (rank, float(value))
            for rank, value in re.findall(rf'^serinus:{name}{{.*?[{{,]rank="([^"]*)".*}} (\S+)$', text, re.MULTILINE)
        ]
        for name in QUEUES
    }


def test_parked_prompts_that_are_aborted_before_their_grant_leave_every_queue(cluster: Cluster) -> None:
    """Running requests hold decode's pages; the prompts behind them are computed ahead of their grants. A queue is of
    the engine: at every moment one rank shows it, the leader, so that no two ranks can disagree about it."""
    long, parked = cluster.prompts(3, 330, seed=3), cluster.prompts(8, 480, seed=4)
    failed = metric(cluster.prefill, "num_bootstrap_failed_reqs_total")
    with ThreadPoolExecutor(16) as pool:
        waiting = ask_all(pool, cluster.url, long, 170)
        until(lambda: metric(cluster.decode, "num_running_reqs") == len(long), "all of them run")
        waiting += ask_all(pool, cluster.url, parked, 30)
        seen: list[float] = []

        def are_parked() -> bool:
            shown = queue_series(cluster.prefill)
            assert {len(ranks) for ranks in shown.values()} == {1}, shown
            assert {rank.split()[0] for ranks in shown.values() for rank, _ in ranks} == {"TP0"}
            seen.append(shown["num_prefill_bootstrap_queue_reqs"][0][1])
            return seen[-1] > 0 or all(future.done() for future in waiting)

        until(are_parked, "prompts wait for their grant at prefill")
        assert seen[-1] > 0, "every request ended before one had to wait, expected too few pages for all"
        assert HTTP.post(f"{cluster.url}/abort_request", json={"abort_all": True}).status_code == 200
        answers = [future.result() for future in waiting]
        until(lambda: not any(v for ranks in queue_series(cluster.prefill).values() for _, v in ranks), "all is empty")
    for answer, prompt in zip(answers, [*long, *parked], strict=True):
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["meta_info"]["finish_reason"]["type"] in ("abort", "length")  # one that ran may just have ended
        assert body["output_ids"] == cluster.right(prompt, len(body["output_ids"]))
    empty = [
        answer.json()["meta_info"]["finish_reason"]["type"] for answer in answers if not answer.json()["output_ids"]
    ]
    assert empty.count("abort") >= 2, "expected some that never had a page, whichever of them came last"
    idle(cluster.url)
    assert metric(cluster.prefill, "num_bootstrap_failed_reqs_total") > failed, "what waited for its grant is counted"
    cluster.is_clean()


def test_what_is_evicted_with_write_back_comes_back_sound(cluster: Cluster) -> None:
    """Conversations of two turns, more of them than the pools hold."""
    prompts = cluster.prompts(12, 256, seed=5)
    for _ in range(2):
        for i, prompt in enumerate(prompts):
            answer = generate(cluster.url, prompt, 6)["output_ids"]
            assert answer == cluster.right(prompt, 6)
            prompts[i] = [*prompt, *answer, 7, 8, 9]
    assert metric(cluster.decode, "evicted_tokens_total") > 0
    assert metric(cluster.decode, "hicache_backup_tokens_total") > 0
    assert metric(cluster.decode, "load_back_tokens_total") > 0
    idle(cluster.url)
    cluster.is_clean()


def test_what_prefill_damages_after_its_pass_is_found_by_decode_alone_and_no_token_is_wrong(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last story of a cluster: the others want clean canaries."""
    until(lambda: HTTP.post(f"{cluster.url}/flush_cache").status_code == 200, "both engines have flushed")
    order = {"perturb": {"real_kv_post_forward": 1.0}, "target": cluster.part, "count": 3, "seconds": 60}
    answer = HTTP.post(f"{cluster.prefill}/canary/perturb", json=order)
    assert answer.status_code == 200, answer.text
    prompts = cluster.prompts(6, 70, seed=6)
    # One after another: of a prompt in two steps the second would read what was damaged after the first.
    answers = [generate(cluster.url, prompt, 10) for prompt in prompts]
    assert HTTP.post(f"{cluster.prefill}/canary/perturb", json={"perturb": {}}).status_code == 200
    assert [a["output_ids"] for a in answers] == [cluster.right(prompt, 10) for prompt in prompts]
    reasons = [a["meta_info"]["local_reason"] for a in answers]
    assert "kv_canary" in reasons
    prefill, decode = cluster.canary("prefill"), cluster.canary("decode")
    assert prefill["violations"] == 0, prefill["incidents"]
    assert prefill["injected"]
    assert {reason for i in decode["incidents"] for reason in i["reasons"]} == {"verify_real_kv_hash"}
    assert {i["handoff"]["from"] for i in decode["incidents"]} == {"prefill-0"}
    convicted = {i["rid"] for i in decode["incidents"]}
    assert len(convicted) == reasons.count("kv_canary")
    until(lambda: {each["rid"] for each in cluster.canary("prefill")["told"]} == convicted, "prefill was told of each")
    assert main(["canary", "show", cluster.url]) == 1
    story = capsys.readouterr().out
    for rid in convicted:
        assert f"request '{rid}'" in story
    assert "real_kv_post_forward planted on purpose" in story
    assert "page filled by 'prefill-0', handoff '" in story
    assert "prefill-0: was told by decode-0: 'KV integrity: verify_real_kv_hash" in story
    assert metric(cluster.decode, "pages", state="quarantined", tier="device") > 0
    until(lambda: HTTP.post(f"{cluster.url}/flush_cache").status_code == 200, "both engines have flushed")
    idle(cluster.url)


def test_faults_that_a_flag_plants_in_prefill_engines_alone_are_found_by_decode_alone(tmp_path: Path) -> None:
    """Pages are damaged on their way: what prefill keeps is sound, what arrives is convicted and computed again."""
    flags = ("--prefill-kv-canary-perturb", "transfer_bytes=1", "--prefill-kv-canary-perturb-warmup-steps", "0")
    with running("full", tmp_path, *flags, "--prefill-kv-canary", "log") as cluster:
        prompts = cluster.prompts(6, 70, seed=7)
        answers = generate_all(cluster.url, [(prompt, 10) for prompt in prompts])
        prefill, decode = cluster.canary("prefill"), cluster.canary("decode")
    assert (prefill["mode"], decode["mode"]) == ("log", "raise")
    assert [a["output_ids"] for a in answers] == [cluster.right(prompt, 10) for prompt in prompts]
    assert {a["meta_info"]["local_reason"] for a in answers} == {"kv_canary"}
    assert {each["mode"] for each in prefill["injected"]} == {"transfer_bytes"}
    assert not decode["injected"]
    assert prefill["violations"] == 0, prefill["incidents"]
    assert {i["handoff"]["from"] for i in decode["incidents"]} == {"prefill-0"}
