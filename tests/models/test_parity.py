"""What Serinus computes is what transformers computes, for every family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.models import load_model, load_spec
from serinus.models.small_checkpoints import FAMILIES
from serinus.testing.direct import DirectEngine, DirectSeq
from tests.models.parity import GREEDY, engine, random_ids, reference, run_in_uneven_chunks


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("column", ["auto", "ref"])
def test_fp32_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: dict[str, Path], family: str, column: str
) -> None:
    path = checkpoints[family]
    prompt = random_ids(7, 150)
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
    prompt = random_ids(8, 100)
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
def test_a_chunk_before_the_end_of_its_sequence_returns_no_token(checkpoints: dict[str, Path]) -> None:
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
