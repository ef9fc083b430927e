"""A runner driven by hand with a canary beside it, for the tests of this room."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serinus.canary import CanaryRank, CheckSettings, SweepSlots
from serinus.canary.commands import CachedPages
from serinus.canary.perturb import Perturber
from serinus.core.parts import Part
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.models import load_model, load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.runner import oracle_token
from serinus.testing.direct import DirectEngine, DirectSeq

__all__ = ["SHAPES", "decode", "started", "sweep", "watched"]

PAGE = 4
SHAPES = {"full": {}, "swa": {"window": 10}, "both": {"window": 10, "layer_types": "SFS"}}
"""Toy models: all layers full, all sliding, both."""


def watched(
    path: Path, shape: str, *, perturber: Perturber | None = None, token_oracle: bool = False, hook: Any = None,
    column: str = "cpu", **settings: Any,
) -> DirectEngine:  # fmt: skip
    """A toy model of that shape under a canary of these settings, by the kernels of that column."""
    kernels = load("cpu", column)
    folder = make_toy(path, tokenizer=False, context=128, **SHAPES[shape])
    model = load_model(load_spec(folder), folder, torch.bfloat16, kernels)
    spec = model.spec

    def canary(engine: DirectEngine) -> CanaryRank:
        return CanaryRank(
            CheckSettings(page_size=PAGE, window=spec.window, **{"real_data": "all", **settings}),
            engine.pools,
            engine.tables,
            {part: spec.layers_of(part) for part in spec.parts},
            kernels,
            perturber=perturber,
            oracle=partial(oracle_token, vocab_size=spec.vocab_size) if token_oracle else None,
        )

    return DirectEngine(
        model, kernels, page_size=PAGE, page_count=200, canary=canary, hook=hook, token_oracle=token_oracle
    )


def started(engine: DirectEngine, prompts: list[list[int]], chunk: int = 7) -> list[DirectSeq]:
    """Sequences whose prompts are computed, in chunks."""
    seqs = [
        engine.start(prompt, SamplingParams(temperature=0.0), tokens=60, seed=i) for i, prompt in enumerate(prompts)
    ]
    for seq in seqs:
        while seq.done < len(seq.prompt):
            engine.step([(seq, chunk)])
    return seqs


def sweep(
    engine: DirectEngine, part: Part, slots: list[int], positions: list[int], tokens: list[int] | None = None
) -> None:
    """Command a sweep of the cached slots of one sequence, as the leader does before a step; `tokens`: the sequence's,
    of these slots, where the cache is said to know them."""
    assert engine.canary is not None
    before = [0 if positions[0] == 0 else -1, *slots[:-1]]
    swept, at, previous = (np.array(each, np.int64) for each in (slots, positions, before))
    engine.canary.obey(CachedPages(part=part, pages=np.unique(swept // PAGE).astype(np.int32), is_host=False))
    known = np.full(len(slots), -1) if tokens is None else np.array(tokens)
    engine.canary.obey(
        SweepSlots(
            part=part, slots=swept, positions=at, previous=previous, tokens=known.astype(np.int32), ends_pass=True
        )
    )


def decode(engine: DirectEngine, seqs: list[DirectSeq], steps: int) -> None:
    """So many tokens each, all together."""
    for _ in range(steps):
        engine.step([(seq, 1) for seq in seqs])
