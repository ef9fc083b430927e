"""Several prefill and decode engines of one host whose pages, pools and steps differ by role, as real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serinus.testing.servers import Server

from .cluster import HTTP, engines, generate, generate_all, idle, metric
from .grid import prompts, right, toy

pytestmark = pytest.mark.proof
COUNT = 6
WORDS = (
    "--prefill", "2", "--decode", "2", "--policy", "round_robin", "--skip-tokenizer-init", "--device", "cpu", "--dtype",
    "bfloat16", "--max-total-tokens", "2048", "--decode-max-total-tokens", "1024", "--max-running-requests", "16",
    "--prefill-chunked-prefill-size", "48", "--disaggregation-min-tokens", "1", "--disaggregation-local-gain", "0",
    "--kv-canary", "raise",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module", params=[(16, 4), (4, 16)], ids=lambda sizes: "{}-to-{}".format(*sizes))
def unlike(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[tuple[Server, tuple[int, int]]]:
    sizes: tuple[int, int] = request.param
    pages = ("--prefill-page-size", str(sizes[0]), "--decode-page-size", str(sizes[1]))
    with Server("up", str(checkpoint), *WORDS, *pages, timeout_s=300) as server:  # four engines may compile
        yield server, sizes


def test_every_engine_hands_over_to_engines_of_other_pages_and_no_token_changes(
    unlike: tuple[Server, tuple[int, int]], checkpoint: Path
) -> None:
    server, (prefill_page, decode_page) = unlike
    told = engines(server.url)
    assert {name: (info["page_size"], info["max_total_tokens"]) for name, info in told.items()} == {
        "prefill-0": (prefill_page, 2048), "prefill-1": (prefill_page, 2048),
        "decode-0": (decode_page, 1024), "decode-1": (decode_page, 1024),
    }  # fmt: skip
    load = [(prompt, COUNT) for prompt in prompts(16, seed=14)]
    expected = [right(checkpoint, *item) for item in load]
    one_by_one = [generate(server.url, *item) for item in load]
    assert [answer["output_ids"] for answer in one_by_one] == expected
    handed = [answer["meta_info"] for answer in one_by_one if answer["meta_info"]["handoff_tokens"]]
    assert {info["prefill_engine"] for info in handed} == {"prefill-0", "prefill-1"}
    assert {info["decode_engine"] for info in handed} == {"decode-0", "decode-1"}
    HTTP.post(f"{server.url}/flush_cache")
    assert [answer["output_ids"] for answer in generate_all(server.url, load)] == expected
    idle(server.url)
    assert metric(server.url, "kv_canary_violations_total") == 0
    assert metric(server.url, "num_transfer_failed_reqs_total") == 0
