"""KV in FP8: logits are those of transformers with a cache in FP8, in every kind of layer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from serinus.core.errors import ConfigError
from serinus.kernels import FP8_FORMATS, load
from serinus.models import choose_kv_dtype, load_model, load_spec
from serinus.testing.direct import DirectEngine

from .parity import Recorder, random_ids, run_in_uneven_chunks

E4M3, E5M2 = FP8_FORMATS


class RoundedCache(DynamicCache):
    """What it returns has been through FP8, as a cache in it would have it."""

    def __init__(self, config: Any, kind: torch.dtype) -> None:
        super().__init__(config=config)
        self._kind = kind

    def update(self, key_states: Any, value_states: Any, *others: Any, **more: Any) -> Any:
        largest = torch.finfo(self._kind).max
        rounded = [
            states.clamp(-largest, largest).to(self._kind).to(states.dtype) for states in (key_states, value_states)
        ]
        return super().update(*rounded, *others, **more)


def rounded_reference(path: Path, ids: list[int], kind: torch.dtype | None) -> torch.Tensor:
    """Logits of transformers in fp32, [T, V]; its cache is FP8, or None: as it is."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    given: dict[str, Any] = {"use_cache": kind is not None}
    if kind is not None:
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        given[name] = RoundedCache(model.config, kind)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids]), **given).logits[0]
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("column", ["ref", "cpu"])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_swa", "gemma2", "gpt_oss"])
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


def test_names_are_those_of_other_servers_and_latent_rows_are_refused(checkpoints: dict[str, Path]) -> None:
    spec = load_spec(checkpoints["llama"])
    names = ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
    assert [choose_kv_dtype(spec, name, torch.bfloat16) for name in names] == [torch.bfloat16, E4M3, E4M3, E5M2]
    latent = load_spec(checkpoints["deepseek_v3"])
    assert choose_kv_dtype(latent, "auto", torch.bfloat16) == torch.bfloat16
    with pytest.raises(ConfigError, match=r"'fp8' for DeepseekV3ForCausalLM, whose rows are latent \(MLA\)"):
        choose_kv_dtype(latent, "fp8", torch.bfloat16)
