"""Ranks that exchange through memory that all of them see: processes, each at its own pace."""

from __future__ import annotations

import pytest

from tests.kernels.exchange_ranks import exchanged


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_run_at_once_get_the_sums_and_the_rows_of_all(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, where a rank is between any two instructions when another one writes."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert exchanged(["cpu"] * ranks, seed=ranks, calls=40, timeout_s=240) == []


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_run_at_once_do_so_in_many_orders(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert exchanged(["cpu"] * (2 + seed % 3), seed=100 + seed, calls=100, timeout_s=600) == []


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(2))
def test_two_processes_of_one_gpu_exchange_through_its_memory(seed: int) -> None:
    assert exchanged(["cuda:0"] * 2, seed, calls=200, timeout_s=90) == []


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.parametrize("seed", range(3))
def test_two_gpus_exchange_through_their_memory(seed: int) -> None:
    assert exchanged(["cuda:0", "cuda:1"], seed, calls=2000, timeout_s=90) == []
