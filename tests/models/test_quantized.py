"""A quantized model is the model that its integers stand for: whatever the family, the mesh and the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError
from serinus.core.settings import MemorySettings, ModelSettings
from serinus.engine.build import build_engine
from serinus.engine.launch import ready_of
from serinus.engine.step_floor import read_bytes
from serinus.kernels import load
from serinus.models import load_model, load_spec
from serinus.models.quantized import quantize, rounded_to_fp8
from serinus.models.small_checkpoints import make_checkpoint, make_toy
from serinus.parallel import Mesh
from serinus.selftest import EnginePair
from serinus.testing.direct import DirectEngine
from serinus.testing.ranked import ranked_engine
from tests.models.parity import GREEDY, Recorder, random_ids

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "vocab": 511, "layers": 3},
    "gemma2": {"tied": True, "layers": 3},
    "phi3": {"layers": 2, "intermediate": 176},
    "granite": {"layers": 2, "tied": True},
}
"""Biases and an odd vocabulary; norms less 1 and a tied head; projections stored as one, put in another order;
multipliers."""
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"layers": 2},
    "granitemoe": {"layers": 2, "stacked": True},
    "gpt_oss": {"layers": 2, "intermediate": 96},
}
"""Experts one by one and a shared one; in stacks; in stacks the other way round, gate and up in turns, with biases."""
PROMPT = random_ids(33, 60)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantized")
    sizes = {**FAMILIES, **MIXTURES}
    return {name: make_checkpoint(root / name, name, tokenizer=False, **size) for name, size in sizes.items()}


def is_linear(name: str) -> bool:
    """Of attention, MLP or an expert that is stored by itself."""
    return name.endswith("proj.weight")


def quantized_twice(name: str, tensor: torch.Tensor, method: str, *, is_turned: bool) -> torch.Tensor:
    """What a tensor becomes, whether it is a linear, a stack of experts or neither; stacks are [in, out] if turned."""
    if is_linear(name):
        return by_hand(tensor, method)
    if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return tensor
    if is_turned:
        return torch.stack([by_hand(each.T, method).T.contiguous() for each in tensor])
    return torch.stack([by_hand(each, method) for each in tensor])


def dequantized(path: Path, folder: Path, method: str) -> Path:
    """The checkpoint with the linears that a quantized model would have, in fp32; the head is no longer tied."""
    folder.mkdir()
    is_turned = "GptOss" in (path / "config.json").read_text()
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        tensors[name] = quantized_twice(name, tensor, method, is_turned=is_turned)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    tensors["lm_head.weight"] = head.clone() if method == "fp8" else by_hand(head, "int8")
    save_file(tensors, folder / "model.safetensors")
    text = (path / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (folder / "config.json").write_text(text)
    return folder


def by_hand(weight: torch.Tensor, method: str) -> torch.Tensor:
    """Row by row and group by group."""
    if method == "fp8":
        return torch.stack([nearest_fp8(row.float()) for row in weight])
    out = torch.empty_like(weight, dtype=torch.float32)
    for o, row in enumerate(weight.float()):
        for begin in range(0, len(row), 128 if method == "int4" else len(row)):
            some = row[begin : begin + 128] if method == "int4" else row
            largest = some[some.abs().argmax()]
            scale = largest / -8 if method == "int4" else largest.abs() / 127
            low, high = (-8, 7) if method == "int4" else (-128, 127)
            out[o, begin : begin + len(some)] = (some / scale).round().clamp(low, high) * scale
    return out


def nearest_fp8(row: torch.Tensor) -> torch.Tensor:
    """Of all numbers of e4m3 (4 bits of exponent, 3 of mantissa, the last one is none) the nearest, of two the even."""
    sizes = [(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:-1]
    known = torch.tensor([sign * size for each in (sizes[::2], sizes[1::2]) for size in each for sign in (1, -1)])
    scale = row.abs().max() / 448
    return known[((row / scale).double()[:, None] - known).abs().argmin(1)] * scale


def engine(
    path: Path, quantization: str = "auto", dtype: torch.dtype = torch.float32, *, is_kept: bool = False
) -> tuple[DirectEngine, Recorder]:
    """`is_kept`: FP8 stays FP8, as on a GPU, and the reference multiplies with it."""
    kernels = load("cpu", "ref" if is_kept else "auto")
    spec = load_spec(path, quantization=quantization, device="cuda" if is_kept else "cpu")
    model = Recorder(load_model(spec, path, dtype, kernels))
    return DirectEngine(model, kernels, page_size=8, page_count=100), model


def logprobs(direct: DirectEngine, model: Recorder) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after a prompt in uneven chunks, and log-probabilities of the vocabulary at each of them."""
    seq = direct.start(PROMPT, GREEDY, tokens=30)
    for chunk in [1, 37, 1 << 30] + [1] * 20:
        direct.step([(seq, chunk)])
    return list(seq.output), torch.cat(model.seen).log_softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method"),
    [*product([*FAMILIES, *MIXTURES], ["int8", "int4"]), *product(["llama", "gemma2", "phi3"], ["fp8"])],
)
def test_a_model_quantized_at_load_gives_what_the_model_of_its_dequantized_weights_gives(
    checkpoints: dict[str, Path], tmp_path: Path, family: str, method: str
) -> None:
    found, ours = logprobs(*engine(checkpoints[family], method))
    expected, theirs = logprobs(*engine(dequantized(checkpoints[family], tmp_path / "plain", method)))
    assert found == expected
    assert float((ours - theirs).abs().max()) <= 1e-4
    _, plain = logprobs(*engine(checkpoints[family]))
    assert float((ours - plain)[0].abs().max()) > 1e-3, "nothing was quantized"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(pp=2)])
