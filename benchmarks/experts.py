"""The routed experts of a decode step beside what their bytes take at the memory's bandwidth.

    python benchmarks/experts.py [--rounds 20]

Layers of 32 experts of 768, 4 chosen, over a stream of 1024, bf16: 151 MB of experts a layer, and as many layers as no
cache holds. Of each batch: the time of one `fused_moe`, and that of reading the experts that it hit at the bandwidth
that `report.bandwidth` measures.
"""

from __future__ import annotations

import argparse

import torch
from report import bandwidth, emit

from serinus.core.clock import WallClock
from serinus.kernels import Kernels, PackedExperts, load

CLOCK = WallClock()
COUNT, CHOSEN, WIDTH, INNER, LAYERS = 32, 4, 1024, 768, 4
ROWS = (1, 2, 4, 8, 16, 32)


def layers() -> list[PackedExperts]:
    """Random experts of each layer."""
    shapes = (COUNT, 2 * INNER, WIDTH), (COUNT, WIDTH, INNER)
    made = [[(torch.randn(shape) * 0.02).bfloat16() for shape in shapes] for _ in range(LAYERS)]
    return [PackedExperts(gate_up=gate_up, down=down) for gate_up, down in made]


def measure(kernels: Kernels, stacks: list[PackedExperts], rows: int, rounds: int) -> tuple[float, float]:
    """Seconds of a layer, the best of the rounds, and experts that it hits."""
    x_TE = torch.randn(rows, WIDTH).bfloat16()
    chosen = [torch.rand(rows, COUNT).topk(CHOSEN) for _ in stacks]
    best = float("inf")
    for turn in range(rounds + 1):
        start = CLOCK.now()
        for (weights_TK, ids_TK), packed in zip(chosen, stacks, strict=True):
            kernels.fused_moe(x_TE, weights_TK, ids_TK, packed, "silu")
        best = min(best, (CLOCK.now() - start) / len(stacks)) if turn else best
    return best, sum(len(set(ids.flatten().tolist())) for _, ids in chosen) / len(stacks)


def main() -> None:
    """One JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    kernels, stacks = load("cpu"), layers()
    rate = bandwidth(kernels, torch.bfloat16)
    found = {}
    for rows in ROWS:
        seconds, hit = measure(kernels, stacks, rows, rounds)
        floor = hit * 3 * WIDTH * INNER * 2 / rate
        found[f"rows_{rows}"] = {
            "us": round(seconds * 1e6), "floor_us": round(floor * 1e6), "experts_hit": round(hit, 1),
            "of_floor": round(floor / seconds, 2),
        }  # fmt: skip
    emit("experts", threads=torch.get_num_threads(), bandwidth_gb_s=round(rate / 1e9, 1), **found)


if __name__ == "__main__":
    main()
