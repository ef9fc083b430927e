"""Models that have no family here: transformers computes them, over the pages of this engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from serinus.core.errors import ConfigError
from serinus.core.sampling import SamplingParams
from serinus.engine import LLM
from serinus.kernels import load
from serinus.models import load_model, load_spec
from serinus.models.small_checkpoints import make_checkpoint
from serinus.parallel import Mesh
from serinus.selftest import EnginePair
from serinus.testing.direct import DirectEngine
from tests.models.parity import GREEDY, engine, random_ids, reference, run_in_uneven_chunks

pytestmark = pytest.mark.slow
SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
         "num_attention_heads": 4, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
         "pad_token_id": 0}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "GPTNeoX": {},
    "Starcoder2": {"num_key_value_heads": 2, "sliding_window": 24},
    "GraniteSWA": {"num_key_value_heads": 2, "sliding_window": 24},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "Ministral3": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "Phimoe": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4096},
    "DiffLlama": {"num_key_value_heads": 2},
    "StableLm": {},
}
"""The last one's attention in transformers cannot be replaced, and layers of the one before attend twice."""
REFUSED = ("DiffLlama", "StableLm")
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A random checkpoint of transformers' own making, by the name of its classes."""
    import transformers

    def made(kind: str) -> Path:
        torch.manual_seed(3)
        config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind])
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
        path = tmp_path_factory.mktemp(kind)
        model.save_pretrained(path)
        return path

    return made


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in REFUSED])
def test_logits_and_greedy_tokens_are_those_of_transformers_alone(make: Make, kind: str) -> None:
    path, prompt = make(kind), random_ids(7, 150)
    direct, model = engine(path, torch.float32)
    seq = run_in_uneven_chunks(direct, prompt)
    expected = reference(path, prompt + seq.output[:-1], torch.float32)[len(prompt) - 1 :]
    assert load_spec(path).through_transformers
    assert float((torch.cat(model.seen) - expected).abs().max()) < 1e-4
    assert seq.output == expected.argmax(-1).tolist()


def test_a_family_of_this_package_gives_the_same_tokens_through_transformers(tmp_path: Path) -> None:
    path, kernels = make_checkpoint(tmp_path, "qwen3", tokenizer=False), load("cpu")
    answers = []
    for impl in ("serinus", "transformers"):
        model = load_model(load_spec(path, model_impl=impl), path, torch.float32, kernels)
        direct = DirectEngine(model, kernels, page_size=8, page_count=20)
        answers.append(direct.generate([direct.start(random_ids(4, 30), GREEDY, tokens=16)], 12))
    assert answers[0] == answers[1]


