"""Models that slide, far beyond their windows: transformers' answers, from the KV of the windows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from serinus.core.parts import Part
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.models import load_model, load_spec
from serinus.models.small_checkpoints import make_checkpoint, make_toy
from serinus.testing.direct import DirectEngine
from serinus.testing.oracle import toy_continue
from tests.models.parity import GREEDY, bf16_errors, engine, random_ids, reference, run_in_uneven_chunks

PROMPT = random_ids(11, 230)
TIED = {"tied": True, "tokenizer": False}
SLIDES = {"use_sliding_window": True, "max_window_layers": 1, "tokenizer": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral_swa", {"sliding_window": 21, "layers": 3, "tokenizer": False}),
    "gemma2": ("gemma2", {"sliding_window": 13, "layers": 4, **TIED}),
    "gemma2 with low caps": (
        "gemma2",
        {"sliding_window": 32, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, **TIED},
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 30, "layers": 7, "kv_heads": 1, "head_size": 64, **TIED}),
    "gemma3 of another pattern": ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 2, **TIED}),
    "qwen2 above its first layer": ("qwen2", {"sliding_window": 19, "layers": 3, **SLIDES}),
    "qwen3 above its first layer": ("qwen3", {"sliding_window": 19, "layers": 3, **SLIDES}),
}


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sliding")
    return {
        name: make_checkpoint(root / name.replace(" ", "_"), family, seed=i, **extra)
        for i, (name, (family, extra)) in enumerate(MODELS.items())
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("column", "page_size"), [("auto", 16), ("ref", 5)])
def test_logits_and_tokens_are_those_of_transformers_although_nothing_below_a_window_is_kept(
    sliding: dict[str, Path], name: str, column: str, page_size: int
) -> None:
    direct, model = engine(sliding[name], torch.float32, column, page_size)
    spec = direct.model.spec
    assert spec.window is not None
    assert len(PROMPT) > 7 * spec.window
    seq = run_in_uneven_chunks(direct, PROMPT, forget=True)
    expected = reference(sliding[name], PROMPT + seq.output[:-1], torch.float32)[len(PROMPT) - 1 :]
    assert float((torch.cat(model.seen) - expected).abs().max()) < 1e-4
    assert seq.output == expected.argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
def test_a_window_off_by_one_gives_other_logits(sliding: dict[str, Path], name: str) -> None:
    """The tests above can fail."""
    window = load_spec(sliding[name]).window
    assert window is not None
    logits = []
    for seen in (window, window - 1, window + 1):
        spec = load_spec(sliding[name], overrides={"sliding_window": seen})
        kernels = load("cpu", "ref")
        model = load_model(spec, sliding[name], torch.float32, kernels)
        direct = DirectEngine(model, kernels, page_count=64)
        seq = direct.start(PROMPT, SamplingParams(temperature=0.0, logprobs=0), tokens=2)
        direct.step([(seq, len(PROMPT))])
        found = seq.results[0].logprobs
        assert found is not None
        logits.append(found.logprob)
    assert len(set(logits)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
def test_bf16_answers_do_not_depend_on_what_is_below_the_window(sliding: dict[str, Path], name: str) -> None:
    answers = []
    for forget in (False, True):
        direct, model = engine(sliding[name], torch.bfloat16)
        seq = run_in_uneven_chunks(direct, PROMPT, forget=forget)
        answers.append((seq.output, torch.cat(model.seen)))
    assert answers[0][0] == answers[1][0]
    assert torch.equal(answers[0][1], answers[1][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_bf16_logits_far_beyond_the_window_stay_as_close_to_fp32_as_those_of_transformers(
    sliding: dict[str, Path], name: str
) -> None:
    prompts = [PROMPT, *(random_ids(seed, len(PROMPT)) for seed in (21, 22, 23))]
    errors = bf16_errors(sliding[name], prompts, forget=True)
    assert float(errors.ours.mean()) < 1.25 * float(errors.theirs.mean())


def test_a_model_of_sliding_layers_alone_keeps_no_bytes_in_part_full(sliding: dict[str, Path]) -> None:
    direct, _ = engine(sliding["mistral"], torch.float32)
    assert direct.pools[Part.FULL].page_bytes == 0
    assert direct.pools[Part.SWA].page_bytes > 0


@pytest.mark.slow
def test_several_sequences_slide_side_by_side(sliding: dict[str, Path]) -> None:
    prompts = [PROMPT[: 10 + 41 * i] for i in range(4)]
    alone = []
    for prompt in prompts:
        direct, _ = engine(sliding["gemma3"], torch.float32)
        alone.append(direct.generate([direct.start(prompt, GREEDY, tokens=16)], 12)[0])
    direct, _ = engine(sliding["gemma3"], torch.float32)
    seqs = [direct.start(prompt, GREEDY, tokens=16) for prompt in prompts]
    while any(len(seq.output) < 12 for seq in seqs):
        direct.step([(seq, 23) for seq in seqs if len(seq.output) < 12])
        for seq in seqs:
            direct.forget(seq)
    assert [seq.output for seq in seqs] == alone


def toy(path: Path, layer_types: str, window: int, page_size: int = 4) -> DirectEngine:
    spec = load_spec(make_toy(path, tokenizer=False, layers=len(layer_types), layer_types=layer_types, window=window))
    kernels = load("cpu", "ref")
    model = load_model(spec, path, torch.bfloat16, kernels)
    return DirectEngine(model, kernels, page_size=page_size, page_count=600 // page_size)


@pytest.mark.parametrize("layer_types", ["SFS", "FS", "SS"])
@pytest.mark.parametrize(("window", "page_size"), [(2, 4), (7, 3), (16, 16), (50, 1)])
@pytest.mark.parametrize("chunk", [1, 6, 1000])
def test_a_toy_that_slides_gives_the_oracles_answer(
    tmp_path: Path, layer_types: str, window: int, page_size: int, chunk: int
) -> None:
    direct = toy(tmp_path, layer_types, window, page_size)
    prompt = PROMPT[:60]
    seq = direct.start(prompt, GREEDY, tokens=20)
    while len(seq.output) < 20:
        direct.step([(seq, chunk)])
        direct.forget(seq)
    assert seq.output == toy_continue(direct.model.spec, prompt, 20)


@pytest.mark.parametrize(("place", "harmed"), [(-7, False), (-6, True), (-1, True)])
def test_a_sliding_toy_reads_its_whole_window_and_no_more(tmp_path: Path, place: int, harmed: bool) -> None:
    direct = toy(tmp_path, "FS", 7)
    seq = direct.start(PROMPT[:30], GREEDY, tokens=4)
    direct.step([(seq, 30)])
    assert seq.swa_slots is not None
    direct.pools[Part.SWA].v[0][int(seq.swa_slots[30 + place])] += 1.0
    direct.step([(seq, 1)])
    assert (seq.output != toy_continue(direct.model.spec, PROMPT[:30], 2)) is harmed


def test_a_toy_with_a_window_of_one_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="'sliding_window' is 1, expected at least 2"):
        toy(tmp_path, "FS", 1)
