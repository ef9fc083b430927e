"""The canary's check of the last slots that sequences read, and the chain hashes of requests; see the reference.

S = slots, B = sequences, N = tokens, Q = ring rows.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.canary import ANCHOR, RING_FIELDS, Reason
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields
from serinus.kernels.cpu.calls import KernelCall
from serinus.kernels.cpu.canary import counts_at
from serinus.kernels.cpu.scalar import at, carray, count_sequence, fetch_add, mix

Bind = fields(
    "ticket stamps slot_count lane slots positions chains names ring ring_rows violations checked count halves"
    " by_sequence numbers"
)
Chain = fields("ticket tokens out count position chain")
_CHAIN_HASH, _POSITION = int(Reason.VERIFY_CHAIN_HASH), int(Reason.VERIFY_POSITION)


def canary_bind(
    stamps_LS4: Tensor,
    lane: int,
    slots_B: Tensor,
    positions_B: Tensor,
    chains_B: Tensor,
    sequences_B: Tensor,
    ring_QF: Tensor,
    count_1: Tensor,
    checked_L: Tensor,
    by_sequence_N4: Tensor | None = None,
) -> None:
    """Hold the hash behind the last slots that sequences read against those of the requests."""
    inputs = [t.contiguous() for t in (slots_B, positions_B, chains_B, sequences_B)]
    arguments = Bind(
        0, stamps_LS4.data_ptr(), stamps_LS4.shape[1], lane, *(t.data_ptr() for t in inputs), ring_QF.data_ptr(),
        len(ring_QF), count_1.data_ptr(), checked_L.data_ptr(), len(slots_B), len(stamps_LS4) // 2,
        *counts_at(by_sequence_N4),
    )  # fmt: skip
    bind_call(arguments).run()


def chain_hashes(tokens_N: NDArray[np.int32], position: int = 0, chain: int = ANCHOR) -> NDArray[np.int64]:
    """The chain hash behind each of some tokens. Cost: 6 ns a token."""
    tokens_N = np.ascontiguousarray(tokens_N, np.int32)
    hashes_N = np.empty(len(tokens_N), np.int64)
    arguments = Chain(0, tokens_N.ctypes.data, hashes_N.ctypes.data, len(tokens_N), position, chain)
    _chain_body(VERSION)(arguments, 1)
    return hashes_N


def warm() -> None:
    """Compile, or load from the disk."""
    for body in (_bind_body, _chain_body):
        body(VERSION)


def bind_call(arguments: ctypes.Structure) -> KernelCall:
    """Hold last slots against what requests say (Bind)."""
    return KernelCall(body=_bind_body(VERSION), arguments=arguments, threads=1)


@cache
def _bind_body(version: int) -> Body:
    def bind(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 16, np.int64)
        slot_count, lane, count, halves = a[2], a[3], a[12], a[13]
        slots = carray(at(a[4]), count, np.int64)
        positions = carray(at(a[5]), count, np.int64)
        chains = carray(at(a[6]), count, np.int64)
        names = carray(at(a[7]), count, np.int64)
        ring = carray(at(a[8]), a[9] * RING_FIELDS, np.int64)
        for half in range(halves):
            stamps = carray(at(a[1] + (lane // 2 * halves + half) * slot_count * 32), slot_count * 4, np.int64)
            checked = 0
            for b in range(count):
                if positions[b] < 0:
                    continue
                checked += 1
                count_sequence(a[14], a[15], names[b], lane + half, 1)
                slot = slots[b] if 0 <= slots[b] < slot_count else 0
                token, position, stored_hash = stamps[slot * 4], stamps[slot * 4 + 1], stamps[slot * 4 + 2]
                behind = np.int64(mix(np.uint64(stored_hash), np.uint64(token), np.uint64(position)))
                if behind != chains[b]:
                    base = fetch_add(a[10], 1) % a[9] * RING_FIELDS
                    ring[base] = lane + half
                    ring[base + 1] = _CHAIN_HASH + (_POSITION if position != positions[b] else 0)
                    ring[base + 2] = slot
                    ring[base + 3] = positions[b]
                    ring[base + 4] = position
                    ring[base + 5] = token
                    ring[base + 6] = token
                    ring[base + 7] = behind
                    ring[base + 8] = chains[b]
                    ring[base + 9] = stamps[slot * 4 + 3]
                    ring[base + 10] = stamps[slot * 4 + 3]
                    ring[base + 11] = names[b]
            fetch_add(a[11] + (lane + half) * 8, checked)

    return compile_body(bind)


@cache
def _chain_body(version: int) -> Body:
    def chain(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 6, np.int64)
        count = a[3]
        tokens = carray(at(a[1]), count, np.int32)
        out = carray(at(a[2]), count, np.int64)
        hashed = np.uint64(a[5])
        for i in range(count):
            hashed = mix(hashed, np.uint64(np.int64(tokens[i])), np.uint64(a[4] + i))
            out[i] = np.int64(hashed)

    return compile_body(chain)
