"""One conversation of several requests, step by step: what a recorded step must not change. On a CPU, in Triton's
interpreter, and on a GPU.

TRITON_INTERPRET=1 python -m tests.runner.replaying COLUMN
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from serinus.canary import CanaryRank, CheckSettings, Violation
from serinus.core.parts import Part
from serinus.core.sampling import SamplingParams
from serinus.kernels import Kernels, load, row_of
from serinus.models import Model, load_model, load_spec
from serinus.models.small_checkpoints import make_checkpoint
from serinus.runner import Runner
from serinus.testing.direct import DirectEngine
from tests.kernels.interpreted import speed_up

__all__ = ["Told", "converse", "small_latent_model", "small_model"]

PAGE = 4
SIZES = (1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What came of it."""

    tokens: list[list[int]]
    violations: list[Violation]
    replays: int
    checked: dict[Part, int]


def small_latent_model(folder: Path, kernels: Kernels, dtype: torch.dtype, device: str = "cpu") -> Model:
    """Rows of 32 + 16 elements for 4 heads, and experts."""
    make_checkpoint(folder, "deepseek_v3", vocab=128, context=96, dtype="float32", tokenizer=False)
    return load_model(load_spec(folder), folder, dtype, kernels, device=device)


def small_model(folder: Path, kernels: Kernels, dtype: torch.dtype, device: str = "cpu", layers: int = 3) -> Model:
    """Full and sliding layers; 4/2 heads of 32."""
    make_checkpoint(
        folder, "gemma3_text", hidden=64, layers=layers, heads=4, kv_heads=2, head_size=32, vocab=128, context=96,
        dtype="float32", tokenizer=False, sliding_window=10,
        layer_types=["full_attention", "sliding_attention", "full_attention"][:layers],
    )  # fmt: skip
    return load_model(load_spec(folder), folder, dtype, kernels, device=device)


def converse(
    model: Model, kernels: Kernels, *, recorded: bool, stride: int | None, flips: bool = False, device: str = "cpu",
    steps: int = 12, real_data: str = "all",
) -> Told:  # fmt: skip
    """Three requests begin one after the other and decode together. `stride`: of the canary; None = without one.
    `flips`: after each step one byte of KV is wrong for the length of the next."""

    def canary(engine: DirectEngine) -> CanaryRank:
        spec = model.spec
        return CanaryRank(
            CheckSettings(page_size=PAGE, window=spec.window, real_data=real_data, stride=stride or 1),
            engine.pools, engine.tables, {part: list(spec.layers_of(part)) for part in spec.parts}, kernels,
        )  # fmt: skip

    engine = DirectEngine(
        model, kernels, page_size=PAGE, page_count=80, rows=8, context=64, device=device,
        canary=None if stride is None else canary,
    )  # fmt: skip
    runner = engine.runner
    assert isinstance(runner, Runner)
    if recorded:
        runner.record(SIZES)
    params = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8), SamplingParams(temperature=0.0))
    seqs = [engine.start([7 * i + j for j in range(9 + 5 * i)], each, tokens=30) for i, each in enumerate(params)]
    running = []
    for seq in seqs:
        for chunk in (4, 100):  # above the last layer a step with the first chunk has fewer sequences
            engine.step([*((each, 1) for each in running), (seq, chunk)])
        running.append(seq)
        for _ in range(3):
            engine.step([(each, 1) for each in running])
    parts = [part for part in model.spec.parts if model.spec.layers_of(part)]
    for at in range(steps):
        where, part = seqs[at % 3], parts[at % len(parts)]
        slots = where.slots if part is Part.FULL else where.others[part]
        halves = engine.pools[part].layers[0]
        row_HD = row_of(halves[at % len(halves)], int(slots[where.done - 1 - at % 5]))
        lane = row_HD.view(-1).view(torch.uint8)
        if flips:
            lane[at] ^= 16
        engine.step([(each, 1) for each in seqs])
        if flips:
            lane[at] ^= 16
    return Told(
        tokens=[seq.output for seq in seqs],
        violations=engine.violations,
        replays=0 if runner.graphs is None else runner.graphs.replays,
        checked={} if engine.canary is None else engine.canary.due_slots,
    )


def where(violation: Violation) -> tuple[object, ...]:
    """All of it but digests: linears of more rows may round differently."""
    return violation.step, violation.tag, violation.reasons, violation.slot, violation.position, violation.rid


def main(column: str) -> None:
    """Compare the watch of a column around the reference's forward pass with the reference's own watch."""
    with tempfile.TemporaryDirectory() as folder:
        ref = load("cpu", "ref")
        kernels = replace(ref, canary_watch=load("cpu", column).canary_watch)
        models = [small_model(Path(folder), ref, torch.float32, layers=layers) for layers in (2, 1)]
        for model, stride, flips in product(models, (1, 3), (False, True)):
            if flips and (stride > 1 or model is not models[0]):  # a byte that is not looked at, or one layer's
                continue
            for recorded in (False, True):  # padding rounds otherwise: digests of the one are not those of the other
                expected, found = (
                    converse(model, each, recorded=recorded, stride=stride, flips=flips, steps=4)
                    for each in (ref, kernels)
                )
                assert found.violations == expected.violations, (stride, flips, recorded)
                assert bool(found.violations) == flips, (stride, flips, recorded)
                assert found.checked == expected.checked, (stride, flips, recorded)
                assert bool(found.replays) == recorded
                assert found.tokens == expected.tokens, (stride, flips, recorded)


if __name__ == "__main__":
    speed_up()
    main(sys.argv[1])
