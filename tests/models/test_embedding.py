"""Embeddings of a real engine are transformers' last hidden states, of one process and of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from serinus import LLM, SamplingParams
from serinus.core.request import TokenLogprobs
from serinus.models.small_checkpoints import make_checkpoint
from serinus.selftest import EnginePair

from .parity import random_ids

PROMPTS = [random_ids(seed, count) for seed, count in ((1, 3), (2, 40), (3, 1))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Qwen3's embedding models are stored: tied, and names without `model.`."""
    folder = make_checkpoint(tmp_path_factory.mktemp("embedding") / "qwen3", "qwen3", tied=True)
    file = folder / "model.safetensors"
    bare = {name.removeprefix("model."): tensor.clone() for name, tensor in load_file(file).items()}
    assert "embed_tokens.weight" in bare
    save_file(bare, file, metadata={"format": "pt"})
    return folder


POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last": lambda states: states[-1], "mean": lambda states: states.mean(0), "cls": lambda states: states[0],
}  # fmt: skip
"""What each pooling makes of the states of a text."""


def check(checkpoint: Path, found: Sequence[Sequence[TokenLogprobs]], pooling: str = "last") -> None:
    """Each prompt has one place, with the state of transformers."""
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    for ids, (place,) in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            expected = POOLED[pooling](model(torch.tensor([ids])).last_hidden_state[0]).numpy()
        np.testing.assert_allclose(np.frombuffer(place.hidden, "<f4"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mesh", [{}, pytest.param({"tp_size": 2, "pp_size": 2}, marks=pytest.mark.proof)])
def test_hidden_states_are_those_of_transformers(checkpoint: Path, mesh: dict[str, int]) -> None:
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, hidden_state=True)
    with LLM(str(checkpoint), dtype="float32", max_total_tokens=512, **mesh) as llm:
        outputs = llm.generate(PROMPTS, sampling)
    check(checkpoint, [output.outputs[0].logprobs for output in outputs])


@pytest.mark.parametrize("mesh", [{}, pytest.param({"tp_size": 2, "pp_size": 2}, marks=pytest.mark.proof)])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_pooled_states_are_those_of_transformers(checkpoint: Path, pooling: str, mesh: dict[str, int]) -> None:
    """Whether the prompts are computed in one chunk or in several, beside others, or were computed before."""
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, hidden_state=True, pooling=pooling)
    with LLM(str(checkpoint), dtype="float32", max_total_tokens=512, chunked_prefill_size=16, **mesh) as llm:
        llm.generate(PROMPTS, SamplingParams(max_new_tokens=1, temperature=0.0))
        outputs = llm.generate(PROMPTS, sampling)
        again = llm.generate(PROMPTS, SamplingParams(max_new_tokens=1, temperature=0.0, hidden_state=True))
    check(checkpoint, [output.outputs[0].logprobs for output in outputs], pooling)
    check(checkpoint, [output.outputs[0].logprobs for output in again])


@pytest.mark.parametrize("family", ["granite", "cohere"])
def test_hidden_states_are_not_scaled_where_logits_are(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path, family, tokenizer=False)
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, hidden_state=True)
    with LLM(str(path), dtype="float32", max_total_tokens=512, skip_tokenizer_init=True) as llm:
        outputs = llm.generate(PROMPTS, sampling)
    check(path, [output.outputs[0].logprobs for output in outputs])


def test_through_a_prefill_engine_it_comes_with_the_first_token(checkpoint: Path) -> None:
    both = EnginePair(checkpoint, max_total_tokens=1024, dtype="float32", page_size=16, skip_tokenizer_init=True)
    found = []
    for number, prompt in enumerate(PROMPTS):
        both.add(str(number), prompt, 1, hidden_state=True)
        both.run_until_idle()
        deltas = both.deltas[str(number)]
        usage = deltas[-1].usage
        assert usage is not None
        assert usage.prefill_engine == "prefill-0"
        found.append([place for delta in deltas for place in delta.logprobs])
    check(checkpoint, found)
    both.check()
