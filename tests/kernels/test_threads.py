"""Kernels on several threads: the same bytes as on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from serinus.kernels import Kernels, RowSampling, load
from serinus.kernels.cpu.body import find_torch_gomp, thread_count
from tests.kernels.conftest import make_paged


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attend(kernels: Kernels) -> torch.Tensor:
    paged = make_paged(
        seed=1,
        sequences=[(1, 700), (1, 30), (4, 90), (1, 200), (1, 1)],
        heads=4,
        kv_heads=2,
        head_size=16,
        page_size=16,
        dtype=torch.bfloat16,
    )
    return kernels.paged_attention(paged.q, paged.k_pool, paged.v_pool, paged.table, paged.batch, 0.25)


def attend_alone(kernels: Kernels) -> torch.Tensor:
    paged = make_paged(
        seed=2, sequences=[(1, 900)], heads=12, kv_heads=6, head_size=16, page_size=16, dtype=torch.float32
    )
    return kernels.paged_attention(paged.q, paged.k_pool, paged.v_pool, paged.table, paged.batch, 0.25)


def attend_chunks(kernels: Kernels, window: int | None = None) -> torch.Tensor:
    paged = make_paged(
        seed=3, sequences=[(150, 300), (70, 70)], heads=4, kv_heads=2, head_size=64, page_size=16, dtype=torch.bfloat16
    )
    return kernels.paged_attention(paged.q, paged.k_pool, paged.v_pool, paged.table, paged.batch, 0.125, window)


def attend_windows(kernels: Kernels) -> torch.Tensor:
    return torch.cat([attend_chunks(kernels, window) for window in (9, 50, 100)])


def norm(kernels: Kernels) -> torch.Tensor:
    x, residual = torch.randn(2, 301, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    return torch.cat([kernels.add_rms_norm(x, residual, x[0], 1e-6), residual])


def activate(kernels: Kernels) -> torch.Tensor:
    return kernels.silu_mul(torch.randn(201, 512, generator=torch.Generator().manual_seed(1)))


def turn(kernels: Kernels) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    tokens, size = 203, 32
    qkv = torch.randn(tokens, 8 * size, generator=rng).bfloat16()
    pools = torch.zeros(2, 400, 2, size).bfloat16()
    q = torch.zeros(tokens, 4, size).bfloat16()
    angle = torch.rand(64, size // 2, generator=rng)
    positions, slots = torch.arange(tokens) % 64, torch.randperm(400, generator=rng)[:tokens]
    kernels.qk_rope_store(qkv, angle.cos(), angle.sin(), positions, None, None, 0.0, pools[0], pools[1], slots, q)
    return torch.cat([q.flatten(), pools.flatten()])


def sample(kernels: Kernels) -> torch.Tensor:
    rows = [RowSampling(seed=i, position=9, top_p=0.9 + i / 100) for i in range(9)]
    return kernels.choose_tokens(torch.zeros(9, 9001).bfloat16(), rows)


@pytest.mark.parametrize("op", [attend, attend_alone, attend_chunks, attend_windows, norm, activate, turn, sample])
def test_every_number_of_threads_gives_the_same_bytes(op: Callable[[Kernels], torch.Tensor]) -> None:
    torch.set_num_threads(1)
    alone = op(load("cpu"))
    for count in (2, 3):
        torch.set_num_threads(count)
        assert torch.equal(op(load("cpu")), alone)


def test_kernels_use_the_threads_of_torch() -> None:
    assert find_torch_gomp() is not None
    for count in (1, 2):
        torch.set_num_threads(count)
        assert thread_count() == count
