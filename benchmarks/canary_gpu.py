"""The canary's Triton kernels on a GPU, beside copy bandwidth and the reference; 64 requests of 4,096 tokens of an
8B-shaped model (32 layers, 8 KV heads of 128, bf16: 34 GB of KV on shuffled pages).

    python -m benchmarks.canary_gpu      (from the top of the repository; needs a GPU with 60 GB)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from serinus.core.stamps import digest_coefficients
from serinus.kernels import RING_FIELDS, load
from serinus.kernels.ref import canary as ref
from serinus.kernels.ref.canary import canary_due

LAYERS, HEADS, SIZE, PAGE = 32, 8, 128, 16
REQUESTS, CONTEXT = 64, 4096


def best_us(job: Callable[[], object], rounds: int = 10, calls: int = 1) -> float:
    """The best round's time of one call, by events on the device: kernels, and gaps where the host is too slow."""
    job()
    best = float("inf")
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            job()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / calls)
    return best


def replay_us(job: Callable[[], object]) -> float:
    """As a captured graph: kernels alone, without the host."""
    job()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job()
    return best_us(graph.replay, calls=5)


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    ops = load("cuda")
    per_request = CONTEXT // PAGE
    slot_count = (REQUESTS * per_request + 1) * PAGE
    generator = torch.Generator("cuda").manual_seed(1)
    words = {"size": (slot_count, HEADS, SIZE), "dtype": torch.int16, "device": "cuda", "generator": generator}
    kv = [
        tuple(torch.randint(-32768, 32767, **words).view(torch.bfloat16) for _ in range(2))  # type: ignore[call-overload]
        for _ in range(LAYERS)
    ]
    factors, few = (
        torch.from_numpy(digest_coefficients(range(LAYERS), range(HEADS), SIZE, 2, partial=partial)).cuda()
        for partial in (False, True)
    )
    table, _ = make_table(per_request)
    copy_gb_s = copy_rate(args.rounds)
    values: dict[str, object] = {"device": torch.cuda.get_device_name(), "copy_gb_s": round(copy_gb_s, 1)}
    slot_bytes = LAYERS * 2 * HEADS * SIZE * 2

    def plan(stride: int) -> Callable[[], tuple[Tensor, ...]]:
        zeros = [0] * REQUESTS
        reads = [zeros, [*range(1, REQUESTS + 1)], zeros, [CONTEXT] * REQUESTS, [stride] * REQUESTS, zeros]
        columns, entries, *_ = canary_due(torch.tensor(reads).numpy(), PAGE)
        due = torch.from_numpy(columns).cuda()
        return lambda: ops.canary_plan(table, due, entries, page_size=PAGE, slot_count=1 << 31)

    entries, few_entries = plan(1)(), plan(16)()
    values["plan_us"] = round(replay_us(plan(1)), 1)
    for name, slots, coefficients in (
        ("digest_all_262144", entries[0], factors),
        ("digest_all_16384", few_entries[0], factors),
        ("digest_all_2048", entries[0][:2048].contiguous(), factors),
        ("digest_all_64", entries[0][::4096].contiguous(), factors),
        ("digest_partial_262144", entries[0], few),
        ("digest_partial_16384", few_entries[0], few),
        ("digest_partial_64", entries[0][::4096].contiguous(), few),
    ):
        spent = best_us(lambda s=slots, c=coefficients: ops.canary_digest(kv, s, c), args.rounds, 2)  # type: ignore[misc]
        values[name + "_us"] = round(spent, 1)
        if coefficients is factors:
            values[name + "_gb_s"] = round(len(slots) * slot_bytes / spent / 1e3, 1)
            values[name + "_of_copy"] = round(len(slots) * slot_bytes / spent / 1e3 / copy_gb_s, 3)
    digests = ops.canary_digest(kv, entries[0], factors)
    some = torch.randint(1, slot_count, (4096,), device="cuda", generator=generator)
    values["equal"] = bool((ref.canary_digest(kv, some, factors) == ops.canary_digest(kv, some, factors)).all())
    values["ref_digest_4096_us"] = round(best_us(lambda: ref.canary_digest(kv, some, factors), 3), 1)
    values["digest_4096_us"] = round(best_us(lambda: ops.canary_digest(kv, some, factors), args.rounds), 1)
    values |= stamps(ops, entries, digests, slot_count, args.rounds, table)
    sys.stdout.write(json.dumps({"benchmark": "canary_gpu", **values}) + "\n")


def copy_rate(rounds: int) -> float:
    """GB/s of a copy of 4 GB, read and written bytes together."""
    source = torch.ones(1 << 30, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_us(lambda: target.copy_(source), rounds) / 1e3


def make_table(per_request: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Rows of shuffled pages, and (rows, low, high) of all requests."""
    pages = (torch.randperm(REQUESTS * per_request) + 1).view(REQUESTS, per_request)
    table = torch.zeros(REQUESTS + 1, CONTEXT, dtype=torch.int32)
    table[1:] = (pages[:, :, None] * PAGE + torch.arange(PAGE)).view(REQUESTS, -1).int()
    rows = torch.arange(1, REQUESTS + 1, device="cuda")
    return table.cuda(), (rows, rows * 0, rows * 0 + CONTEXT)


def stamps(
    ops: object, entries: tuple[Tensor, ...], digests: Tensor, slot_count: int, rounds: int, table: Tensor
) -> dict[str, object]:
    """Write and verify stamps of all entries, beside the reference."""
    stamps = torch.zeros((4, slot_count, 4), dtype=torch.int64, device="cuda")
    ring = torch.zeros((1024, RING_FIELDS), dtype=torch.int64, device="cuda")
    count, checked = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (1, 4))
    slots, positions, previous, sequences = entries
    tokens = positions % 32000
    starts = torch.arange(REQUESTS + 1, device="cuda") * CONTEXT
    rows = torch.arange(1, REQUESTS + 1, device="cuda")

    def write(column: object, lane: int) -> None:
        getattr(column, "write", getattr(column, "canary_write", None))(  # type: ignore[misc]
            stamps, lane, slots, positions, tokens, starts, table, rows, digests if lane else None
        )

    def verify(column: object, lane: int) -> None:
        getattr(column, "verify", getattr(column, "canary_verify", None))(  # type: ignore[misc]
            stamps, lane, slots, positions, previous, tokens, digests if lane else None, sequences, ring, count, checked
        )

    found = {"write_64x4096_us": round(best_us(lambda: write(ops, 2), rounds), 1)}
    write(ops, 0)
    found["verify_head_us"] = round(replay_us(lambda: verify(ops, 0)), 1)
    found["verify_tail_us"] = round(replay_us(lambda: verify(ops, 2)), 1)
    found["ref_verify_tail_us"] = round(best_us(lambda: verify(ref, 2), 3), 1)
    found["violations"] = int(count)
    one_start = torch.arange(REQUESTS + 1, device="cuda")
    one = (slots[::CONTEXT].contiguous(), positions[::CONTEXT].contiguous(), tokens[::CONTEXT].contiguous())
    found["write_64x1_us"] = round(
        replay_us(lambda: ops.canary_write(stamps, 2, *one, one_start, table, rows, digests[:REQUESTS])), 1
    )
    long = torch.tensor([0, 8192], device="cuda")
    found["write_1x8192_us"] = round(
        replay_us(
            lambda: ops.canary_write(
                stamps, 2, slots[:8192], positions[:8192], tokens[:8192], long, table, rows[:1], digests[:8192]
            )
        ),
        1,
    )
    return found


if __name__ == "__main__":
    main()
