"""A decode step under the canary on a GPU: 64 requests of 4,096 tokens of an 8B-shaped model (32 layers, 8 KV heads
of 128, bf16: 34 GB of KV on shuffled pages of 16), attention alone and with the model's linears, in every mode.

Goals, of decode time: `all` + rotating:16 <= 3 %, `all` + full <= 10 %. Each step is a captured graph; modes take
turns, medians of many. `fused`: attention digests what it reads; else the digest is a pass of its own. Floor of the
step: its bytes at copy bandwidth.

    python -m benchmarks.canary_gpu_step      (from the top of the repository; needs a GPU with 80 GB)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, astuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.canary_gpu import CONTEXT, HEADS, LAYERS, PAGE, REQUESTS, SIZE, best_us, copy_rate, make_table
from serinus.core.stamps import digest_coefficients
from serinus.kernels import RING_FIELDS, AttentionBatch, LayerDigest, Tiling, load, packed_sums
from tests.kernels.triton_cases import differences

QUERIES, WIDTH, MLP = 32, 4096, 14336
SCALE = SIZE**-0.5
CHOICES = [
    Tiling(block=block, warps=warps, stages=stages, stretches=stretches)
    for block, warps, stages, stretches in (
        (64, 4, 3, 4), (64, 4, 2, 4), (64, 2, 3, 4), (32, 2, 3, 4), (128, 4, 2, 4), (128, 4, 3, 4),
    )
]  # fmt: skip


class Case:
    """KV, stamps and what a step reads."""

    def __init__(self) -> None:
        per_request = CONTEXT // PAGE
        slots = (REQUESTS * per_request + 1) * PAGE
        torch.manual_seed(1)
        self.kv = [
            tuple(torch.randn((slots, HEADS, SIZE), dtype=torch.bfloat16, device="cuda") for _ in range(2))
            for _ in range(LAYERS)
        ]
        self.ops = load("cuda", "triton", own=("watched_attention", "canary_digest", "canary_verify"))
        self.table, (self.rows, _, _) = make_table(per_request)
        self.q = torch.randn((REQUESTS, QUERIES, SIZE), dtype=torch.bfloat16, device="cuda")
        self.stamps = torch.zeros((4, slots, 4), dtype=torch.int64, device="cuda")
        self.ring = tuple(
            torch.zeros(shape, dtype=torch.int64, device="cuda") for shape in ((1024, RING_FIELDS), (1,), (4,))
        )
        self.starts = torch.arange(REQUESTS + 1, device="cuda")
        context = torch.full((REQUESTS,), CONTEXT, dtype=torch.int64, device="cuda")
        self.batch = AttentionBatch(rows_B=self.rows, q_starts_B1=self.starts, context_B=context)
        self.new = self.table[1:, CONTEXT - 1].long().contiguous()
        self.at = torch.full((REQUESTS,), CONTEXT - 1, dtype=torch.int64, device="cuda")
        self.tokens = torch.arange(REQUESTS, device="cuda")
        self.factors = {
            name: torch.from_numpy(
                digest_coefficients(range(LAYERS), range(HEADS), SIZE, 2, partial=name == "partial")
            ).cuda()
            for name in ("partial", "all")
        }
        self.packed = [self.ops.pack_factors(layer, HEADS) for layer in self.factors["all"]]

    def due(self, stride: int) -> tuple[Tensor, int]:
        """What is verified of all but the token that the step itself writes."""
        reads = torch.tensor([[*range(REQUESTS)], [*range(1, REQUESTS + 1)], [0] * REQUESTS,
                              [CONTEXT - 1] * REQUESTS, [stride] * REQUESTS, [0] * REQUESTS])  # fmt: skip
        columns, entries, *_ = self.ops.canary_due(reads.numpy(), PAGE)
        return torch.from_numpy(columns).cuda(), entries

    def stamp_all(self, data: str) -> None:
        """As if every token had been written under this mode."""
        slots, positions, _, _ = self.ops.canary_plan(*self.whole(), page_size=PAGE, slot_count=self.stamps.shape[1])
        digests = None if data == "none" else self.ops.canary_digest(self.kv, slots, self.factors[data])
        starts = torch.arange(REQUESTS + 1, device="cuda") * CONTEXT
        tokens = positions % 32000
        tokens[positions == CONTEXT - 1] = self.tokens
        for lane in (0, 2):
            self.ops.canary_write(self.stamps, lane, slots, positions, tokens, starts, self.table, self.rows,
                           digests if lane else None)  # fmt: skip

    def whole(self) -> tuple[Tensor, Tensor, int]:
        """Plan inputs of every token."""
        reads = torch.tensor([[*range(REQUESTS)], [*range(1, REQUESTS + 1)], [0] * REQUESTS, [CONTEXT] * REQUESTS,
                              [1] * REQUESTS, [0] * REQUESTS])  # fmt: skip
        columns, entries, *_ = self.ops.canary_due(reads.numpy(), PAGE)
        return self.table, torch.from_numpy(columns).cuda(), entries


def attend(case: Case, layer: int, choice: Tiling, watched: tuple[Tensor, Tensor] | None) -> Tensor:
    digest = None
    if watched is not None:
        due, sums = watched
        digest = LayerDigest(factors=case.packed[layer], due_7B=due, sums_P22E=sums, page_size=PAGE)
    return case.ops.watched_attention(case.q, *case.kv[layer], case.table, case.batch, SCALE, digest, choice)


def new_sums(entries: int) -> Tensor:
    return torch.zeros((1, 2, 2, entries), dtype=torch.int32, device="cuda")


def step(
    case: Case, mode: tuple[str, int, bool] | None, choices: dict[bool, Tiling],
    linears: list[list[Tensor]] | None,
) -> Callable[[], None]:  # fmt: skip
    """One decode step: all layers, with the canary's work around them. mode: (real data, stride, fused)."""
    x = torch.randn((REQUESTS, WIDTH), dtype=torch.bfloat16, device="cuda")
    data, stride, is_fused = mode or ("none", 1, False)
    due, entries = case.due(stride)

    def run() -> None:
        plan = None
        sums = new_sums(entries) if is_fused else None
        if mode is not None:
            plan = case.ops.canary_plan(case.table, due, entries, page_size=PAGE, slot_count=case.stamps.shape[1])
            around(0, plan, None)
        for layer in range(LAYERS):
            attend(case, layer, choices[is_fused], None if sums is None else (due, sums))
            if linears is not None:
                for weights in linears[layer]:
                    torch.matmul(x[:, :1].expand(REQUESTS, weights.shape[0]), weights)
        if plan is not None:
            digests = None
            if sums is not None:
                digests = packed_sums(sums)
            elif data != "none":
                digests = case.ops.canary_digest(case.kv, plan[0], case.factors[data])
            around(2, plan, digests)

    def around(lane: int, plan: tuple[Tensor, ...], digests: Tensor | None) -> None:
        case.ops.canary_verify(case.stamps, lane, *plan[:3], None, digests, plan[3], *case.ring)
        fresh = None if data == "none" or not lane else case.ops.canary_digest(case.kv, case.new, case.factors[data])
        case.ops.canary_write(
            case.stamps, lane, case.new, case.at, case.tokens, case.starts, case.table, case.rows, fresh
        )

    return run


