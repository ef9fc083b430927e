"""The routed experts of a decode step beside what their bytes take at the memory's bandwidth.

    python benchmarks/experts.py [--rounds 20] [--dtype bfloat16]

Layers of 32 experts of 768, 4 chosen, over a stream of 1024: of bf16 151 MB of experts a layer, and as many layers as
no cache holds; and the same quantized (`--quantization int8` and `int4`). Of each batch, all formats in turns: the time
of one `fused_moe`, and that of reading the experts that it hit at the bandwidth that `report.bandwidth` measures.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from report import bandwidth, emit

from serinus.core.clock import WallClock
from serinus.kernels import Kernels, PackedExperts, QuantizedWeight, load
from serinus.models.quantized import quantize

CLOCK = WallClock()
COUNT, CHOSEN, WIDTH, INNER, LAYERS = 32, 4, 1024, 768, 4
ROWS = (1, 2, 4, 8, 16, 32)
FORMS = {"int8": (8, 0), "int4": (4, 128)}
"""Bits, and inputs that share a scale; 0 = all."""


def layers(kernels: Kernels, dtype: torch.dtype) -> dict[str, list[PackedExperts]]:
    """Random experts of each layer, in each form."""
    shapes = (COUNT, 2 * INNER, WIDTH), (COUNT, WIDTH, INNER)
    found: dict[str, list[PackedExperts]] = {"plain": [], **{form: [] for form in FORMS}}
    for _ in range(LAYERS):
        gate_up, down = [(torch.randn(shape) * 0.02).to(dtype) for shape in shapes]
        found["plain"].append(PackedExperts(gate_up=gate_up, down=down))
        for form in FORMS:
            pairs = [(quantized(one, form), quantized(other, form)) for one, other in zip(gate_up, down, strict=True)]
            found[form].append(kernels.pack_experts(pairs, None, None))
    return found


def quantized(weight_OI: torch.Tensor, form: str) -> QuantizedWeight:
    """As `--quantization` has it."""
    bits, group = FORMS[form]
    return quantize(weight_OI, bits, group or weight_OI.shape[1])


def expert_bytes(form: str, item_bytes: int) -> float:
    """Of one expert."""
    bits, group = FORMS.get(form, (8 * item_bytes, 0))
    return 3 * WIDTH * INNER * (bits / 8 + (4 / group if group else 0.0))


def measure(
    kernels: Kernels, stacks: dict[str, list[PackedExperts]], dtype: torch.dtype, rows: int, rounds: int
) -> tuple[dict[str, float], float]:
    """Seconds of a layer of each form, the best of the rounds, and experts that it hits."""
    x_TE = torch.randn(rows, WIDTH).to(dtype)
    chosen = [torch.rand(rows, COUNT).topk(CHOSEN) for _ in range(LAYERS)]
    best = dict.fromkeys(stacks, float("inf"))
    for turn in range(rounds + 1):
        for form, packed_layers in stacks.items():
            start = CLOCK.now()
            for (weights_TK, ids_TK), packed in zip(chosen, packed_layers, strict=True):
                kernels.fused_moe(x_TE, weights_TK, ids_TK, packed, "silu")
            best[form] = min(best[form], (CLOCK.now() - start) / LAYERS) if turn else best[form]
    return best, sum(len(set(ids.flatten().tolist())) for _, ids in chosen) / LAYERS


def main() -> None:
    """One JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = parser.parse_args()
    dtype: torch.dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    kernels = load("cpu")
    stacks, rate = layers(kernels, dtype), bandwidth(kernels, torch.float32)  # bf16 linears are not everywhere
    found: dict[str, Any] = {}
    for rows in ROWS:
        seconds, hit = measure(kernels, stacks, dtype, rows, args.rounds)
        found[f"rows_{rows}"] = {"experts_hit": round(hit, 1)}
        for form, each in seconds.items():
            floor = hit * expert_bytes(form, dtype.itemsize) / rate
            found[f"rows_{rows}"][form] = {
                "us": round(each * 1e6), "floor_us": round(floor * 1e6), "of_floor": round(floor / each, 2),
                "gain": round(seconds["plain"] / each, 2),
            }  # fmt: skip
    emit("experts", dtype=args.dtype, threads=torch.get_num_threads(), bandwidth_gb_s=round(rate / 1e9, 1), **found)


if __name__ == "__main__":
    main()
