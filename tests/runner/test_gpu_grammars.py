"""Grammars on a GPU: the tokens of the CPU, and a step that waits for its own tokens alone."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch

from serinus import LLM, Grammar, SamplingParams
from serinus.core.clock import WallClock
from serinus.engine import CompletionOutput
from serinus.kernels import load
from serinus.models import load_model, load_spec
from serinus.models.small_checkpoints import make_checkpoint
from serinus.runner import GrammarMasks, Runner
from serinus.testing.direct import DirectEngine
from serinus.text import GrammarVocabulary, load_tokenizer

pytestmark = pytest.mark.gpu

ROWS = 16
CLEAR = 1e-2
"""Log-probability by which the likeliest token must lead: two devices add in different orders."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["home", "work"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PATTERN = r"[0-9]{4}-[a-f]{2,6}( and [A-Z]+){1,2}!"
CHOICES = ["yes", "yesterday", "no", "nobody", "日本 語"]
GRAMMARS = (
    Grammar.of("json_schema", SCHEMA), Grammar.of("regex", PATTERN), Grammar.of("choice", CHOICES), None,
)  # fmt: skip


def checkpoint(folder: Path) -> None:
    make_checkpoint(folder, "qwen3", dtype="float32", hidden=256, heads=4, kv_heads=2, head_size=64, layers=2)


def answers(folder: Path, device: str, *, eager: bool = False) -> list[CompletionOutput]:
    """Those of 16 requests at once, four of each grammar and four free ones."""
    prompts = [{"prompt_token_ids": [(7 * i + j) % 250 for j in range(20 + 3 * i)]} for i in range(ROWS)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=64, grammar=GRAMMARS[i % 4], logprobs=2) for i in range(ROWS)
    ]  # fmt: skip
    with LLM(
        str(folder), device=device, dtype="float32", max_total_tokens=4096, max_running_requests=ROWS,
        disable_cuda_graph=eager, attention_backend="ref" if device == "cpu" else "auto", threads=2,
    ) as llm:  # fmt: skip
        return [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]


def lead(answer: CompletionOutput, at: int) -> float:
    """By how much the likeliest token at a place leads the second, which may be forbidden."""
    assert answer.logprobs is not None
    first, second = answer.logprobs[at].top_logprobs
    return first - second


def compare(expected: list[CompletionOutput], found: list[CompletionOutput]) -> int:
    """How many tokens are the same. An answer is compared up to the first place at which two tokens are level."""
    same = 0
    for row, (one, other) in enumerate(zip(expected, found, strict=True)):
        end = next((at for at in range(len(one.token_ids)) if lead(one, at) < CLEAR), None)
        assert other.token_ids[:end] == one.token_ids[:end], f"row {row} of {GRAMMARS[row % 4]}"
        same += len(one.token_ids[:end])
        if end is None:
            assert other.finish_reason == one.finish_reason
    return same


def follows(row: int, answer: CompletionOutput) -> None:
    """A complete answer is one of its grammar."""
    if answer.finish_reason != "stop":
        return
    if row % 4 == 0:
        value = json.loads(answer.text)
        assert list(value) == ["name", "age", "kind"]
        assert 0 <= value["age"] <= 150
        assert value["kind"] in ("home", "work")
    elif row % 4 == 1:
        assert re.fullmatch(PATTERN, answer.text), answer.text
    elif row % 4 == 2:
        assert answer.text in CHOICES


def test_answers_under_grammars_are_those_of_the_cpu(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    expected = answers(tmp_path, "cpu")
    for eager in (False, True):
        found = answers(tmp_path, "cuda", eager=eager)
        assert compare(expected, found) >= 200
        for row, answer in enumerate(found):
            follows(row, answer)
        assert all(each.finish_reason == "stop" for each in found[2::4]), "each choice is complete within its limit"


@pytest.mark.parametrize("recorded", [False, True])
def test_masks_add_no_wait_to_a_step(tmp_path: Path, *, recorded: bool) -> None:
    checkpoint(tmp_path)
    kernels, spec, tokenizer = load("cuda"), load_spec(tmp_path), load_tokenizer(str(tmp_path))
    model = load_model(spec, tmp_path, torch.float32, kernels, device="cuda")
    masks = GrammarMasks(
        lambda: GrammarVocabulary(tokenizer, width=spec.vocab_size, eos_ids=spec.eos_ids), WallClock(),
        width=spec.vocab_size,
    )  # fmt: skip
    engine = DirectEngine(
        model, kernels, page_size=4, page_count=400, rows=20, context=96, device="cuda", grammars=masks
    )
    runner = engine.runner
    assert isinstance(runner, Runner)
    if recorded:
        runner.record((ROWS,))
    letters = Grammar.of("regex", "[a-z]{200}")
    seqs = [
        engine.start([5, 6, 7, 8 + i], SamplingParams(temperature=0.0, grammar=letters if i % 2 else None), tokens=30)
        for i in range(ROWS)
    ]
    engine.generate(seqs, 6)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        engine.step([(seq, 1) for seq in seqs])
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(each.message) for each in seen if "called a synchronizing" in str(each.message)]
    assert not waits, seen
    if recorded:
        assert runner.graphs is not None
        assert runner.graphs.replays == 6
    for seq in seqs[1::2]:
        assert tokenizer.decode(seq.output).isalpha(), seq.output
    masks.close()
