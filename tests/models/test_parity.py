"""What Serinus computes is what transformers computes, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.models import ForwardBatch, load_model, load_spec
from serinus.testing.checkpoints import FAMILIES
from serinus.testing.direct import DirectEngine, DirectSeq

GREEDY = SamplingParams(temperature=0.0)
DECODE_STEPS = 64


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


def engine(path: Path, dtype: torch.dtype, column: str = "auto") -> tuple[DirectEngine, Recorder]:
    spec = load_spec(path)
    kernels = load("cpu", column)
    model = Recorder(load_model(spec, path, dtype, kernels))
    return DirectEngine(model, kernels, page_size=8, page_count=160), model


def run_in_uneven_chunks(direct: DirectEngine, prompt: list[int]) -> DirectSeq:
    seq = direct.start(prompt, GREEDY, tokens=DECODE_STEPS + 1)
    for chunk in (1, 17, 64, 3, 1 << 30):
        direct.step([(seq, chunk)])
    while len(seq.output) <= DECODE_STEPS:
        direct.step([(seq, 1)])
    return seq


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("column", ["auto", "ref"])
def test_fp32_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: dict[str, Path], family: str, column: str
) -> None:
    path = checkpoints[family]
    prompt = [Rng(7).randrange(512) for _ in range(150)]
    direct, model = engine(path, torch.float32, column)
    seq = run_in_uneven_chunks(direct, prompt)
    expected = reference(path, prompt + seq.output[:-1], torch.float32)[len(prompt) - 1 :]
    found = torch.cat(model.seen)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < 1e-4
    assert seq.output == expected.argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_stay_as_close_to_fp32_as_those_of_transformers(checkpoints: dict[str, Path], family: str) -> None:
    path = checkpoints[family]
    prompt = [Rng(8).randrange(512) for _ in range(100)]
    direct, model = engine(path, torch.bfloat16)
    seq = run_in_uneven_chunks(direct, prompt)
    ids = prompt + seq.output[:-1]
    truth = reference(path, ids, torch.float32)[len(prompt) - 1 :]
    theirs = (reference(path, ids, torch.bfloat16)[len(prompt) - 1 :] - truth).abs().mean()
    ours = (torch.cat(model.seen) - truth).abs().mean()
    assert float(ours) < 1.25 * float(theirs)


@pytest.mark.slow
def test_a_mixed_batch_of_prompts_and_decodes_gives_each_sequence_its_own_answer(checkpoints: dict[str, Path]) -> None:
    rng = Rng(9)
    prompts = [[rng.randrange(512) for _ in range(n)] for n in (3, 40, 1, 77, 19)]
    alone = []
    for prompt in prompts:
        direct, _ = engine(checkpoints["qwen3"], torch.float32)
        alone.append(direct.generate([direct.start(prompt, GREEDY, tokens=16)], 12)[0])
    direct, _ = engine(checkpoints["qwen3"], torch.float32)
    seqs: list[DirectSeq] = []
    for prompt in prompts:  # every step: one more prompt chunk beside everything that decodes
        seqs.append(direct.start(prompt, GREEDY, tokens=16))
        while seqs[-1].done < len(prompt):
            direct.step([(s, 1) for s in seqs[:-1] if len(s.output) < 12] + [(seqs[-1], 21)])
    while any(len(s.output) < 12 for s in seqs):
        direct.step([(s, 1) for s in seqs if len(s.output) < 12])
    assert [s.output for s in seqs] == alone


@pytest.mark.slow
def test_a_chunk_whose_sequence_ends_later_returns_no_token(checkpoints: dict[str, Path]) -> None:
    direct, model = engine(checkpoints["llama"], torch.float32)
    seq = direct.start(list(range(5, 45)), GREEDY, tokens=4)
    direct.step([(seq, 30)])
    assert seq.output == []
    assert model.seen == []
    direct.step([(seq, 30)])
    assert len(seq.output) == 1


@pytest.mark.slow
def test_dummy_weights_are_a_function_of_the_seed(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["qwen2"]
    kernels = load("cpu")
    answers = []
    for seed in (1, 1, 2):
        spec = load_spec(path, load_format="dummy", seed=seed)
        model = load_model(spec, path, torch.float32, kernels, load_format="dummy", seed=seed)
        direct = DirectEngine(model, kernels)
        seq = direct.start([5, 6, 7], SamplingParams(temperature=0.0, logprobs=0), tokens=8)
        direct.generate([seq], 4)
        answers.append((spec.signature, seq.output, [r.logprobs for r in seq.results]))
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]
    assert answers[0][0] != answers[2][0]
    assert np.isfinite([lp.logprob for lp in answers[0][2] if lp is not None and lp.logprob is not None]).all()
