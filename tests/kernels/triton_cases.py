"""Random cases of the Triton column beside the reference. On a GPU, or in Triton's interpreter:

TRITON_INTERPRET=1 python -m tests.kernels.triton_cases COUNT

prints, as JSON, what differs by case and seed. A new kernel gets a function here and an entry of CASES.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable

import torch

from serinus.core.stamps import digest_coefficients
from serinus.kernels import AttentionBatch, load
from serinus.kernels.ref import canary as ref
from serinus.kernels.ref.paged_attention import paged_attention
from serinus.kernels.triton.watched_attention import byte_planes, new_sums, packed_sums, watched_decode_attention

from .canary_case import make_case, outcome

__all__ = ["CASES", "differences"]


def canary(seed: int, device: str) -> str:
    """Stamps, digests, plans and violations of one random case."""
    case = make_case(seed, device)
    expected, found = outcome(load(device, "ref"), case), outcome(load(device, "triton"), case)
    return ", ".join(name for name in expected if expected[name] != found[name])


def watched_attention(seed: int, device: str) -> str:
    """Attention that digests what it reads, beside attention and digest of the reference."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    page, heads, group, size, layers = rng.choice((4, 16)), rng.choice((1, 2)), rng.choice((1, 4)), 32, 2
    contexts = [rng.randint(1, 90) for _ in range(rng.randint(1, 3))]
    pages = [-(-context // page) for context in contexts]
    order = (torch.randperm(sum(pages), generator=generator) + 1).split(pages)
    table = torch.zeros((len(contexts) + 1, 96), dtype=torch.int32)
    for row, (mine, context) in enumerate(zip(order, contexts, strict=True), 1):
        table[row, :context] = (mine[:, None] * page + torch.arange(page)).reshape(-1)[:context].int()
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # of which Triton's interpreter makes products
    slot_count = (sum(pages) + 1) * page
    kv = [
        tuple(torch.randn((slot_count, heads, size), generator=generator).to(dtype).to(device) for _ in range(2))
        for _ in range(layers)
    ]
    stride = rng.choice((1, 2, 3))
    batch = len(contexts)
    reads = torch.tensor(
        [[*range(batch)], [*range(1, batch + 1)], [0] * batch, [c - 1 for c in contexts], [stride] * batch]
    )
    columns, entries, _ = ref.canary_due(reads.numpy(), rng.randrange(9), page)
    if columns.shape[1] != batch:
        return ""  # every sequence stands in its place
    due, table = torch.from_numpy(columns).to(device), table.to(device)
    rows, seen = reads[1].to(device), torch.tensor(contexts, device=device)
    factors = torch.from_numpy(digest_coefficients(range(layers), range(heads), size, 2, partial=False)).to(device)
    q = torch.randn((batch, heads * group, size), generator=generator).to(dtype).to(device)
    sums = new_sums(entries, device)
    wrong = ""
    attention = AttentionBatch(rows_B=rows, q_starts_B1=torch.arange(batch + 1, device=device), context_B=seen)
    for layer, (k, v) in enumerate(kv):
        found = watched_decode_attention(
            q, k, v, table, rows, seen, 0.25, page_size=page, planes=byte_planes(factors[layer], heads),
            due_7B=due, sums_22E=sums, block=16, stretches=2,
        )  # fmt: skip
        plain = watched_decode_attention(
            q, k, v, table, rows, seen, 0.25, page_size=page, block=16, stretches=2
        )  # fmt: skip
        expected = paged_attention(q, k, v, table, attention, 0.25)
        if not torch.allclose(found.float(), expected.float(), atol=0.03):
            wrong += f" attention of layer {layer} by {float((found.float() - expected.float()).abs().max()):.3f}"
        if not torch.equal(found, plain):
            wrong += f" layer {layer} watched and not watched"
    slots = ref.canary_plan(table, due, entries, page_size=page)[0]
    whole = ref.canary_digest(kv, slots, factors)
    if not torch.equal(packed_sums(sums)[slots > 0], whole[slots > 0]):
        wrong += " digests"
    return wrong


CASES: dict[str, Callable[[int, str], str]] = {"canary": canary, "watched_attention": watched_attention}
"""By name: (seed, device) -> what differs, in words; empty = nothing."""


def differences(name: str, device: str, count: int) -> dict[int, str]:
    """What differs of one case, by seed; seeds without a difference are left out."""
    found = {seed: CASES[name](seed, device) for seed in range(count)}
    return {seed: words for seed, words in found.items() if words}


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: differences(name, "cpu", int(sys.argv[1])) for name in CASES}))
