"""foreign_page: a page of a running request's row is pointed at the page of another prompt at the same positions.

It is what a page that was freed twice, or a wrong child in the radix tree, leads to: bytes and stamps are sound, and of
another prompt. Answers stay fluent. Only the chain of hashes tells the two apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serinus.canary.hook import StepChecks
from serinus.canary.lanes import PartLanes
from serinus.canary.perturb.plan import Injection
from serinus.core.rng import Rng
from serinus.kernels import StampLane


def run(
    rng: Rng, lanes: PartLanes, checks: StepChecks, cached: NDArray[np.integer], page_size: int
) -> Injection | None:
    """`cached`: pages of the cache that no request uses; those that running requests read serve too. None where no page
    that is read has a page of another prompt at its positions. Waits for a device."""
    _, rows, lows, highs, strides, _ = checks.reads[lanes.part]
    stamps_S4 = lanes.stamps_LS4[StampLane.HEAD_K].cpu().numpy()
    pages = []  # (sequence, first position, page) of each page that is read whole
    for sequence, (row, low, high, stride) in enumerate(zip(rows, lows, highs, strides, strict=True)):
        # In turns a window's other positions become its first before theirs comes: nothing is promised for them.
        first = -(-(int(low) + (int(stride) if low else 0)) // page_size) * page_size
        for start in range(first, int(high) - page_size + 1, page_size):
            pages.append((sequence, start, int(lanes.table_RC[int(row), start]) // page_size))
    others = {page for _, _, page in pages} | {int(page) for page in cached}
    rng.shuffle(pages)
    for sequence, start, page in pages:
        last = (page + 1) * page_size - 1
        foreign = [
            other
            for other in sorted(others - {0, page})
            if stamps_S4[other * page_size, 1] == start
            and stamps_S4[(other + 1) * page_size - 1, 2] != stamps_S4[last, 2]
        ]
        if foreign:
            other = rng.choice(foreign)
            slots = np.arange(other * page_size, (other + 1) * page_size)
            lanes.table_RC[int(rows[sequence]), start : start + page_size] = lanes.table_RC.new_tensor(slots)
            return Injection(
                mode="foreign_page", step=checks.step, part=lanes.part.name, slot=other * page_size, position=start,
                rid=checks.rids[sequence], before=page, after=other,
            )  # fmt: skip
    return None
