"""A runner driven by hand with a canary beside it, for the tests of this room."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serinus.cache import ResidentSlots
from serinus.canary import Canary, CanarySettings
from serinus.canary.hook import Faults
from serinus.core.parts import Part
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.kernels.canary import load_canary
from serinus.models import load_model, load_spec
from serinus.runner import oracle_token
from serinus.testing.checkpoints import make_toy
from serinus.testing.direct import DirectEngine, DirectSeq

__all__ = ["SHAPES", "StandingFacts", "decode", "started", "watched"]

PAGE = 4
SHAPES = {"full": {}, "swa": {"window": 10}, "both": {"window": 10, "layer_types": "SFS"}}
"""Toy models: all layers full, all sliding, both."""


class StandingFacts:
    """PageFacts without a cache: page p is owned by `page p`; what is swept is said by the test."""

    def __init__(self) -> None:
        self.cached: dict[Part, tuple[list[int], list[int]]] = {}
        """Slots and positions of one cached sequence a part."""

    def owner(self, part: Part, page: int) -> str:
        return f"owner of {part.name} {page}"

    def users(self, part: Part, page: int) -> tuple[str, ...]:
        return (f"user of {page}",)

    def history(self, part: Part, page: int) -> str:
        return f"history of {page}"

    def walk(self, cursor: int, budget: int, part: Part) -> ResidentSlots:
        slots, positions = (np.array(a, np.int64) for a in self.cached.get(part, ([], [])))
        previous = np.concatenate(([0], slots[:-1])) if len(slots) else slots
        return ResidentSlots(slots=slots, positions=positions, previous=previous, cursor=0)


def watched(
    path: Path, shape: str, *, faults: Faults | None = None, facts: StandingFacts | None = None,
    token_oracle: bool = False, **settings: Any,
) -> DirectEngine:  # fmt: skip
    """A toy model of that shape under a canary of these settings."""
    kernels = load("cpu")
    folder = make_toy(path, tokenizer=False, context=128, **SHAPES[shape])
    model = load_model(load_spec(folder), folder, torch.bfloat16, kernels)
    spec = model.spec

    def canary(engine: DirectEngine) -> Canary:
        return Canary(
            CanarySettings(page_size=PAGE, window=spec.window, **{"real_data": "all", **settings}),
            engine.pools,
            engine.tables,
            {part: spec.layers_of(part) for part in spec.parts},
            load_canary("cpu"),
            facts or StandingFacts(),
            faults=faults,
            oracle=partial(oracle_token, vocab_size=spec.vocab_size) if token_oracle else None,
        )

    return DirectEngine(model, kernels, page_size=PAGE, page_count=200, canary=canary, token_oracle=token_oracle)


def started(engine: DirectEngine, prompts: list[list[int]], chunk: int = 7) -> list[DirectSeq]:
    """Sequences whose prompts are computed, in chunks."""
    seqs = [
        engine.start(prompt, SamplingParams(temperature=0.0), tokens=60, seed=i) for i, prompt in enumerate(prompts)
    ]
    for seq in seqs:
        while seq.done < len(seq.prompt):
            engine.step([(seq, chunk)])
    return seqs


def decode(engine: DirectEngine, seqs: list[DirectSeq], steps: int) -> None:
    """So many tokens each, all together."""
    for _ in range(steps):
        engine.step([(seq, 1) for seq in seqs])
