"""What `serinus doctor` says of the room for KV, of the extras and of the columns of kernels."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from serinus.cli.doctor import MachineCheck, checkpoint, extras, kernels
from serinus.core.config import ServeConfig, from_names
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_checkpoint, make_toy


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, two of which slide: 2 KV heads of 16, as bfloat16 or float32."""
    return make_toy(tmp_path_factory.mktemp("sliding"), window=6, layer_types="SFS")


def look(folder: Path, **settings: object) -> dict[str, MachineCheck]:
    names = {"model_path": str(folder), "page_size": 4, "max_total_tokens": 64, "swa_full_tokens_ratio": 0.5}
    return {finding.what: finding for finding in checkpoint(from_names(ServeConfig, {**names, **settings}))}


def seen(found: dict[str, MachineCheck], rows: Sequence[str]) -> list[str]:
    return [found[row].seen.split(",")[0] for row in rows]


@pytest.mark.slow
def test_the_room_for_kv_is_said_by_part_and_tier(sliding: Path) -> None:
    found = look(sliding, kv_canary="none", enable_hierarchical_cache=True, hicache_ratio=3.0)
    assert seen(found, ["KV full", "KV swa"]) == ["64 tokens", "32 tokens"]
    assert seen(found, ["host full", "host swa"]) == ["192 tokens", "96 tokens"]
    per_token = [float(found[row].seen.split("(")[1].split(" KB")[0]) for row in ("KV full", "KV swa")]
    assert per_token[1] == pytest.approx(2 * per_token[0], abs=0.15)  # two layers slide, one does not
    assert "window 6" in found["model"].seen
    assert "host tier" not in found
    assert " of bfloat16 on cpu" in found["KV full"].seen
    narrow = look(sliding, kv_canary="none", kv_cache_dtype="fp8")["KV full"].seen
    assert " of float8_e4m3fn on cpu" in narrow
    assert float(narrow.split("(")[1].split(" KB")[0]) == pytest.approx(per_token[0] / 2, abs=0.1)


def test_the_model_is_told_as_overrides_make_it(sliding: Path) -> None:
    assert "context 32" in look(sliding, json_model_override_args='{"max_position_embeddings": 32}')["model"].seen


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", "", "has no weight file"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"lm_head.weight": "a.safetensors"}}',
            "a.safetensors is missing",
        ),
        ("config.json", {"num_hidden_layers": 2}, "tensor 'model.layers.1.input_layernorm.weight' is missing"),
        ("config.json", {"vocab_size": 77}, "expected [77, "),
        ("config.json", {"tie_word_embeddings": False}, "tensor 'lm_head.weight' is missing"),
        ("generation_config.json", "{", "is no JSON"),
        ("generation_config.json", {"temperature": "hot"}, "temperature: got 'hot'"),
    ],
)
def test_a_checkpoint_that_no_engine_can_load_is_bad(
    tmp_path: Path, file: str, content: str | dict[str, object], said: str
) -> None:
    path = make_checkpoint(tmp_path, "qwen3", layers=1, tied=True) / file
    if isinstance(content, dict):
        content = json.dumps({**json.loads(path.read_text() if path.exists() else "{}"), **content})
    path.write_text(content) if content else path.unlink()
    found = look(tmp_path)
    assert found["checkpoint"].grade == "bad"
    assert said in found["checkpoint"].seen


def test_the_signature_of_dummy_weights_is_that_of_an_engine(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", layers=1, tokenizer=False)
    for seed in (5, 6):
        expected = load_spec(path, load_format="dummy", seed=seed).signature[:12]
        assert f"signature {expected}" in look(path, load_format="dummy", random_seed=seed)["model"].seen
    assert "signature" not in look(path)["model"].seen, "it is of the weights, which are not loaded here"


def test_tiers_that_are_off_are_said_to_be_off_and_storage_is_named(sliding: Path, tmp_path: Path) -> None:
    assert "off" in look(sliding)["host tier"].seen
    found = look(
        sliding,
        enable_hierarchical_cache=True,
        hicache_storage_backend="file",
        hicache_storage_dir=str(tmp_path / "kv"),
    )
    assert found["storage"].seen == f"{tmp_path}/kv, no bound"
    assert not (tmp_path / "kv").exists()  # looking makes nothing


def test_a_host_tier_that_does_not_fit_is_bad_and_what_fits_is_said(sliding: Path) -> None:
    found = look(sliding, enable_hierarchical_cache=True, hicache_size=1e6)
    assert found["checkpoint"].grade == "bad"
    assert "expected --hicache-size at most" in found["checkpoint"].seen
    assert "model" in found


def test_an_extra_that_is_missing_is_no_fault_and_says_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    found = {finding.what: finding for finding in extras()}
    assert "pip install -e '.[nixl]'" in found["extra nixl"].seen
    assert "libibverbs" in found["extra mooncake"].seen
    assert (found["extra nixl"].grade, found["extra mooncake"].grade) == ("-", "-")
    assert found["extra demo"].grade == "ok"
    assert "--ray" in found["extra ray"].seen, "it says what the extra is for"


@pytest.mark.slow
def test_the_column_of_every_kernel_is_named() -> None:
    found = {finding.what: finding for finding in kernels()}
    assert found["kernels on cpu"].seen.startswith("all ops on column cpu")
