"""Checkpoints that others have quantized are read as what they stand for, and refused by name where they are not read.

The tests write them: integers are drawn, packed by loops of their own, and a second checkpoint has what they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serinus.core.errors import ConfigError
from serinus.kernels import QuantizedWeight, load
from serinus.models import load_model, load_spec
from serinus.models.config_fields import ConfigFields
from serinus.models.quantization import quant_spec
from serinus.models.quantized_files import QuantizedFiles
from serinus.models.small_checkpoints import make_checkpoint
from serinus.models.weights import SafetensorsSource
from serinus.parallel import Mesh
from serinus.testing.direct import DirectEngine
from serinus.testing.ranked import ranked_engine
from tests.models.parity import GREEDY
from tests.models.test_quantized import PROMPT, engine, is_linear, logprobs

GROUP = 32
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "layers": 2},
    "phi3": {"layers": 2, "intermediate": 96},
    "qwen2_moe": {"layers": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
}
Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a linear, by the ends of their names, and the weight that they stand for."""
Store = Callable[[tuple[int, int], torch.Generator], Stored]


def packed(numbers: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned integers as words of 32 bits along a dimension: place i of a word holds number order[i]."""
    count = 32 // bits
    rows = numbers if dim == 1 else numbers.T
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % count))
    words = torch.zeros(rows.shape[0], rows.shape[1] // count, dtype=torch.int64)
    for i, number in enumerate(order or range(count)):
        words += rows[:, number::count].long() << bits * i
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return (words if dim == 1 else words.T).contiguous()


def drawn(shape: tuple[int, int], bits: int, groups: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned integers [O, I], zero points and scales [O, G]; scales are exact in 16 bits."""
    values = torch.randint(0, 1 << bits, shape, generator=rng)
    zeros = torch.randint(1, 1 << bits, (shape[0], groups), generator=rng)
    scales = (torch.rand((shape[0], groups), generator=rng) * 0.03 + 0.01).half().float() / (1 << bits - 4)
    return values, zeros, scales


def meant(values: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """Element by element of groups of equal size."""
    each = -(-values.shape[1] // scales.shape[1])
    out = torch.empty(values.shape)
    for g in range(scales.shape[1]):
        some = slice(g * each, (g + 1) * each)
        out[:, some] = (values[:, some] - zeros[:, g : g + 1]).float() * scales[:, g : g + 1]
    return out


def compressed(bits: int, group: int, *, has_zeros: bool) -> Store:
    def store(shape: tuple[int, int], rng: torch.Generator) -> Stored:
        values, zeros, scales = drawn(shape, bits, shape[1] // group if group else 1, rng)
        if not has_zeros:
            zeros = torch.full_like(zeros, 1 << bits - 1)
        tensors = {
            "weight_packed": packed(values, bits, 1), "weight_scale": scales.half(),
            "weight_shape": torch.tensor(shape),
        }  # fmt: skip
        if has_zeros:
            tensors["weight_zero_point"] = packed(zeros, bits, 0)
        return tensors, meant(values, zeros, scales)

    return store


def awq(shape: tuple[int, int], rng: torch.Generator) -> Stored:
    values, zeros, scales = drawn(shape, 4, shape[1] // GROUP, rng)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": packed(values.T, 4, 1, order), "qzeros": packed(zeros.T, 4, 1, order),
        "scales": scales.T.contiguous().half(),
    }  # fmt: skip
    return tensors, meant(values, zeros, scales)


def gptq(bits: int, group: int, *, sym: bool, v2: bool = False) -> Store:
    def store(shape: tuple[int, int], rng: torch.Generator) -> Stored:
        values, zeros, scales = drawn(shape, bits, shape[1] // group if group else 1, rng)
        if sym:
            zeros = torch.full_like(zeros, 1 << bits - 1)
        tensors = {
            "qweight": packed(values, bits, 1).T.contiguous(), "scales": scales.T.contiguous().half(),
            "qzeros": packed((zeros if v2 else zeros - 1).T, bits, 1),
            "g_idx": (torch.arange(shape[1]) // (group or shape[1])).int(),
        }  # fmt: skip
        return tensors, meant(values, zeros, scales)

    return store


def fp8(blocks: Callable[[int, int], tuple[int, ...]], name: str) -> Store:
    """`blocks`: the shape of the scales of [O, I]."""

    def store(shape: tuple[int, int], rng: torch.Generator) -> Stored:
        values = torch.randn(shape, generator=rng).to(torch.float8_e4m3fn)
        scale = torch.rand(blocks(*shape), generator=rng) * 0.05 + 0.01
        grid = scale.reshape(scale.shape if scale.dim() == 2 else (-1, 1))
        tall = shape[0] if grid.numel() == 1 else 1 if len(grid) == shape[0] else 128
        wide = 128 if grid.shape[1] > 1 else shape[1]
        weight = torch.empty(shape)
        for o in range(shape[0]):
            for i in range(0, shape[1], wide):
                weight[o, i : i + wide] = values[o, i : i + wide].float() * grid[o // tall, i // wide]
        return {"weight": values, name: scale}, weight

    return store


def scheme(bits: int, group: int, *, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel",
        "group_size": group or None, "actorder": None, **more,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }  # fmt: skip


def gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, **more}


FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
CASES: dict[str, tuple[dict[str, Any], Store]] = {
    "w4a16": (scheme(4, GROUP), compressed(4, GROUP, has_zeros=False)),
    "w4a16 with zero points": (scheme(4, GROUP, symmetric=False), compressed(4, GROUP, has_zeros=True)),
    "w8a16": (scheme(8, 0), compressed(8, 0, has_zeros=False)),
    "awq": (AWQ, awq),
    "gptq": (gptq_config(4, GROUP, sym=True), gptq(4, GROUP, sym=True)),
    "gptq of 8 bits": (gptq_config(8, -1, sym=True), gptq(8, 0, sym=True)),
    "gptq with zero points": (
        gptq_config(4, GROUP, sym=False, checkpoint_format="gptq_v2"), gptq(4, GROUP, sym=False, v2=True),
    ),
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        fp8(lambda o, i: (-(-o // 128), -(-i // 128)), "weight_scale_inv"),
    ),
    "fp8 with one scale": (
        {"quant_method": "fp8", "activation_scheme": "static"}, fp8(lambda o, i: (), "weight_scale"),
    ),
    "fp8 with a scale of each output": (
        {
            "quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": FLOATS, "input_activations": FLOATS}},
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        },
        fp8(lambda o, i: (o, 1), "weight_scale"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("files")
    return {name: make_checkpoint(root / name, name, tokenizer=False, **size) for name, size in FAMILIES.items()}


def written(path: Path, folder: Path, case: str) -> tuple[Path, Path]:
    """The checkpoint with its linears quantized so, experts too, and one with what they stand for."""
    config, store = CASES[case]
    rng, quantized, plain = torch.Generator().manual_seed(len(case)), {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        quantized[name] = plain[name] = tensor.float()
        if is_linear(name) or ".experts." in name:
            del quantized[name]
            stored, weight = store((tensor.shape[0], tensor.shape[1]), rng)
            base = name.removesuffix("weight")
            quantized |= {f"{base}{kind}": each for kind, each in stored.items()}
            plain[name] = weight
            if "static" in str(config):
                quantized[f"{base}input_scale"] = torch.tensor(0.5)
            if "kv_cache_scheme" in config and name.endswith(("k_proj.weight", "v_proj.weight")):
                quantized[f"{base}output_scale"] = torch.tensor([0.02])
            if config["quant_method"] == "gptq" and f"{base}bias" not in load_file(path / "model.safetensors"):
                quantized[f"{base}bias"] = torch.zeros(len(weight))
    for part, tensors in (("quantized", quantized), ("plain", plain)):
        (folder / part).mkdir(parents=True)
        save_file({name: each.contiguous() for name, each in tensors.items()}, folder / part / "model.safetensors")
        (folder / part / "config.json").write_text((path / "config.json").read_text())
    set_config(folder / "quantized", config)
    return folder / "quantized", folder / "plain"


def set_config(path: Path, config: dict[str, Any]) -> None:
    values = json.loads((path / "config.json").read_text())
    values["quantization_config"] = config
    (path / "config.json").write_text(json.dumps(values))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_gives_the_logits_and_tokens_of_what_its_integers_stand_for(
    checkpoints: dict[str, Path], tmp_path: Path, case: str, family: str
) -> None:
    quantized, plain = written(checkpoints[family], tmp_path, case)
    found, ours = logprobs(*engine(quantized))
    expected, theirs = logprobs(*engine(plain))
    assert found == expected
    assert float((ours - theirs).abs().max()) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("fp8")])
def test_fp8_is_kept_where_kernels_multiply_with_it(
    checkpoints: dict[str, Path], tmp_path: Path, case: str, family: str
) -> None:
    quantized, plain = written(checkpoints[family], tmp_path, case)
    found, ours = logprobs(*engine(quantized, is_kept=True))
    expected, theirs = logprobs(*engine(plain))
    assert found == expected
    assert float((ours - theirs).abs().max()) <= 1e-4
    spec = load_spec(quantized, device="cuda")
    assert spec.signed("x").signature == load_spec(quantized).signed("x").signature
    assert spec.quantization is not None
    assert "linears in FP8 (e4m3)" in spec.quantization.text


def test_fp8_in_blocks_is_cut_for_ranks_and_dequantized_where_blocks_would_be_too_short(tmp_path: Path) -> None:
    config, store = CASES["fp8 in blocks"]
    tensors, whole = store((160, 320), torch.Generator().manual_seed(1))
    save_file({f"model.some.{kind}": each for kind, each in tensors.items()}, tmp_path / "model.safetensors")
    spec = quant_spec(ConfigFields({"quantization_config": config}, {}, tmp_path), "auto", "Llama", (), "cuda")
    assert spec is not None

    def taken(span: range | None, dim: int) -> Tensor | QuantizedWeight:
        files = QuantizedFiles(SafetensorsSource(tmp_path, torch.float32), spec)
        return files.linear("model.some", (160, 320), span, dim)

    for span, dim in ((None, 0), (range(40, 80), 0), (range(160, 320), 1), (range(128, 200), 1)):
        found = taken(span, dim)
        assert isinstance(found, QuantizedWeight)
        assert found.rounds_rows
        assert torch.equal(found.dequantized(), whole if span is None else whole.narrow(dim, span.start, len(span)))
    cut = taken(range(40, 320), 1)
    assert isinstance(cut, Tensor)
    assert torch.equal(cut, whole[:, 40:])
    tensors["weight"].view(torch.int8)[3, 3] = 127
    save_file({f"model.some.{kind}": each for kind, each in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model.some.weight has elements that are no numbers"):
        taken(None, 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["w4a16 with zero points", "awq", "gptq of 8 bits", "fp8 in blocks"])
def test_ranks_have_parts_of_a_quantized_checkpoint(checkpoints: dict[str, Path], tmp_path: Path, case: str) -> None:
    for family in ("llama", "phi3", "qwen2_moe"):
        quantized, plain = written(checkpoints[family], tmp_path / family, case)
        tokens = []
        meshes = [Mesh(tp=2), Mesh(pp=2)]
        if family == "qwen2_moe":
            meshes = [Mesh(pp=2), Mesh(tp=2, ep=2), Mesh(tp=2, pp=2, ep=2)]
        for mesh in meshes:
            direct, runner = ranked_engine(quantized, mesh, torch.float32)
            tokens.append(direct.generate([direct.start(PROMPT, GREEDY, tokens=30)], 20))
            runner.close()
        alone, _ = engine(plain)
        expected = alone.generate([alone.start(PROMPT, GREEDY, tokens=30)], 20)
        assert tokens == [expected] * len(meshes), family


def test_dummy_weights_of_a_quantized_checkpoint_are_quantized(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    quantized, _ = written(checkpoints["llama"], tmp_path, "awq")
    spec, kernels = load_spec(quantized, load_format="dummy"), load("cpu")
    model = load_model(spec, quantized, torch.float32, kernels, load_format="dummy")
    direct = DirectEngine(model, kernels, page_size=8, page_count=20)
    assert len(direct.generate([direct.start(PROMPT, GREEDY, tokens=30)], 4)[0]) == 4
    assert spec.quantization is not None
    assert spec.quantization.text == f"awq: linears of 4 bits, a scale for {GROUP} inputs, head as it is"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "bitsandbytes.*none or quant_method awq or gptq",
        ),
        (gptq_config(4, 128, desc_act=True), r"quantization_config.desc_act' is True, expected False"),
        (gptq_config(3, 128), r"quantization_config.bits' is 3, expected 4 or 8"),
        (gptq_config(4, 100), r"quantization_config.group_size' is 100, expected -1 or 'a multiple of 8'"),
        (gptq_config(4, 128, checkpoint_format="marlin"), r"checkpoint_format' is 'marlin'"),
        (gptq_config(4, 128, dynamic={"-:mlp": {}}), r"dynamic"),
        ({**AWQ, "version": "gemv"}, r"version' is 'gemv', expected 'gemm'"),
        ({**AWQ, "bits": 8}, r"bits' is 8, expected 4"),
        (scheme(4, GROUP, actorder="group"), r"actorder' is 'group'"),
        (scheme(4, GROUP, type="float"), r"type' is 'float', expected 'int'"),
        ({**scheme(4, GROUP), "format": "nvfp4-pack-quantized"}, r"format' is 'nvfp4-pack-quantized'"),
        ({**scheme(4, GROUP), "kv_cache_scheme": {"num_bits": 4}}, r"kv_cache_scheme.num_bits' is 4, expected 8"),
        ({**scheme(4, GROUP), "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, r"kv_cache_scheme.type' is 'int'"),
        ({**scheme(4, GROUP), "config_groups": {}}, r"config_groups"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt' is 'e5m2', expected 'e4m3'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    checkpoints: dict[str, Path], tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text((checkpoints["llama"] / "config.json").read_text())
    set_config(tmp_path, config)
    with pytest.raises(ConfigError, match=said):
        load_spec(tmp_path)


def test_damaged_and_reordered_integers_are_refused_by_tensor(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    quantized, _ = written(checkpoints["llama"], tmp_path, "gptq")
    with pytest.raises(ConfigError, match=r"expected auto: .* is quantized already"):
        load_spec(quantized, quantization="int8")
    intact = load_file(quantized / "model.safetensors")
    q_proj = "model.layers.0.self_attn.q_proj."
    for kind, change, said in (
        ("g_idx", lambda t: t.flip(0), r"q_proj.g_idx gives neighbouring inputs different groups \(act-order\)"),
        ("scales", lambda t: t[:-1].contiguous(), r"q_proj has .* expected"),
        ("qweight", lambda t: t.float(), r"packed integers of torch.float32, expected int32"),
        ("qzeros", None, r"q_proj has no tensor 'qzeros', expected it of gptq"),
        ("bias_of_others", lambda _: torch.ones(3), r"holds 1 tensors that its config.json has no place for"),
    ):
        tensors = dict(intact)
        if change is None:
            del tensors[q_proj + kind]
        elif kind in ("bias_of_others",):
            tensors["model.layers.0.mlp.up_proj.bias"] = change(tensors[q_proj + "scales"])
        else:
            tensors[q_proj + kind] = change(tensors[q_proj + kind])
        save_file(tensors, quantized / "model.safetensors")
        with pytest.raises(ConfigError, match=said):
            engine(quantized)
