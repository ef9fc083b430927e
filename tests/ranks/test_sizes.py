"""How much memory KV gets."""

from __future__ import annotations

from serinus.ranks.sizes import kv_budget

GB = 1 << 30


def test_of_a_host_kv_gets_a_part_of_what_is_free() -> None:
    assert kv_budget(None, "cpu", 10 * GB, 16 * GB, 0, 0) == 2 * GB
    assert kv_budget(0.5, "cpu", 10 * GB, 16 * GB, 0, 0) == 5 * GB


def test_of_a_gpu_weights_count_and_the_largest_step_stays_free() -> None:
    free, total, own = 60 * GB, 80 * GB, 20 * GB
    assert kv_budget(0.5, "cuda", free, total, 4 * GB, own) == 20 * GB, "40 GB for weights (20) and KV"
    assert kv_budget(None, "cuda", free, total, 4 * GB, own) == 55 * GB, "all but the step and the recorded ones"
    assert kv_budget(0.98, "cuda", free, total, 4 * GB, own) == 55 * GB
    assert kv_budget(0.2, "cuda", free, total, 4 * GB, own) == 0, "not even the weights fit: refused with the pools"


def test_what_another_engine_holds_of_a_gpu_is_not_counted_as_ours() -> None:
    """Two engines of 0.45 on one card have the same KV, whichever comes first."""
    total, weights = 80 * GB, 16 * GB
    first = kv_budget(0.45, "cuda", total - weights, total, 2 * GB, weights)
    second = kv_budget(0.45, "cuda", total - 2 * weights - first, total, 2 * GB, weights)
    assert first == second == 20 * GB
