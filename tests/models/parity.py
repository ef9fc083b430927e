"""What the parity tests share: transformers' logits, and an engine that remembers its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.models import ForwardBatch, load_model, load_spec
from serinus.testing.direct import DirectEngine, DirectSeq

GREEDY = SamplingParams(temperature=0.0)
DECODE_STEPS = 64


def random_ids(seed: int, count: int) -> list[int]:
    """Token ids of the small vocabularies, all different draws."""
    rng = Rng(seed)
    return [rng.randrange(512) for _ in range(count)]


class Recorder:
    """A model that remembers the logits it gave."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.spec, self.dtype = model.spec, model.dtype
        self.seen: list[torch.Tensor] = []

    def forward(self, batch: ForwardBatch, kv: Any, table: torch.Tensor, hook: Any) -> torch.Tensor:
        hidden: torch.Tensor = self._model.forward(batch, kv, table, hook)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(self._model.logits(hidden).float())
        return self.seen[-1]


def reference(path: Path, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Logits of transformers for a whole sequence at once, [T, V]."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.tensor([ids])).logits[0].float()
    return logits


def engine(path: Path, dtype: torch.dtype, column: str = "auto", page_size: int = 8) -> tuple[DirectEngine, Recorder]:
    spec = load_spec(path)
    kernels = load("cpu", column)
    model = Recorder(load_model(spec, path, dtype, kernels))
    return DirectEngine(model, kernels, page_size=page_size, page_count=1280 // page_size), model


def run_in_uneven_chunks(direct: DirectEngine, prompt: list[int], *, forget: bool = False) -> DirectSeq:
    """`forget`: after each step, what fell out of the window becomes NaN, and its row entries 0."""
    seq = direct.start(prompt, GREEDY, tokens=DECODE_STEPS + 1)
    chunks = [1, 17, 64, 3, 1 << 30] + [1] * DECODE_STEPS
    for chunk in chunks:
        direct.step([(seq, chunk)])
        if forget:
            direct.forget(seq)
    return seq
