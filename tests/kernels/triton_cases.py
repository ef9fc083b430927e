"""Random cases of the Triton column beside the reference. On a GPU, or in Triton's interpreter:

TRITON_INTERPRET=1 python -m tests.kernels.triton_cases COUNT

prints, as JSON, what differs by case and seed. The interpreter takes more than the compiler does, so `compile` instead
of a count compiles the kernels for an H100, on any machine. A new kernel gets a function here and an entry of CASES.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from serinus.core.stamps import digest_coefficients
from serinus.kernels import AttentionBatch, Kernels, LayerDigest, Tiling, load, packed_sums

from .canary_case import make_case, outcome

__all__ = ["CASES", "compile_all", "differences"]

TILING = Tiling(block=16, warps=4, stages=1, stretches=2)
"""Small: the few tokens of a case are several blocks of several stretches."""


def columns(device: str, *ops: str) -> tuple[Kernels, Kernels]:
    """The reference and the Triton column, which must have these ops of its own."""
    return load(device, "ref"), load(device, "triton", own=ops)


def canary(seed: int, device: str) -> str:
    """Stamps, digests, plans and violations of one random case."""
    case = make_case(seed, device)
    expected, found = (outcome(ops, case) for ops in columns(device, "canary_verify", "canary_bind", "canary_write"))
    return ", ".join(name for name in expected if expected[name] != found[name])


def watched_attention(seed: int, device: str) -> str:
    """Attention that digests what it reads, beside attention and digest of the reference."""
    ref, fast = columns(device, "pack_factors", "watched_attention")
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
    columns_7B, entries, _ = ref.canary_due(reads.numpy(), page)
    if columns_7B.shape[1] != batch:
        return ""  # every sequence stands in its place
    due, table = torch.from_numpy(columns_7B).to(device), table.to(device)
    factors = torch.from_numpy(digest_coefficients(range(layers), range(heads), size, 2, partial=False)).to(device)
    q = torch.randn((batch, heads * group, size), generator=generator).to(dtype).to(device)
    attention = AttentionBatch(
        rows_B=reads[1].to(device),
        q_starts_B1=torch.arange(batch + 1, device=device),
        context_B=torch.tensor(contexts, device=device),
    )
    slots = ref.canary_plan(table, due, entries, page_size=page, slot_count=slot_count)[0]
    whole, stood_in = (torch.zeros((1, 2, 2, entries), dtype=torch.int32, device=device) for _ in range(2))
    wrong = ""
    for layer, (k, v) in enumerate(kv):
        inputs = (q, k, v, table, attention, 0.25)
        given = {"due_7B": due, "page_size": page}
        digest = LayerDigest(factors=fast.pack_factors(factors[layer], heads), sums_P22E=whole, **given)
        found = fast.watched_attention(*inputs, digest, TILING)
        plain = fast.watched_attention(*inputs, None, TILING)
        digest = LayerDigest(factors=ref.pack_factors(factors[layer], heads), sums_P22E=stood_in, **given)
        expected = ref.watched_attention(*inputs, digest)
        if not torch.allclose(found.float(), expected.float(), atol=0.03):
            wrong += f" attention of layer {layer} by {float((found.float() - expected.float()).abs().max()):.3f}"
        if not torch.equal(found, plain):
            wrong += f" layer {layer} watched and not watched"
    for name, sums in (("triton", whole), ("ref", stood_in)):
        if not torch.equal(packed_sums(sums)[slots > 0], ref.canary_digest(kv, slots, factors)[slots > 0]):
            wrong += f" digests of {name}"
    return wrong


CASES: dict[str, Callable[[int, str], str]] = {"canary": canary, "watched_attention": watched_attention}
"""By name: (seed, device) -> what differs, in words; empty = nothing."""


def differences(name: str, device: str, count: int) -> dict[int, str]:
    """What differs of one case, by seed; seeds without a difference are left out."""
    found = {seed: CASES[name](seed, device) for seed in range(count)}
    return {seed: words for seed, words in found.items() if words}


def compile_all() -> None:
    """Run one seed of every case with kernels that are compiled and not started; what they find means nothing."""
    utils = SimpleNamespace(
        load_binary=lambda *_: (0, 0, 0, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 227 << 10},
        unload_module=lambda _: None,
    )
    machine = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        launcher_cls=lambda *_: lambda *_: None,
        utils=utils,
    )
    triton.runtime.driver.set_active(machine)
    for case in CASES.values():
        case(0, "cpu")


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_all()
    else:
        sys.stdout.write(json.dumps({name: differences(name, "cpu", int(sys.argv[1])) for name in CASES}))
