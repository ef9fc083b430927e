"""`serinus up` on one GPU: prompts are handed over within its memory, or between it and the CPU; answers are right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serinus.models.small_checkpoints import make_checkpoint
from serinus.testing.servers import Server

from .cluster import HTTP, engines, generate, generate_all, idle, kill_engine, metric, mixed_prompts, until
from .conftest import HANDS_OVER

pytestmark = pytest.mark.gpu
VOCAB = 512
SETTINGS = (
    "--device", "cuda", "--dtype", "bfloat16", "--max-total-tokens", "8192", "--chunked-prefill-size", "256",
    "--max-running-requests", "16", "--skip-tokenizer-init",
    "--kv-canary", "raise", "--cuda-graph-max-bs", "4",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(
        folder, "qwen3", hidden=256, layers=3, heads=4, kv_heads=2, head_size=64, intermediate=512, vocab=VOCAB,
        context=1024, tokenizer=False, seed=11,
    )  # fmt: skip
    return str(folder)


@pytest.fixture(scope="module")
def pair(checkpoint: str) -> Iterator[Server]:
    with Server("up", checkpoint, "--prefill", "1", "--decode", "1", *HANDS_OVER, *SETTINGS, timeout_s=240) as server:
        yield server


def test_a_pair_on_one_gpu_hands_over_within_its_memory_and_answers_as_one_engine(
    pair: Server, checkpoint: str
) -> None:
    prompts = mixed_prompts(12, VOCAB, seed=5)
    with Server("serve", checkpoint, *SETTINGS, timeout_s=240) as alone:
        expected = [generate(alone.url, prompt, count)["output_ids"] for prompt, count in prompts]
    answers = [generate(pair.url, prompt, count) for prompt, count in prompts]
    assert [answer["output_ids"] for answer in answers] == expected
    handed = [answer["meta_info"] for answer in answers if answer["meta_info"]["handoff_tokens"]]
    assert len(handed) >= 4
    assert {info["handoff_backend"] for info in handed} == {"cuda_ipc"}
    assert metric(pair.url, "kv_transfer_pages_total", direction="received") > 0
    assert metric(pair.url, "kv_canary_violations_total") == 0
    generate_all(pair.url, mixed_prompts(64, VOCAB, seed=6))
    idle(pair.url)
    assert metric(pair.url, "kv_canary_violations_total") == 0
    assert metric(pair.url, "num_transfer_failed_reqs_total") == 0


@pytest.mark.nixl
def test_a_pair_by_nixl_answers_as_one_engine(checkpoint: str) -> None:
    prompts = mixed_prompts(24, VOCAB, seed=5)
    with Server("serve", checkpoint, *SETTINGS, timeout_s=240) as alone:
        expected = [generate(alone.url, prompt, count)["output_ids"] for prompt, count in prompts]
    words = ("--prefill", "1", "--decode", "1", *HANDS_OVER, *SETTINGS, "--disaggregation-transfer-backend", "nixl")
    with Server("up", checkpoint, *words, timeout_s=240) as server:
        answers = [generate(server.url, prompt, count) for prompt, count in prompts]
        assert [answer["output_ids"] for answer in answers] == expected
        handed = [answer["meta_info"] for answer in answers if answer["meta_info"]["handoff_tokens"]]
        assert len(handed) >= 8, server.output
        assert {info["handoff_backend"] for info in handed} == {"nixl"}
        generate_all(server.url, mixed_prompts(64, VOCAB, seed=6))
        idle(server.url)
        assert metric(server.url, "kv_canary_violations_total") == 0
        assert metric(server.url, "num_transfer_failed_reqs_total") == 0


def test_a_prefill_engine_that_is_killed_is_missed_for_a_while_only(pair: Server) -> None:
    (prompt, count), *_ = mixed_prompts(1, VOCAB, seed=9)
    prompt = (prompt * 100)[:400]
    kill_engine(pair.url, "prefill-0")
    answer = generate(pair.url, prompt, count)
    assert len(answer["output_ids"]) == count

    def handed_over() -> bool:
        HTTP.post(f"{pair.url}/flush_cache")
        again = generate(pair.url, prompt, count)
        assert again["output_ids"] == answer["output_ids"]
        return bool(again["meta_info"]["handoff_backend"] == "cuda_ipc")

    until(handed_over, "prompts are handed over again", limit_s=240)
    idle(pair.url)
    assert metric(pair.url, "kv_canary_violations_total") == 0
    assert set(engines(pair.url)) == {"prefill-0", "decode-0"}


@pytest.mark.parametrize(("prefill", "decode"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_engines_on_the_gpu_and_on_the_cpu_hand_over_to_each_other(checkpoint: str, prefill: str, decode: str) -> None:
    words = (
        "--prefill", "1", "--decode", "1", *HANDS_OVER, *SETTINGS,
        "--prefill-device", prefill, "--decode-device", decode, "--prefill-page-size", "16",
        "--decode-page-size", "8", "--disaggregation-local-gain", "0",
    )  # fmt: skip
    prompts = mixed_prompts(24, VOCAB, seed=14)
    with Server("up", checkpoint, *words, timeout_s=240) as server:
        assert {name: info["info"]["device"].split(":")[0] for name, info in engines(server.url).items()} == {
            "prefill-0": prefill, "decode-0": decode,
        }  # fmt: skip
        answers = generate_all(server.url, prompts)
        assert [len(answer["output_ids"]) for answer in answers] == [count for _, count in prompts]
        handed = [answer["meta_info"] for answer in answers if answer["meta_info"]["handoff_tokens"]]
        assert len(handed) >= 8
        assert {info["handoff_backend"] for info in handed} == {"shm"}
        idle(server.url)
        assert metric(server.url, "kv_canary_violations_total") == 0
        assert metric(server.url, "num_transfer_failed_reqs_total") == 0


SHAPES = {
    "one and one": ("1", "1", "1", "1", "0", "1", "auto", "cuda_ipc"),
    "two slices and one": ("2", "1", "1", "1", "0,1", "1", "auto", "cuda_ipc"),
    "one and two slices": ("1", "1", "2", "1", "0", "0,1", "auto", "cuda_ipc"),
    "two stages and one": ("1", "2", "1", "1", "0,1", "0", "auto", "cuda_ipc"),
    "two stages and two slices": ("1", "2", "2", "1", "0,1", "0,1", "auto", "cuda_ipc"),
    "two slices each": ("2", "1", "2", "1", "0,1", "1,0", "auto", "cuda_ipc"),
    "two slices and one, through the host": ("2", "1", "1", "1", "0,1", "1", "shm", "shm"),
    "two slices each by nixl": ("2", "1", "2", "1", "0,1", "1,0", "nixl", "nixl"),
}
"""TP and PP of prefill and of decode, the GPUs of both, the backend asked for, the backend that is taken."""


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=[pytest.mark.nixl] if "nixl" in name else []) for name in SHAPES]
)
def test_ranks_on_two_gpus_hand_over_to_each_other(checkpoint: str, shape: str) -> None:
    tp, pp, decode_tp, decode_pp, gpus, decode_gpus, asked, taken = SHAPES[shape]
    prompts = mixed_prompts(24, VOCAB, seed=15)
    with Server("serve", checkpoint, *SETTINGS, "--dtype", "float32", timeout_s=240) as alone:
        expected = [answer["output_ids"] for answer in generate_all(alone.url, prompts)]
    words = (
        "--prefill", "1", "--decode", "1", *HANDS_OVER, *SETTINGS, "--dtype", "float32", "--prefill-gpus", gpus,
        "--decode-gpus", decode_gpus, "--prefill-tp-size", tp, "--prefill-pp-size", pp, "--decode-tp-size", decode_tp,
        "--decode-pp-size", decode_pp, "--disaggregation-transfer-backend", asked,
    )  # fmt: skip
    with Server("up", checkpoint, *words, timeout_s=240) as server:
        answers = generate_all(server.url, prompts)
        assert [answer["output_ids"] for answer in answers] == expected
        handed = [answer["meta_info"] for answer in answers if answer["meta_info"]["handoff_tokens"]]
        assert len(handed) >= 8, server.output
        assert {info["handoff_backend"] for info in handed} == {taken}
        idle(server.url)
        assert metric(server.url, "kv_canary_violations_total") == 0
        assert metric(server.url, "num_transfer_failed_reqs_total") == 0
