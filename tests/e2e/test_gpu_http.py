"""Checkpoints served on a GPU by real processes over real HTTP: the tokens of transformers in fp32, alone and handed
from a prefill to a decode engine on the same card, and a canary that is silent about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from serinus.models.small_checkpoints import make_checkpoint
from serinus.testing.servers import Server
from tests.e2e.cluster import HTTP, Reference, engines, generate, generate_all, idle, metric, mixed_prompts
from tests.e2e.conftest import HANDS_OVER

pytestmark = pytest.mark.gpu

FAMILIES = ("llama", "qwen3", "gemma3_text", "qwen3_moe")
CANARIES = {"default": (), "raise_full": ("--kv-canary", "raise", "--kv-canary-coverage", "full")}
SETTINGS = (
    "--device", "cuda", "--dtype", "float32", "--max-total-tokens", "4096", "--page-size", "8",
    "--chunked-prefill-size", "64", "--max-running-requests", "12",
)  # fmt: skip
"""Small pages, chunks and queues; little memory, as two engines share the card."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """A checkpoint, what is asked of it, and what transformers answers."""

    folder: Path
    load: list[tuple[list[int], int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = make_checkpoint(
        tmp_path_factory.mktemp(request.param), request.param, dtype="float32", context=512, layers=7, seed=11
    )
    reference = Reference(folder)
    load = mixed_prompts(24, reference.vocab_size, seed=5)
    return Story(folder=folder, load=load, expected=[reference.greedy(prompt, count) for prompt, count in load])


def is_silent(url: str, **labels: str) -> None:
    """Nothing was found, and something was verified."""
    assert metric(url, "kv_canary_violations_total", **labels) == 0
    assert metric(url, "kv_canary_slots_total", state="checked", **labels) > 0


@pytest.mark.parametrize("canary", CANARIES)
def test_a_gpu_answers_over_http_as_transformers_does(story: Story, canary: str) -> None:
    with Server("serve", str(story.folder), *SETTINGS, *CANARIES[canary]) as server:
        for _ in range(2):  # the second time from the prefix cache
            answers = generate_all(server.url, story.load)
            assert [answer["output_ids"] for answer in answers] == story.expected
        assert HTTP.get(f"{server.url}/server_info").json()["info"]["device"] == "cuda"
        assert any(answer["meta_info"]["cached_tokens"] for answer in answers)
        idle(server.url)
        is_silent(server.url)
        assert server.stop() == 0


def test_prefill_and_decode_on_one_gpu_answer_as_transformers_does(story: Story) -> None:
    with Server("up", str(story.folder), "--prefill", "1", "--decode", "1", *HANDS_OVER, *SETTINGS) as server:
        answers = generate_all(server.url, story.load)
        assert [answer["output_ids"] for answer in answers] == story.expected
        handed = [answer["meta_info"] for answer in answers if answer["meta_info"]["handoff_tokens"]]
        assert len(handed) >= len(answers) // 4
        again = generate(server.url, story.load[0][0], story.load[0][1])
        assert again["output_ids"] == story.expected[0]
        idle(server.url)
        assert {info["info"]["device"] for info in engines(server.url).values()} == {"cuda"}
        for engine in ("prefill-0", "decode-0"):
            is_silent(server.url, engine=engine)
        assert metric(server.url, "num_transfer_failed_reqs_total") == 0
        assert server.stop() == 0
