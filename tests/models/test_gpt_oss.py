"""gpt-oss: MXFP4 weights, the same model through transformers, and what of it is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serinus.core.errors import ConfigError
from serinus.kernels import load
from serinus.models import load_model, load_spec
from serinus.models.mxfp4 import as_integers, dequantized
from serinus.models.small_checkpoints import make_checkpoint
from serinus.parallel import Mesh
from serinus.testing.direct import DirectEngine
from serinus.testing.ranked import ranked_engine
from tests.models.parity import (
    GREEDY,
    Recorder,
    check_handed_over_with_a_prefix,
    engine,
    random_ids,
    run_in_uneven_chunks,
)

pytestmark = pytest.mark.slow
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def set_fields(path: Path, **fields: Any) -> None:
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, **fields}))


def random_blocks(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of every byte, and scales about 1/16."""
    chance = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=chance)
    return blocks, torch.randint(121, 125, shape, dtype=torch.uint8, generator=chance)


def quantized_twins(folder: Path) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and one with what transformers makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"layers": 2, "head_size": 32, "intermediate": 96, "tokenizer": False}
    packed, plain = (make_checkpoint(folder / name, "gpt_oss", **sizes) for name in ("packed", "plain"))  # type: ignore[arg-type]
    state = load_file(plain / "model.safetensors")
    stacks = [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    quantized = {name: tensor for name, tensor in state.items() if name not in stacks}
    for i, name in enumerate(stacks):
        count, ins, outs = state[name].shape
        blocks, scales = random_blocks(i, count, outs, ins // 32)
        quantized[f"{name}_blocks"], quantized[f"{name}_scales"] = blocks, scales
        state[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(quantized, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(state, plain / "model.safetensors", metadata={"format": "pt"})
    set_fields(packed, quantization_config=MXFP4)
    return packed, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_values_are_those_of_transformers(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, _ = random_blocks(1, 3, 50, 4)
    scales = torch.randint(60, 190, (3, 50, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert torch.equal(dequantized(blocks, scales, dtype), expected)


def test_mxfp4_values_by_hand() -> None:
    """Byte 0x94 is 2 in its lower half and -0.5 in its upper one."""
    blocks = torch.full((1, 16), 0x94, dtype=torch.uint8)
    for scale, factor in ((127, 1.0), (130, 8.0), (0, 2.0**-127)):
        found = dequantized(blocks, torch.tensor([scale], dtype=torch.uint8), torch.float32)
        assert found.tolist() == [2.0 * factor, -0.5 * factor] * 16
        integers = as_integers(blocks[None], torch.tensor([[scale]], dtype=torch.uint8))
        assert (integers.bits, integers.e2m1) == (8, True)
        assert integers.dequantized().tolist() == [[2.0 * factor, -0.5 * factor] * 16]
    with pytest.raises(ConfigError, match="scale is 255"):
        dequantized(blocks, torch.tensor([255], dtype=torch.uint8), torch.float32)


def test_a_checkpoint_in_mxfp4_is_the_model_that_transformers_makes_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = []
    with caplog.at_level("INFO", "serinus.models"):
        for path in quantized_twins(tmp_path):
            direct, model = engine(path, torch.float32)
            run_in_uneven_chunks(direct, random_ids(7, 100))
            seen.append(torch.cat(model.seen))
    assert float((seen[0] - seen[1]).abs().max()) <= 1e-4
    said = [record.getMessage() for record in caplog.records if "mxfp4" in record.getMessage()]
    assert said == ["experts in mxfp4 are multiplied with in 4 bits"]


def test_where_kernels_have_no_product_of_integers_mxfp4_is_dequantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen, kernels = [], load("cpu")
    kernels = replace(kernels, columns={op: kernels.columns[op] for op in kernels.columns if op != "pack_experts"})
    with caplog.at_level("INFO", "serinus.models"):
        for path in quantized_twins(tmp_path):
            model = Recorder(load_model(load_spec(path), path, torch.float32, kernels))
            run_in_uneven_chunks(DirectEngine(model, kernels, page_size=8, page_count=100), random_ids(7, 100))
            seen.append(torch.cat(model.seen))
    assert torch.equal(*seen)
    said = [record.getMessage() for record in caplog.records if "mxfp4" in record.getMessage()]
    assert said == ["weights in mxfp4 are dequantized to torch.float32 as they are loaded"]


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(pp=2)])
def test_ranks_cut_mxfp4_within_a_block(tmp_path: Path, mesh: Mesh) -> None:
    """48 of 96 columns: one block and a half."""
    answers = []
    for path in quantized_twins(tmp_path):
        direct, runner = ranked_engine(path, mesh, torch.float32)
        answers.append(direct.generate([direct.start(random_ids(4, 30), GREEDY, tokens=24)], 20))
        runner.close()
    assert answers[0] == answers[1]


def test_transformers_own_code_gives_the_same_tokens_over_pages(tmp_path: Path) -> None:
    path, kernels = make_checkpoint(tmp_path, "gpt_oss", tokenizer=False), load("cpu")
    answers = []
    for impl in ("serinus", "transformers"):
        spec = load_spec(path, model_impl=impl)
        assert spec.through_transformers == (impl == "transformers")
        model = load_model(spec, path, torch.float32, kernels)
        direct = DirectEngine(model, kernels, page_size=8, page_count=20)
        answers.append(direct.generate([direct.start(random_ids(4, 60), GREEDY, tokens=16)], 12))
    assert answers[0] == answers[1]


def test_what_is_not_served_is_refused_by_field(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gpt_oss", tokenizer=False)
    for field, value, said in (
        ("swiglu_limit", 5.0, r"'swiglu_limit' is 5.0, expected 7.0"),
        ("swiglu_alpha", 1.0, r"'swiglu_alpha' is 1.0, expected 1.702"),
        ("quantization_config", {"quant_method": "awq"}, "awq.*expected none or quant_method mxfp4 for GptOss"),
        ("sliding_window", 0, "sliding_window"),
    ):
        before = (path / "config.json").read_text()
        set_fields(path, **{field: value})
        with pytest.raises(ConfigError, match=said):
            load_spec(path)
        (path / "config.json").write_text(before)
    set_fields(path, quantization_config=MXFP4)
    with pytest.raises(ConfigError, match=r"mxfp4.*expected none"):
        load_spec(path, model_impl="transformers")
    with pytest.raises(ConfigError, match=r"gate_up_proj_blocks.* is missing|gate_up_proj' is missing"):
        _without_experts(path)


def _without_experts(path: Path) -> None:
    state = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in state.items() if not name.endswith("gate_up_proj")}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    engine(path, torch.float32)


@pytest.mark.proof
def test_prefill_here_and_decode_there_give_the_log_probabilities_of_transformers_over_700_tokens(
    tmp_path: Path,
) -> None:
    """In chunks, with 400 tokens of a prefix that is cached, past the window and YaRN's first context, watched."""
    path = make_checkpoint(tmp_path, "gpt_oss", layers=4, head_size=32, intermediate=96, tokenizer=False, seed=3)
    check_handed_over_with_a_prefix(path)
