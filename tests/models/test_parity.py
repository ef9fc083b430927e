"""What Serinus computes is what transformers computes, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.models import load_model, load_spec
from serinus.models.small_checkpoints import FAMILIES, make_checkpoint
from serinus.testing.direct import DirectEngine, DirectSeq
from tests.models.parity import (
    GREEDY,
    bf16_errors,
    check_handed_over_with_a_prefix,
    engine,
    equals_transformers,
    random_ids,
    run_in_uneven_chunks,
    tied_tokens,
)

LOADED = ("gemma", "glm", "glm4", "granite", "granitemoehybrid", "phi3", "qwen2_yarn", "smollm3")
"""They differ from others as they are loaded, not as they are computed."""
OP_BY_OP = ("olmo2", "olmo3", "cohere", "cohere2")
"""Norms stand behind attention and MLP alone, and over all heads; or attention and MLP of a layer read one norm."""
LATENT = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3")
MIXTURES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "dots1",
    "granitemoe",
    "granitemoeshared",
    "gpt_oss",
    *LATENT,
)
OWN = [pytest.param(name, marks=pytest.mark.proof if name in LOADED + MIXTURES + OP_BY_OP else ()) for name in FAMILIES]


@pytest.mark.slow
@pytest.mark.parametrize("family", LOADED + OP_BY_OP)
def test_what_differs_as_it_is_loaded_gives_the_logits_and_tokens_of_transformers(
    checkpoints: dict[str, Path], family: str
) -> None:
    equals_transformers(checkpoints[family], "auto")


@pytest.mark.slow
def test_the_long_factors_of_phi_3_are_those_that_are_compared(checkpoints: dict[str, Path]) -> None:
    spec = load_spec(checkpoints["phi3"])
    assert (spec.rope.kind, spec.rope.original_context, spec.context_length) == ("longrope", 64, 2048)


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_give_the_logits_and_tokens_of_transformers(checkpoints: dict[str, Path], family: str) -> None:
    """Their choices are no near ties, in which rounding may decide otherwise than transformers' does."""
    equals_transformers(checkpoints[family], "auto")
    assert tied_tokens(checkpoints[family], random_ids(7, 150)) == set()


@pytest.mark.slow
def test_a_mixture_of_qwen2_may_have_no_biases(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = Qwen2MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, max_position_embeddings=2048, qkv_bias=False, initializer_range=0.1,
    )  # fmt: skip
    Qwen2MoeForCausalLM(config).save_pretrained(tmp_path)
    equals_transformers(tmp_path, "auto")


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("column", ["auto", "ref"])
def test_fp32_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: dict[str, Path], family: str, column: str
) -> None:
    equals_transformers(checkpoints[family], column)


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN)
def test_bf16_logits_stay_as_close_to_fp32_as_those_of_transformers(checkpoints: dict[str, Path], family: str) -> None:
    errors = bf16_errors(checkpoints[family], [random_ids(seed, 100) for seed in range(8, 14)])
    ours, theirs = errors.ours, errors.theirs
    if family in MIXTURES:  # where a near tie of experts falls the other way, a token's error is that of the wrong one
        assert float(ours.median()) < 1.25 * float(theirs.median())
        odd, odd_theirs = (int((rows > 6 * theirs.median()).sum()) for rows in (ours, theirs))
        assert odd <= odd_theirs + 0.1 * len(ours)
    else:
        assert float(ours.mean()) < 1.25 * float(theirs.mean())


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gpt_oss", *LATENT)])
def test_prefill_here_and_decode_there_give_the_log_probabilities_of_transformers_over_700_tokens(
    checkpoints: dict[str, Path], family: str
) -> None:
    """Two prompts in chunks, the second behind a cached prefix; of gpt-oss and latent attention in their own files."""
    check_handed_over_with_a_prefix(checkpoints[family])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        ("qwen3", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        ("gemma3_text", {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_a_rope_scaling_beside_rope_parameters_rotates_as_in_transformers(
    tmp_path: Path, family: str, scaling: dict[str, Any]
) -> None:
    path = make_checkpoint(tmp_path, family, layers=7, tokenizer=False)
    written = json.loads((path / "config.json").read_text())
    overridden = load_spec(path, overrides={"rope_scaling": scaling})
    (path / "config.json").write_text(json.dumps({**written, "rope_scaling": scaling}))
    assert load_spec(path) == overridden
    equals_transformers(path, "auto")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Gemma3", "Mistral3"])
def test_the_text_model_of_a_checkpoint_with_a_vision_model_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    import transformers

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    text = {**sizes, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512}
    seen = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen |= {"image_size": 28, "patch_size": 14}
    if kind == "Mistral3":
        text["model_type"], seen["model_type"] = "mistral", "pixtral"
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=seen)
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    whole.save_pretrained(tmp_path)
    prompt = random_ids(7, 90)
    direct, model = engine(tmp_path, torch.float32)
    seq = run_in_uneven_chunks(direct, prompt)
    with torch.no_grad():
        expected = whole(input_ids=torch.tensor([prompt + seq.output[:-1]])).logits[0, len(prompt) - 1 :]
    assert float((torch.cat(model.seen) - expected).abs().max()) < 1e-4
    assert seq.output == expected.argmax(-1).tolist()


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
