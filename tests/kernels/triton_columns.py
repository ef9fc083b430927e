"""What the cases of the Triton column share: the two columns, dtypes, and how far apart two results may be."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from serinus.kernels import Kernels, load

__all__ = ["columns", "dtype_of", "far_apart", "page_first"]

_ALLOWED = {
    torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float8_e4m3fn: 0.07, torch.float8_e5m2: 0.13,
}  # fmt: skip
"""Of the largest value."""


def columns(device: str, *ops: str) -> tuple[Kernels, Kernels]:
    """The reference and the Triton column, which must have these ops of its own."""
    return load(device, "ref"), load(device, "triton", own=ops)


def dtype_of(rng: random.Random, device: str) -> torch.dtype:
    """A dtype of activations; Triton's interpreter makes no products of bf16."""
    return rng.choice((torch.float32, torch.float16) + ((torch.bfloat16,) * 3 if device == "cuda" else ()))


def page_first(rng: random.Random, pools: Sequence[Tensor], page: int) -> list[Tensor]:
    """The same rows page first, in most cases: pages of all pools side by side, with NaN of other layers between."""
    if rng.random() < 0.3:
        return list(pools)
    first = pools[0]
    shape = (len(first) // page, len(pools) + rng.choice((0, 1, 3)), page, *first.shape[1:])
    both = torch.full(shape, float("nan"), dtype=first.dtype, device=first.device)
    for i, pool in enumerate(pools):
        both[:, i] = pool.view(-1, *shape[2:])
    return [both[:, i] for i in range(len(pools))]


def far_apart(what: str, found: Tensor, expected: Tensor, allowed: float | None = None) -> str:
    """What differs by more than rounding explains, or `allowed` of the largest value, in words."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f" {what} {found.dtype} {tuple(found.shape)}"
    if not expected.numel():
        return ""
    apart = float((found.float() - expected.float()).abs().max())
    largest = max(1.0, float(expected.float().abs().max()))
    return (
        "" if apart <= (allowed or _ALLOWED[expected.dtype]) * largest else f" {what} by {apart:.2e} of {largest:.2e}"
    )
