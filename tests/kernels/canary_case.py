"""One random case for the canary's kernels, and what a column makes of it: everything it wrote, in a fixed order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serinus.core.stamps import digest_coefficients
from serinus.kernels import RING_FIELDS, Kernels, StampLane, slot_count
from serinus.kernels.canary import ANCHOR

__all__ = ["PAGE", "CanaryCase", "make_case", "outcome", "stamped"]

PAGE = 4


@dataclass(frozen=True)
class CanaryCase:
    """Sequences of random lengths on random pages, some of them damaged after they were stamped."""

    kv: list[tuple[Tensor, ...]]
    """Keys and values of each layer, or latent rows: then there are no lanes of V."""
    coefficients: Tensor
    table: Tensor
    lengths: list[int]
    slots: Tensor
    positions: Tensor
    tokens: Tensor
    starts: Tensor
    damage: list[tuple[int, int, int]]
    """(lane of the tensor, slot, field) that are changed between writing and verifying."""
    wild: list[tuple[int, int, int]]
    """(row, position, slot): entries of the table that come to name no slot of a page, or none at all."""
    low: Tensor
    stride: int
    strangers: list[int]
    """1 where a sequence is not whose it is said to be."""
    device: str

    @property
    def lanes(self) -> list[StampLane]:
        """Those that stamps have, in order."""
        return [lane for lane in StampLane if lane % 2 < len(self.kv[0])]


def make_case(seed: int, device: str = "cpu") -> CanaryCase:
    """A case of its own for each seed."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice((torch.bfloat16, torch.float32))
    halves = 1 if seed % 3 == 2 else 2
    layers, heads, size = rng.choice(((1, 1, 8), (2, 3, 4), (3, 2, 16), (2, 3, 64)))
    lengths = [rng.randint(1, 30) for _ in range(rng.randint(1, 4))]
    pages = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(pages), generator=generator) + 1
    slots_all = (sum(pages) + 1) * PAGE
    table = torch.zeros((len(lengths) + 1, 32), dtype=torch.int32)
    slots, at = [], 0
    for row, (length, count) in enumerate(zip(lengths, pages, strict=True), 1):
        mine = (order[at : at + count, None] * PAGE + torch.arange(PAGE)).reshape(-1)[:length]
        table[row, :length] = mine.int()
        slots.append(mine)
        at += count
    kv = [
        tuple(torch.randn((slots_all, heads, size), generator=generator).to(dtype).to(device) for _ in range(halves))
        for _ in range(layers)
    ]
    coefficients = digest_coefficients(
        range(layers), range(heads), size, dtype.itemsize, partial=rng.random() < 0.3, halves=halves
    )
    total = sum(lengths)
    flat = torch.cat(slots)
    damage = [
        (rng.randrange(2 * halves), int(flat[rng.randrange(total)]), rng.randrange(4)) for _ in range(rng.randint(0, 3))
    ]
    wild = [row for row in range(1, len(lengths) + 1) if rng.random() < 0.2]
    return CanaryCase(
        kv=kv,
        coefficients=torch.from_numpy(coefficients).to(device),
        table=table.to(device),
        lengths=lengths,
        slots=flat.to(device),
        positions=torch.cat([torch.arange(n) for n in lengths]).to(device),
        tokens=torch.randint(0, 1 << 20, (total,), generator=generator).to(device),
        starts=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]).to(device),
        damage=damage,
        wild=[(row, rng.randrange(lengths[row - 1]), rng.choice((0, -1, -99, slots_all, 1 << 30))) for row in wild],
        low=torch.tensor([rng.randrange(n) if rng.random() < 0.4 else 0 for n in lengths]).to(device),
        stride=rng.choice((1, 2, 3)),
        strangers=[int(rng.random() < 0.2) for _ in lengths],
        device=device,
    )


