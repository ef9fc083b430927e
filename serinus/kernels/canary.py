"""CanaryKernels: the canary's ops for a device, chosen once. Apart from Kernels: who has no canary loads none.

Lanes of stamps and reasons of violations have their numbers here, for kernels and for whoever reads their ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.errors import ConfigError
from serinus.kernels.ref import canary as ref
from serinus.kernels.watch import CommonWatch, Watch

__all__ = ["CanaryKernels", "Reason", "StampLane", "Watch", "load_canary"]


class StampLane(IntEnum):
    """A lane of stamps of one part. HEAD is checked and written before a forward pass, TAIL after it; only TAIL has
    digests."""

    HEAD_K = 0
    HEAD_V = 1
    TAIL_K = 2
    TAIL_V = 3


class Reason(IntFlag):
    """What differed; a violation may have several."""

    VERIFY_CHAIN_HASH = 1
    """The stamp's previous hash is not that of the slot that the row names before it (not known: of its twin)."""
    VERIFY_POSITION = 2
    """The stamp's position is not the one the row has this slot at."""
    VERIFY_TOKEN = 4
    """The stamp's token is not the request's own (not known: not that of its twin, the stamp of K or V beside it)."""
    VERIFY_REAL_KV_HASH = 8
    """The KV bytes are not those that were stamped; or a stamp that has no digest (HEAD) has one."""
    WRITE_TOKEN = 16
    """The token computed in this step is not the one expected."""
    WRITE_POSITION = 32
    """Its position is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryKernels:
    """Each op means what `kernels/ref/canary.py` says of the function of the same name."""

    column: str
    """The column that serves them."""
    digest: Callable[..., Tensor]
    due: Callable[[NDArray[np.int64], int, int], tuple[NDArray[np.int64], int, int]]
    plan: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    verify: Callable[..., None]
    write: Callable[..., None]
    own_watch: Callable[..., Watch] | None = None
    """Of a column that has a watch of its own."""

    def watch(self, *lanes: Any, **more: Any) -> Watch:
        """The checks of one part around forward passes; arguments as CommonWatch has them, without the ops."""
        if self.own_watch is not None:
            return self.own_watch(*lanes, **more)
        return CommonWatch(self, *lanes, **more)


def load_canary(device: str, column: str = "auto") -> CanaryKernels:
    """The canary's ops for a device: numba on a CPU, Triton on a GPU, or the column asked for.

    Raises:
        ConfigError: no such column, or not on this device.
    """
    kind = device.split(":")[0]
    if column == "auto":
        column = {"cpu": "cpu", "cuda": "triton"}.get(kind, "ref")
    if column == "ref":
        return _of(column, ref)
    if column == "cpu" and kind == "cpu":
        from serinus.kernels.cpu import canary as cpu
        from serinus.kernels.cpu.watch import CpuWatch

        return _of(column, cpu, CpuWatch)
    if column == "triton":
        from serinus.kernels.triton import canary as triton

        return _of(column, triton)
    raise ConfigError(
        f"kernels: canary column {column!r} on device {device!r}, expected auto, ref, cpu (on a CPU) or triton"
    )


def _of(column: str, ops: ModuleType, own_watch: Callable[..., Watch] | None = None) -> CanaryKernels:
    return CanaryKernels(
        column=column, digest=ops.canary_digest, due=ops.canary_due, plan=ops.canary_plan, verify=ops.canary_verify,
        write=ops.canary_write, own_watch=own_watch,
    )  # fmt: skip
