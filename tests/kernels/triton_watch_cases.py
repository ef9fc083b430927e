"""Random cases of the Triton column's watch beside the reference: entries of rows that the leader did not write, and
whole passes over damaged stamps and rows, also with room for more than is verified."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serinus.kernels import RING_FIELDS, Kernels, StampLane
from serinus.kernels.contracts import WatchPlan

from .canary_case import PAGE as CASE_PAGE
from .canary_case import CanaryCase, make_case, stamped
from .triton_columns import columns

__all__ = ["canary_watch", "watched_pass"]

PAGE, WIDTH, SLOTS = 4, 40, 64


def canary_watch(seed: int, device: str) -> str:
    """What a pass notes of sequences that read rows of which some were changed; nothing of their pages is due."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count = rng.randint(1, 4)
    written = torch.randint(1, SLOTS, (count + 1, WIDTH), dtype=torch.int32, generator=generator)
    table = written.clone()
    low = [rng.randrange(WIDTH) for _ in range(count)]
    last = [rng.randrange(each, WIDTH) for each in low]
    for _ in range(rng.choice((0, 2, 8))):
        table[rng.randrange(count + 1), rng.randrange(WIDTH)] = rng.choice((0, 3, SLOTS - 1, SLOTS + 5))
    rows, chains = np.arange(1, count + 1), [rng.randrange(-(1 << 62), 1 << 62) for _ in range(count)]
    bound = np.array([[7 + b for b in range(count)], rows, low, last, chains], np.int64)
    plan = WatchPlan(
        due=(), bound_5B=bound, rows_B=rows, counts_B=np.ones(count, np.int64), first_name=7, chosen_W=None, room=None,
        sets=1,
    )  # fmt: skip
    stamps = torch.randint(0, 50, (4, SLOTS, 4), generator=generator).to(device)
    pools = [(torch.zeros(SLOTS, 1, 16, dtype=torch.float16, device=device),) * 2]
    noted = []
    for ops in columns(device, "canary_watch"):
        words = {"dtype": torch.int64, "device": device}
        rings = [tuple(torch.zeros(shape, **words) for shape in ((64, RING_FIELDS), 1, 4)) for _ in range(2)]
        watch = ops.canary_watch(ops, table.to(device), written.to(device), stamps, pools, None, *rings, PAGE)
        watch.stage(plan, lambda words: torch.from_numpy(words).to(device))
        watch.expand(plan.due, bound)
        watch.verify(StampLane.HEAD_K)
        found, number, checked = rings[0]
        noted.append((int(number), checked.tolist(), sorted(found[: int(number)].tolist())))
    return "" if noted[0] == noted[1] else f" noted {noted[1]}, expected {noted[0]}"


def watched_pass(seed: int, device: str) -> str:
    """What a pass of one token for each sequence notes, and the stamps that it leaves."""
    case, ops = make_case(seed, device), columns(device, "canary_watch", "canary_verify", "canary_digest")
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that has no values yet has large ones
    try:
        expected, found = (_pass(each, case, random.Random(seed), recorded=each is ops[1]) for each in ops)
    finally:
        torch.use_deterministic_algorithms(False)
    return "".join(f" {name} {found[name]}, expected {each}" for name, each in expected.items() if found[name] != each)


def _pass(ops: Kernels, case: CanaryCase, rng: random.Random, *, recorded: bool) -> dict[str, Any]:
    """The last token of each sequence is that of the pass. `recorded`: in half of the cases as a graph has it."""
    device, count = case.device, len(case.lengths)
    stamps, table = stamped(ops, case), case.table.clone()
    for lane, slot, field in case.damage:
        stamps[lane, slot, field] ^= 1 << 7
    for row, position, slot in case.wild:
        table[row, position] = slot
    rows, starts = np.arange(1, count + 1), np.array(case.lengths) - 1
    strides, chains = np.full(count, rng.choice((1, 2, 3))), rows * 0 + 12345
    reads = np.stack((rows + 6, rows, np.zeros(count, np.int64), starts, strides, chains))
    due_7C, entries, _, bound = ops.canary_due(reads, CASE_PAGE)
    room = rng.choice((None, count + rng.randint(0, 3)))
    width = count if room is None or not recorded else room
    plan = WatchPlan(
        due=[(due_7C, entries)] if entries or recorded else [], bound_5B=bound, rows_B=rows,
        counts_B=np.ones(count, np.int64), first_name=7, chosen_W=None, room=room if recorded else None, sets=1,
    )  # fmt: skip
    words: dict[str, Any] = {"dtype": torch.int64, "device": device}
    rings = [tuple(torch.zeros(shape, **words) for shape in ((512, RING_FIELDS), 1, 4)) for _ in range(2)]
    rings[0] += (torch.full((9, 4), 99, **words),)  # of the pass before; for names from 7 on there is room for two
    watch = ops.canary_watch(ops, table, case.table, stamps, case.kv, case.coefficients, *rings, CASE_PAGE)
    watch.stage(plan, lambda words: torch.from_numpy(np.ascontiguousarray(words)).to(device))
    watch.expand(plan.due, bound)
    watch.verify(StampLane.HEAD_K)
    at = case.starts[1:] - 1

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat((tensor, torch.zeros(width - count, **words)))

    slots_T = padded(case.slots[at])
    rows_T = padded(torch.from_numpy(rows).to(device))
    starts_B1 = torch.arange(width + 1, device=device)
    watch.stand(slots_T, padded(case.positions[at]), padded(case.tokens[at]), starts_B1, rows_T, 7)
    watch.write(StampLane.HEAD_K)
    sums_T2 = watch.writes(0).sums_T2
    sums_T2[:count] = ops.canary_digest(case.kv, slots_T[:count], case.coefficients)
    if rng.random() < 0.5:
        sums_T2[rng.randrange(count)] ^= 4
    watch.look_again()
    watch.verify(StampLane.TAIL_K)
    watch.write(StampLane.TAIL_K)
    noted = [
        (int(number), checked.tolist(), sorted(rows[: int(number)].tolist()), [each.tolist() for each in counts])
        for rows, number, checked, *counts in rings
    ]
    return {"read": noted[0], "stored": noted[1], "stamps": stamps[:, CASE_PAGE:].tolist()}
