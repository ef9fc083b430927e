"""A thousand requests (half over each data backend) aborted or left in every phase of a handoff."""

from __future__ import annotations

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from serinus.testing.servers import Server

from .cluster import engines, generate, handed_over, idle, metric, until, url_of
from .grid import SMALL, right, toy
from .rank_chaos import FILES_MORE, Storm

pytestmark = pytest.mark.proof

ENDS = 500
"""Requests that end early, for each backend."""
COUNT = 125
"""Requests at one time."""


def _is_zero(url: str, gauge: str) -> bool:
    return metric(url, gauge) == 0


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_storm_of_aborts_leaves_nothing(tmp_path: Path, backend: str) -> None:
    checkpoint, rng = toy(tmp_path), random.Random(7)
    words = ("--disaggregation-min-tokens", "4", "--disaggregation-transfer-backend", backend)
    with Server("up", str(checkpoint), *words, *SMALL) as server, ThreadPoolExecutor(2 * COUNT) as pool:
        until(lambda: handed_over(server.url, list(range(40))), "prompts are handed over")
        seen: Counter[str] = Counter()
        files: list[dict[str, int]] = []
        while seen["aborted"] + seen["left"] < ENDS:
            storm = Storm(server.url, checkpoint, rng, COUNT, ends=("leave", "abort", "abort", "abort"))
            storm.judge(storm.begin(pool), calm=True)
            seen += storm.seen
            pids = {name: info["info"]["pid"] for name, info in engines(server.url).items()}
            files.append({name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()})
        idle(server.url)
        assert set(seen) <= {"aborted", "left", "right"}, seen
        for side in ("prefill-0", "decode-0"):
            url = url_of(server.url, side)
            for gauge in ("rank_staged_pieces", "kv_transfer_quarantined_pages", "kv_transfer_parked_tokens"):
                until(partial(_is_zero, url, gauge), f"{gauge} of {side} is 0", 30)
            assert files[-1][side] <= files[0][side] + FILES_MORE, files
        prompt = [rng.randrange(500) for _ in range(60)]
        answer = generate(server.url, prompt, 8)
        assert answer["output_ids"] == right(checkpoint, prompt, 8)
        assert answer["meta_info"]["handoff_tokens"]
