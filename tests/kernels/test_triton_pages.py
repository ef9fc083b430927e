"""Pages moved by a kernel beside a decode: what it costs the thread that asks for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from serinus.kernels.triton import pages


class Calls(TorchDispatchMode):
    """Counts the operations that torch is asked for; each gives up the interpreter's lock."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Started:
    """Stands where the kernel does, and keeps what it was started with."""

    def __init__(self) -> None:
        self.starts: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values, **constants: self.starts.append((grid, *values))


@pytest.mark.parametrize("move", [pages.gather_pages, pages.scatter_pages])
def test_moving_the_stamps_of_pages_asks_torch_for_next_to_nothing(monkeypatch: pytest.MonkeyPatch, move: Any) -> None:
    """With thirty calls of torch it took longer beside a decode than the copy of the pages themselves."""
    started = Started()
    monkeypatch.setattr(pages, "_move", started)
    strips = [tuple(torch.zeros((8 * 4, 1, 4), dtype=torch.int64) for _ in range(4))]
    rows_RZ = torch.zeros((6, 4 * 4 * 4 * 8), dtype=torch.uint8)
    ids, rows = np.array([5, 1, 7], np.int32), np.array([0, 4, 2], np.int32)
    move(strips, ids, 4, rows_RZ, rows)  # the table of lanes is made once
    with Calls() as calls:
        move(strips, ids, 4, rows_RZ, rows)
    assert len(calls.names) <= 1, calls.names  # page numbers as a tensor, where there is no pinned memory for them
    grid, _, words, _, lanes, count, *_ = started.starts[1]
    assert (grid, lanes, count) == ((3, 4, 1), 4, 3)
    assert words.reshape(-1).tolist() == [5, 1, 7, 0, 4, 2]