def outcome(ops: Kernels, case: CanaryCase) -> dict[str, Any]:
    """Stamp (in two steps, the second after a chunk border), damage, plan and verify with one column."""
    device = case.device
    digests = ops.canary_digest(case.kv, case.slots, case.coefficients)
    stamps = stamped(ops, case)
    written = stamps.clone()
    for lane, slot, field in case.damage:
        stamps[lane, slot, field] ^= 1 << 7
    table = case.table.clone()
    for row, position, slot in case.wild:
        table[row, position] = slot
    plan = _plan(ops, case, table)
    ring = torch.zeros((64, RING_FIELDS), dtype=torch.int64, device=device)
    count = torch.zeros(1, dtype=torch.int64, device=device)
    checked = torch.zeros(4, dtype=torch.int64, device=device)
    counts = torch.zeros((72, 4), dtype=torch.int64, device=device)  # names are 70 and more, or rows: some have no room
    found = ops.canary_digest(case.kv, plan[0], case.coefficients)
    expected = torch.full((len(plan[0]),), -1, dtype=torch.int64, device=device)
    ops.canary_verify(stamps, 0, *plan[:3], None, None, plan[3], ring, count, checked, counts)
    ops.canary_verify(stamps, 2, *plan[:3], expected, found, plan[3], ring, count, checked, counts)
    rows, lengths = torch.arange(1, len(case.lengths) + 1), torch.tensor(case.lengths)
    last = table[rows.to(device), (lengths - 1).to(device)].long()
    ends = [ops.chain_hashes(each.numpy(), 0, ANCHOR)[-1] for each in case.tokens.int().cpu().split(case.lengths)]
    chains = torch.tensor(ends, device=device) ^ torch.tensor(case.strangers, device=device)
    for lane in (0, 2):
        bound = last, (lengths - 1).to(device), chains, rows.to(device)
        ops.canary_bind(stamps, lane, *bound, ring, count, checked, counts)
    return {
        "digests": digests.tolist(),
        "stamps": written.tolist(),
        "plan": [column.tolist() for column in plan],
        "violations": sorted(map(tuple, ring[: int(count)].tolist())),
        "checked": checked.tolist(),
        "by_sequence": counts.tolist(),
    }


def stamped(ops: Kernels, case: CanaryCase) -> Tensor:
    """Each sequence's first half in one call, the rest in another."""
    device = case.device
    stamps = torch.zeros((len(case.lanes), slot_count(case.kv[0][0]), 4), dtype=torch.int64, device=device)
    digests = ops.canary_digest(case.kv, case.slots, case.coefficients)
    halves = [n // 2 for n in case.lengths]
    starts = case.starts.tolist()
    first = torch.cat([torch.arange(s, s + h) for s, h in zip(starts, halves, strict=False)]).to(device)
    rest = torch.cat([torch.arange(s + h, s + n) for s, h, n in zip(starts, halves, case.lengths, strict=False)])
    rest = rest.to(device)
    rows = torch.arange(1, len(halves) + 1, device=device)
    for picked, counts in ((first, halves), (rest, [n - h for n, h in zip(case.lengths, halves, strict=True)])):
        bounds = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], device=device)
        inputs = (case.slots[picked], case.positions[picked], case.tokens[picked], bounds, case.table, rows)
        live = torch.tensor(counts, device=device) > 0  # every sequence of a batch has a token
        if not live.all():
            inputs = (*inputs[:3], torch.cat((bounds[:1], bounds[1:][live])), case.table, rows[live])
        ops.canary_write(stamps, 0, *inputs, None)
        ops.canary_write(stamps, 2, *inputs, digests[picked])
    return stamps


def _plan(ops: Kernels, case: CanaryCase, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device = case.device
    low = case.low.tolist()
    first = [value // PAGE for value in low]
    pages = [-(-(-(-n // PAGE) - f) // case.stride) for n, f in zip(case.lengths, first, strict=True)]
    offsets = [0, *(torch.tensor(pages).cumsum(0) * PAGE).tolist()]
    strides = [case.stride] * len(low)
    names, rows = range(70, 70 + len(low)), range(1, len(low) + 1)
    due = torch.tensor([[*names], [*rows], low, case.lengths, first, strides, offsets[:-1]], device=device)
    plan: tuple[Tensor, Tensor, Tensor, Tensor] = ops.canary_plan(
        table, due, offsets[-1], page_size=PAGE, slot_count=slot_count(case.kv[0][0])
    )
    return plan
