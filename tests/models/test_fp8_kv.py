"""KV in FP8: logits are those of transformers with a cache in FP8, in every kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from serinus.kernels import FP8_FORMATS, load
from serinus.models import choose_kv_dtype, load_model, load_spec, make_checkpoint
from serinus.testing.direct import DirectEngine
from tests.cells import diagonal
from tests.reference_cache import cache_argument

from .parity import Recorder, random_ids, run_in_uneven_chunks

E4M3, E5M2 = FP8_FORMATS
LATENT = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3")
"""transformers caches the two halves of a latent row in place of keys and values."""
Scales = Mapping[int, tuple[float, float]]
"""Of keys and values, by layer."""


class RoundedCache(DynamicCache):
    """What it returns has been through FP8, as a cache in it would have it."""

    def __init__(self, config: Any, kind: torch.dtype, scales: Scales) -> None:
        super().__init__(config=config)
        self._kind, self._scales = kind, scales

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *others: Any, **more: Any) -> Any:
        largest = torch.finfo(self._kind).max
        rounded = [
            (states / scale).clamp(-largest, largest).to(self._kind).to(states.dtype) * scale
            for states, scale in zip((key_states, value_states), self._scales.get(layer_idx, (1.0, 1.0)), strict=True)
        ]
        return super().update(*rounded, layer_idx, *others, **more)


def rounded_reference(
    path: Path, ids: list[int], kind: torch.dtype | None, scales: Scales = MappingProxyType({})
) -> torch.Tensor:
    """Logits of transformers in fp32, [T, V]; its cache is FP8, or None: as it is."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    given: dict[str, Any] = {"use_cache": kind is not None}
    if kind is not None:
        given[cache_argument(model)] = RoundedCache(model.config, kind, scales)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids]), **given).logits[0]
    return logits


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "column"), diagonal([E4M3, E5M2], ["cpu", "ref"]))
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_swa", "gemma2", "gpt_oss", *LATENT])
def test_logits_are_those_of_transformers_with_a_cache_in_fp8(
    checkpoints: dict[str, Path], family: str, kind: torch.dtype, column: str
) -> None:
    """A key that is on the edge between two numbers may go to the other one: so the mean, and far below what FP8
    itself changes."""
    path, kernels, prompt = checkpoints[family], load("cpu", column), random_ids(7, 150)
    model = Recorder(load_model(load_spec(path), path, torch.float32, kernels))
    direct = DirectEngine(model, kernels, page_size=8, page_count=160, kv_dtype=kind)
    seq = run_in_uneven_chunks(direct, prompt)
    rounded, plain = (
        rounded_reference(path, prompt + seq.output[:-1], each)[len(prompt) - 1 :] for each in (kind, None)
    )
    found = torch.cat(model.seen)
    error, fp8 = float((found - rounded).abs().mean()), float((plain - rounded).abs().mean())
    print(f"{family} {kind}: mean error {error:.1e}, FP8 itself {fp8:.1e}")
    assert error < 0.02 * fp8
    assert fp8 > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("column", ["ref", "cpu"])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "self_attn.{}_scale"),
        ("qwen3", "self_attn.{}_proj.output_scale"),
        ("deepseek_v2_lite", "self_attn.{}_scale"),
    ],
)
def test_keys_and_values_are_scaled_as_the_checkpoint_says(tmp_path: Path, family: str, name: str, column: str) -> None:
    """So small that the largest values are cut: a scale that is left out shows. That of keys is of the whole latent
    row."""
    path, prompt = make_checkpoint(tmp_path, family, layers=3, tokenizer=False), random_ids(7, 150)
    scales = {i: (0.004 + 0.001 * i, 0.002 + 0.001 * i) for i in range(3)}
    tensors = load_file(path / "model.safetensors")
    before, kernels = dict(tensors), load("cpu", column)
    for i, both in scales.items():
        for half, scale in zip("kv", both, strict=True):
            tensors[f"model.layers.{i}.{name.format(half)}"] = torch.tensor([scale] if half == "k" else scale)
    found = {}
    if family in LATENT:
        scales = {i: (key, key) for i, (key, _) in scales.items()}
    for kind in (E4M3, None):
        save_file(tensors, path / "model.safetensors")
        model = Recorder(load_model(load_spec(path), path, torch.float32, kernels))
        seq = run_in_uneven_chunks(DirectEngine(model, kernels, page_size=8, page_count=160, kv_dtype=kind), prompt)
        found[kind] = torch.cat(model.seen)
        save_file(before, path / "model.safetensors", metadata={"format": "pt"})
        expected = rounded_reference(path, prompt + seq.output[:-1], kind, scales)[len(prompt) - 1 :]
        unscaled = rounded_reference(path, prompt + seq.output[:-1], E4M3)[len(prompt) - 1 :]
        error, moved = (float((found[kind] - each).abs().mean()) for each in (expected, unscaled))
        print(f"{family} {kind}: mean error {error:.1e}, without scales {moved:.1e}")
        assert error < 0.02 * moved


def test_names_are_those_of_other_servers() -> None:
    names = ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
    assert [choose_kv_dtype(name, torch.bfloat16) for name in names] == [torch.bfloat16, E4M3, E4M3, E5M2]