@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
def test_ranks_have_parts_of_the_same_quantized_weights(checkpoints: dict[str, Path], mesh: Mesh, method: str) -> None:
    for family in ("llama", "phi3", *MIXTURES):
        alone, _ = engine(checkpoints[family], method)
        direct, runner = ranked_engine(checkpoints[family], mesh, torch.float32, quantization=method)
        tokens = []
        for each in (alone, direct):
            seq = each.start(PROMPT, GREEDY, tokens=30)
            tokens.append(each.generate([seq], 20))
        runner.close()
        assert tokens[0] == tokens[1], family


@pytest.mark.slow
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_decode_by_whole_layers_gives_the_bits_of_the_ops_one_by_one(tmp_path: Path, method: str) -> None:
    sizes: dict[str, Any] = {"hidden": 128, "intermediate": 256, "heads": 4, "kv_heads": 2, "head_size": 64}
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False, dtype="bfloat16", layers=2, **sizes)
    spec, found = load_spec(path, quantization=method), []
    for whole in (True, False):
        kernels = load("cpu") if whole else replace(load("cpu"), decode_layers=None)
        model = Recorder(load_model(spec, path, torch.bfloat16, kernels))
        found.append(logprobs(DirectEngine(model, kernels, page_size=8, page_count=100), model))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_signature_log_floor_and_answers_tell_how_weights_are_quantized(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    path, signatures = checkpoints["llama"], set()
    for method in ("auto", "int8", "int4"):
        model = ModelSettings(model_path=str(path), quantization=method, dtype="float32", skip_tokenizer_init=True)
        memory = MemorySettings(max_total_tokens=512)
        config = ServeConfig(model=model, memory=memory)
        with caplog.at_level("INFO", logger="serinus"):
            built = build_engine(config, WallClock())
        info = ready_of(built, {}).info
        built.close()
        signatures.add(info["model_signature"])
        expected = "none" if method == "auto" else f"{method}: linears of {method[3:]} bits"
        assert str(info["quantization"]).startswith(expected)
    assert len(signatures) == 3
    assert sum("weights are quantized, int" in record.getMessage() for record in caplog.records) == 2
    plain, int8, int4 = (read_bytes(load_spec(path, quantization=each), 2) for each in ("auto", "int8", "int4"))
    assert int8 * 2 == plain
    assert 0.25 < int4 / plain < 0.45
    mixture = checkpoints["granitemoe"]
    plain, int8, int4 = (read_bytes(load_spec(mixture, quantization=each), 2, 4) for each in ("auto", "int8", "int4"))
    assert 0.5 <= int8 / plain < 0.55, "experts are of 8 bits, the router is not"
    assert int4 < 0.8 * int8


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: make_toy(path, tokenizer=False), "SerinusToyForCausalLM"),
        (lambda path: make_checkpoint(path, "llama", tokenizer=False), "GPTNeoX"),
    ],
)
def test_what_has_no_linears_of_ours_is_not_quantized(tmp_path: Path, make: Callable[[Path], Path], said: str) -> None:
    path = make(tmp_path)
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace("LlamaForCausalLM", "GPTNeoXForCausalLM"))
    with pytest.raises(ConfigError, match=f"quantization is 'int8' for {said}"):
        load_spec(path, quantization="int8")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2_moe"])
