"""The same models on an accelerator, through the `ref` kernels: the fp32 answers of the CPU, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest

from serinus.core.sampling import SamplingParams
from serinus.engine import LLM
from serinus.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3", "mistral"])
def test_a_gpu_gives_the_tokens_of_the_cpu(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, dtype="float32")
    prompts = [[(7 * i + j) % 500 for i in range(20 + 30 * j)] for j in range(4)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = {}
    for device in ("cpu", "cuda"):
        llm = LLM(str(tmp_path), device=device, dtype="float32", max_total_tokens=2048, chunked_prefill_size=64)
        answers[device] = [out.outputs[0].token_ids for out in llm.generate(prompts, greedy, use_tqdm=False)]
    assert answers["cuda"] == answers["cpu"]
