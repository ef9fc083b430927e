"""Random cases of the Triton column's watch beside the reference: entries of rows that the leader did not write."""

from __future__ import annotations

import random

import numpy as np
import torch

from serinus.kernels import RING_FIELDS, StampLane
from serinus.kernels.contracts import WatchPlan

from .triton_columns import columns

__all__ = ["canary_watch"]

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
