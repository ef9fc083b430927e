"""Gumbel noise as a pure function of (seed, position, token id). B = sequences, V = vocabulary."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.scalar import at, carray, fetch_add, log, splitmix

__all__ = ["counter_gumbel", "warm"]

_Arguments = fields("ticket seeds positions out count vocab")
_CHUNK = 4096
"""Tokens per work item."""


def counter_gumbel(seeds_B: Tensor, positions_B: Tensor, vocab: int) -> Tensor:
    """Noise [B, V] fp32; see the reference, which this equals within 2e-6 of its value."""
    out_BV = torch.empty((seeds_B.shape[0], vocab), dtype=torch.float32)
    seeds_B, positions_B = seeds_B.contiguous(), positions_B.contiguous()
    arguments = _Arguments(0, seeds_B.data_ptr(), positions_B.data_ptr(), out_BV.data_ptr(), seeds_B.shape[0], vocab)
    _body(VERSION)(arguments, 1 if out_BV.numel() <= _CHUNK else thread_count())
    return out_BV


def warm() -> None:
    """Compile, or load from the disk."""
    _body(VERSION)


@cache
def _body(version: int) -> Body:
    def noise(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 6, np.int64)
        count, vocab = a[4], a[5]
        seeds = carray(at(a[1]), count, np.uint64)
        positions = carray(at(a[2]), count, np.uint64)
        out = carray(at(a[3]), count * vocab, np.float32)
        chunks = (vocab + _CHUNK - 1) // _CHUNK
        while True:
            item = fetch_add(a.ctypes.data, 1)
            if item >= count * chunks:
                break
            b = item // chunks
            key = splitmix(splitmix(seeds[b]) + positions[b])
            first = (item % chunks) * _CHUNK
            for token in range(first, min(first + _CHUNK, vocab)):
                word = np.int64(splitmix(key + np.uint64(token)) >> np.uint64(32))
                # Both ends need all their bits: v = 1 - u near 0 by the series of -log(1 - v), u near 0 by log.
                v = np.float32((np.float64(word) + 0.5) * 2.0**-32)
                u = max(np.float32((np.float64(4294967295 - word) + 0.5) * 2.0**-32), np.float32(2.0**-24))
                series = v * (np.float32(1) + v * (np.float32(0.5) + v * (np.float32(1 / 3) + v * np.float32(0.25))))
                waited = series if v < np.float32(0.01) else -log(u)
                out[b * vocab + token] = -log(waited)

    return compile_body(noise)
