"""The toy answers right when its KV is intact, and wrong when it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from serinus.core.errors import ConfigError
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.models import ModelSpec, choose_dtype, load_model, load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.testing.direct import DirectEngine, DirectSeq
from serinus.testing.oracle import toy_continue

GREEDY = SamplingParams(temperature=0.0)


def draws(seed: int, count: int, vocab: int) -> list[int]:
    rng = Rng(seed)
    return [rng.randrange(vocab) for _ in range(count)]


def toy(path: Path, *, page_size: int = 4, dtype: str = "auto", **sizes: Any) -> tuple[ModelSpec, DirectEngine]:
    spec = load_spec(make_toy(path, tokenizer=False, **sizes))
    kernels = load("cpu", "ref")
    model = load_model(spec, path, choose_dtype(spec, dtype), kernels)
    return spec, DirectEngine(model, kernels, page_size=page_size, page_count=600 // page_size)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_any_page_size_and_any_chunking_give_the_oracles_answer(tmp_path: Path, page_size: int, chunk: int) -> None:
    spec, engine = toy(tmp_path, page_size=page_size, vocab=97)
    prompt = draws(page_size, 33, 97)
    answer = engine.generate([engine.start(prompt, GREEDY, tokens=20)], 20, chunk=chunk)[0]
    assert answer == toy_continue(spec, prompt, 20)


@pytest.mark.parametrize(
    "sizes",
    [{"vocab": 2}, {"layers": 1}, {"layers": 6, "kv_heads": 3, "head_size": 4}, {"head_size": 128}],
)
def test_any_size_of_toy_agrees_with_the_oracle(tmp_path: Path, sizes: dict[str, Any]) -> None:
    spec, engine = toy(tmp_path, **sizes)
    prompt = [1, 0, 1, 1]
    assert engine.generate([engine.start(prompt, GREEDY, tokens=30)], 30)[0] == toy_continue(spec, prompt, 30)


def test_fp32_kv_has_an_oracle_too(tmp_path: Path) -> None:
    spec, engine = toy(tmp_path, dtype="float32")
    answer = engine.generate([engine.start([5, 6], GREEDY, tokens=10)], 10)[0]
    assert answer == toy_continue(spec, [5, 6], 10, dtype="float32")


def test_sequences_in_one_batch_do_not_disturb_each_other(tmp_path: Path) -> None:
    spec, engine = toy(tmp_path)
    prompts = [draws(i, 1 + 5 * i, 512) for i in range(6)]
    seqs: list[DirectSeq] = []
    for prompt in prompts:
        seqs.append(engine.start(prompt, GREEDY, tokens=40))
        while seqs[-1].done < len(prompt):
            engine.step([(s, 1) for s in seqs[:-1]] + [(seqs[-1], 4)])
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.output == toy_continue(spec, prompt, len(seq.output))


def answer_after(engine: DirectEngine, damage: str, prompt: list[int]) -> list[int]:
    """Prefill, harm the KV in one way, decode 12 tokens."""
    seq = engine.start(prompt, GREEDY, tokens=16)
    engine.step([(seq, 1000)])
    k, v = engine.pool.layers[1]
    slots = [int(s) for s in seq.slots]
    words = v.view(torch.int16)
    if damage == "one bit":
        words[slots[9], 0, 3] ^= 1
    elif damage == "a hole":
        k[slots[4]] = 0
    elif damage == "two slots swapped":
        words[[slots[2], slots[3]]] = words[[slots[3], slots[2]]].clone()
    elif damage == "another row's page":
        engine.table.table[seq.row, 0:4] = engine.table.table[seq.row, 4:8]
    elif damage == "layers swapped":
        engine.pool.k[0][slots[1]], engine.pool.k[2][slots[1]] = (
            engine.pool.k[2][slots[1]].clone(),
            engine.pool.k[0][slots[1]].clone(),
        )
    while len(seq.output) < 13:
        engine.step([(seq, 1)])
    return seq.output[1:]


@pytest.mark.parametrize("damage", ["one bit", "a hole", "two slots swapped", "another row's page", "layers swapped"])
def test_damaged_kv_gives_wrong_tokens_and_keeps_giving_them(tmp_path: Path, damage: str) -> None:
    spec, engine = toy(tmp_path)
    prompt = list(range(40, 60))
    expected = toy_continue(spec, prompt, 13)[1:]
    assert answer_after(engine, "none", prompt) == expected
    found = answer_after(engine, damage, prompt)
    assert sum(a != b for a, b in zip(found, expected, strict=True)) >= 11


def test_a_chunk_that_continues_from_wrong_kv_is_wrong(tmp_path: Path) -> None:
    spec, engine = toy(tmp_path)
    prompt = list(range(20))
    seq = engine.start(prompt, GREEDY, tokens=8)
    engine.step([(seq, 10)])
    engine.pool.k[0].view(torch.int16)[int(seq.slots[9]), 0, 0] ^= 1  # the chain word the next chunk starts from
    engine.step([(seq, 10)])
    assert seq.output != toy_continue(spec, prompt, 1)


def test_reserved_ids_are_never_generated(tmp_path: Path) -> None:
    spec = load_spec(make_toy(tmp_path, vocab=512))
    assert spec.reserved_ids == 5
    assert min(toy_continue(spec, [7, 8, 9], 2000)) == 5


def test_a_row_that_is_no_whole_number_of_words_is_refused(tmp_path: Path) -> None:
    path = make_toy(tmp_path, head_size=2, tokenizer=False)
    with pytest.raises(ConfigError, match="to be a multiple of 4"):
        load_spec(path)