def test_fp8_that_is_kept_as_on_a_gpu_is_what_a_cpu_rounds_to(checkpoints: dict[str, Path], family: str) -> None:
    found, ours = logprobs(*engine(checkpoints[family], "fp8", is_kept=True))
    expected, theirs = logprobs(*engine(checkpoints[family], "fp8"))
    assert found == expected
    assert float((ours - theirs).abs().max()) <= 1e-4


def test_fp8_at_load_is_kept_on_cuda_floats_on_a_cpu_and_refused_elsewhere(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    spec = load_spec(checkpoints["llama"], quantization="fp8")
    assert spec.signed("x").signature != load_spec(checkpoints["llama"]).signed("x").signature
    with caplog.at_level("INFO", logger="serinus"):
        load_model(spec, checkpoints["llama"], torch.float32, load("cpu"))
    assert any(
        "a scale for each output as they are loaded, floats in memory" in each.message for each in caplog.records
    )
    there = load_spec(checkpoints["llama"], quantization="fp8", device="cuda:1")
    assert there.quantization is not None
    assert there.quantization.text == (
        "fp8: linears rounded to FP8 (e4m3) as they are loaded, with a scale for each output, head as it is"
    )
    assert there.signed("x").signature == spec.signed("x").signature, "a CPU and a GPU may hand over"
    plain, ours = (load_spec(checkpoints["llama"], quantization=each, device="cuda") for each in ("auto", "fp8"))
    assert 0.5 < read_bytes(ours, 2) / read_bytes(plain, 2) < 0.75, "the head has two bytes"
    with pytest.raises(ConfigError, match="'fp8' on xpu, expected cuda or a CPU"):
        load_spec(checkpoints["llama"], quantization="fp8", device="xpu:0")
    with pytest.raises(ValueError, match="E4M3, which no kernel of column cpu multiplies with"):
        load_model(there, checkpoints["llama"], torch.float32, load("cpu"))


def test_a_weight_of_zeros_is_quantized_to_zeros() -> None:
    for bits, group in ((8, 256), (4, 128)):
        assert not quantize(torch.zeros(3, 256), bits, group).dequantized().any()
    assert torch.equal(rounded_to_fp8(torch.zeros(3, 256)), torch.zeros(3, 256))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_prefill_here_and_decode_there_answer_as_one_engine(checkpoints: dict[str, Path], method: str) -> None:
    settings: dict[str, Any] = {"page_size": 8, "max_total_tokens": 512, "chunked_prefill_size": 32}
    both = EnginePair(checkpoints["llama"], quantization=method, dtype="float32", **settings)
    both.add("a", PROMPT, 16)
    both.run_until_idle()
    alone, _ = engine(checkpoints["llama"], method)
    assert list(both.tokens("a")) == alone.generate([alone.start(PROMPT, GREEDY, tokens=20)], 16)[0]
    usage = both.deltas["a"][-1].usage
    assert usage is not None
    assert (usage.prefill_engine, usage.handoff_tokens) == ("prefill-0", len(PROMPT))
    both.check()