def captured(job: Callable[[], None]) -> torch.cuda.CUDAGraph:
    job()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job()
    return graph


def tuned(case: Case) -> tuple[dict[bool, Tiling], dict[str, float]]:
    """The best way to cut the work, with and without digests; microseconds a layer of each."""
    due, entries = case.due(1)
    sums = new_sums(entries)
    seen: dict[str, float] = {}
    best = {}
    for watched in (False, True):

        def layers(choice: Tiling, w: bool = watched) -> None:
            for layer in range(8):
                attend(case, layer, choice, (due, sums) if w else None)

        times = []
        for choice in CHOICES:
            try:
                spent = best_us(lambda c=choice: layers(c), 5) / 8  # type: ignore[misc]
            except OutOfResources as error:  # what does not fit this GPU is left out, and said
                seen[f"{watched} {choice}"] = -1.0
                sys.stderr.write(f"{choice}: {error}\n")
                continue
            seen[f"{watched} {astuple(choice)}"] = round(spent, 1)
            times.append((spent, choice))
        best[watched] = min(times, key=lambda pair: pair[0])[1]
    return best, seen


MODES: dict[str, tuple[str, int, bool] | None] = {
    "off": None,
    "none_rotating": ("none", 16, False), "none_full": ("none", 1, False),
    "partial_rotating": ("partial", 16, False), "partial_full": ("partial", 1, False),
    "all_rotating": ("all", 16, False), "all_rotating_fused": ("all", 16, True),
    "all_full": ("all", 1, False), "all_full_fused": ("all", 1, True),
}  # fmt: skip


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    wrong = differences("watched_attention", "cuda", 12)
    sys.stderr.write(f"differing from the reference: {wrong}\n")
    case = Case()
    choices, seen = tuned(case)
    sys.stderr.write(json.dumps(seen, indent=1) + "\n")
    values: dict[str, object] = {"device": torch.cuda.get_device_name(), "differing": len(wrong), "cut_us": seen}
    values["choices"] = {str(watched): asdict(choice) for watched, choice in choices.items()}
    copy = copy_rate(5)
    values["copy_gb_s"] = round(copy, 1)
    shapes = ((WIDTH, WIDTH + 2 * HEADS * SIZE), (WIDTH, WIDTH), (WIDTH, 2 * MLP), (MLP, WIDTH))
    weights = [[torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes] for _ in range(LAYERS)]
    kv_bytes = REQUESTS * CONTEXT * LAYERS * 2 * HEADS * SIZE * 2
    weight_bytes = sum(each.nbytes for layer in weights for each in layer)
    for name, linears, read in (("attention", None, kv_bytes), ("decode", weights, kv_bytes + weight_bytes)):
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for data in ("none", "partial", "all"):
            case.stamp_all(data)
            mine = {mode: what for mode, what in MODES.items() if what is None or what[0] == data}
            jobs = {mode: step(case, what, choices, linears) for mode, what in mine.items()}  # they hold tensors
            graphs = {mode: captured(job) for mode, job in jobs.items()}
            for _ in range(args.rounds):
                for mode, graph in graphs.items():
                    times[mode].append(best_us(graph.replay, 1))
        middle = {mode: statistics.median(spent) for mode, spent in times.items()}
        values[name] = {
            "step_us": round(middle["off"], 1), "floor_us": round(read / copy / 1e3, 1),
            "overhead": {mode: round(spent / middle["off"] - 1, 4) for mode, spent in middle.items()},
            "spread_off": [round(min(times["off"]), 1), round(max(times["off"]), 1)],
        }  # fmt: skip
        sys.stderr.write(json.dumps(values[name]) + "\n")
    values["violations"] = int(case.ring[1])
    values["checked"] = case.ring[2].tolist()
    sys.stdout.write(json.dumps({"benchmark": "canary_gpu_step", **values}) + "\n")


if __name__ == "__main__":
    main()
