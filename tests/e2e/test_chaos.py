"""A few rounds of `chaos.py`, which goes on for hundreds: faults on real processes, right answers and no leftovers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serinus.models.small_checkpoints import make_toy

from .chaos import Chaos, Cluster

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    checkpoint = make_toy(tmp_path_factory.mktemp("toy"), kv_heads=4, head_size=32, tokenizer=False)
    with Cluster(checkpoint, "tcp", seed=1) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        ("flips", "asked"),
        ("cuts", "asked"),
        ("cut", "travelling"),
        ("stop prefill", "granted"),
        ("stop decode", "running"),
        ("kill router", "running"),
        ("kill prefill", "granted"),
    ],
)
def test_a_fault_costs_time_or_an_error_in_words_and_leaves_nothing(cluster: Cluster, fault: str, phase: str) -> None:
    chaos = Chaos(cluster, seed=7)
    chaos.round(fault, phase)
    assert chaos.counts["answers right"] + chaos.counts["errors in words"] > 0