def test_it_is_cached_on_all_tiers_handed_over_and_watched(make: Make) -> None:
    path = make("Starcoder2")
    prompts = [[*range(20 + 50 * (turn // 2 % 3), 61 + 50 * (turn // 2 % 3)), 300 + turn] for turn in range(8)]
    both = EnginePair(
        path, max_total_tokens=128, enable_hierarchical_cache=True, hicache_ratio=4.0, kv_canary="raise",
        kv_canary_real_data="all", dtype="float32", page_size=4, chunked_prefill_size=16, skip_tokenizer_init=True,
    )  # fmt: skip
    for turn, prompt in enumerate(prompts):
        both.add(str(turn), prompt, 6)
        both.run_until_idle()
    for turn, prompt in enumerate(prompts):
        tokens, usage = both.tokens(str(turn)), both.deltas[str(turn)][-1].usage
        expected = reference(path, prompt + tokens[:-1], torch.float32)[len(prompt) - 1 :]
        assert tokens == expected.argmax(-1).tolist()
        assert usage is not None
        assert usage.prefill_engine == "prefill-0"
    assert any((both.deltas[str(turn)][-1].usage or usage).cached_tokens.get("host") for turn in range(8))
    both.check()


def test_dummy_weights_are_a_function_of_the_seed(make: Make) -> None:
    path = make("GPTNeoX")
    answers = []
    for seed in (1, 1, 2):
        with LLM(
            str(path), dtype="float32", max_total_tokens=256, skip_tokenizer_init=True, load_format="dummy",
            random_seed=seed,
        ) as llm:  # fmt: skip
            params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
            answers.append(llm.generate([random_ids(4, 30)], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1] != answers[2]


def test_the_setting_chooses_whose_code_computes_a_model(make: Make, tmp_path: Path) -> None:
    path, params = make_checkpoint(tmp_path, "qwen3", tokenizer=False), SamplingParams(temperature=0.0, max_tokens=6)
    settings: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 256, "skip_tokenizer_init": True}
    answers, ran = [], []
    for impl in ("auto", "transformers"):
        with LLM(str(path), model_impl=impl, **settings) as llm:
            answers.append(llm.generate([random_ids(4, 30)], params, use_tqdm=False)[0].outputs[0].token_ids)
            ran.append(llm.spec.through_transformers)
    assert answers[0] == answers[1]
    assert ran == [False, True]
    with pytest.raises(ConfigError, match="'Starcoder2ForCausalLM' is not known"):
        LLM(str(make("Starcoder2")), model_impl="serinus", **settings)


def test_a_rotation_that_depends_on_the_rest_of_a_step_is_refused(make: Make) -> None:
    path = make("Starcoder2")
    written = json.loads((path / "config.json").read_text())
    for layers in (False, True):
        for original in (64, 2048):
            rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": original, "rope_theta": 1e4}  # fmt: skip
            given = {"full_attention": rope} if layers else rope
            (path / "config.json").write_text(json.dumps({**written, "rope_parameters": given}))
            if original == 2048:
                assert load_spec(path).context_length == 2048
                continue
            with pytest.raises(ConfigError, match=r"Starcoder2.*'longrope'.* 64, expected at least max_position_embed"):
                load_spec(path)


def test_heads_of_another_size_in_some_layers_are_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.Gemma4TextConfig(**SIZES, head_dim=16, global_head_dim=32)
    config.architectures = ["Gemma4ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"Gemma4ForCausalLM.* head_dim or .* differs between layers, expected one"):
        load_spec(tmp_path)


@pytest.mark.parametrize(("kind", "masked", "told"), [("Phimoe", 24, None), ("Olmoe", None, 24)])
def test_a_window_that_is_masked_and_not_told_or_told_and_not_masked_is_refused(
    make: Make, kind: str, masked: int | None, told: int | None
) -> None:
    path = make(kind)
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, "sliding_window": 24}))
    direct, _ = engine(path, torch.float32)
    with pytest.raises(ConfigError, match=f"{kind}Attention.* masks a window of {masked} and tells its .* of {told}"):
        direct.generate([direct.start(random_ids(7, 9), GREEDY, tokens=2)], 1)


def test_layers_that_attend_more_than_once_are_refused(make: Make) -> None:
    direct, _ = engine(make("DiffLlama"), torch.float32)
    with pytest.raises(ConfigError, match=r"DiffLlamaForCausalLM cannot run over pages: .* \[0, 0, 1, 1, 2, 2\]"):
        direct.generate([direct.start(random_ids(7, 9), GREEDY, tokens=2)], 1)


def test_what_cannot_run_so_is_refused_by_name(make: Make) -> None:
    path = make("Starcoder2")
    with pytest.raises(ConfigError, match=r"tp_size is 2 and pp_size 1 for Starcoder2ForCausalLM.* expected 1 of both"):
        load_spec(path).shards(Mesh(tp=2))
    with pytest.raises(ConfigError, match=r"'Starcoder2ForCausalLM' is not known, expected one of"):
        load_spec(path, model_impl="serinus")
    with pytest.raises(ConfigError, match="json_model_override_args names rope_theta"):
        load_spec(path, overrides={"rope_theta": 1.0})
    with pytest.raises(ConfigError, match=r"StableLmForCausalLM.*cannot be replaced"):
        load_spec(make("StableLm"))
    written = json.loads((path / "config.json").read_text())
    kinds = ["linear_attention", "full_attention", "full_attention"]
    (path / "config.json").write_text(json.dumps({**written, "layer_types": kinds}))
    with pytest.raises(ConfigError, match=r"its state is no paged KV \(linear_attention\)"):
        load_spec(path)
    (path / "config.json").write_text(json.dumps(written))
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weight file"):
        engine(path, torch.float32)
