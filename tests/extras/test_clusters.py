"""Whole engines over the real packages: the same answers, and a prefill engine that dies costs no token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.testing.oracle import toy_continue
from serinus.testing.servers import Server
from tests.e2e.cluster import HTTP, generate, handed_over, idle, kill_engine, paused, until, url_of

SIZES = ("--max-total-tokens", "4096", "--page-size", "8", "--chunked-prefill-size", "64", "--skip-tokenizer-init")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), kv_heads=4, head_size=32, tokenizer=False)


@pytest.fixture(params=["nixl", "mooncake"])
def cluster(request: pytest.FixtureRequest, toy: Path) -> Iterator[Server]:
    with Server("up", str(toy), *SIZES, "--disaggregation-transfer-backend", request.param) as server:
        yield server


def test_prompts_are_handed_over_and_a_killed_prefill_engine_costs_no_token(cluster: Server, toy: Path) -> None:
    rng, spec = random.Random(5), load_spec(toy)
    prompts = [[rng.randrange(spec.vocab_size) for _ in range(rng.randint(100, 400))] for _ in range(10)]
    expected = [toy_continue(spec, prompt, 12) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: generate(cluster.url, prompt, 12), prompts))
        assert [answer["output_ids"] for answer in answers] == expected
        assert {answer["meta_info"]["prefill_engine"] for answer in answers} == {"prefill-0"}
        idle(cluster.url)
        HTTP.post(f"{cluster.url}/flush_cache")
        with paused(cluster.url, "prefill-0"):
            waiting = [pool.submit(generate, cluster.url, prompt, 12) for prompt in prompts[:4]]
            kill_engine(cluster.url, "prefill-0")
        assert [future.result()["output_ids"] for future in waiting] == expected[:4]
    idle(url_of(cluster.url, "decode-0"))
    until(lambda: handed_over(cluster.url, prompts[0]), "prompts are handed over to the new prefill engine")
