"""Kernels compiled ahead: by processes that make the model with few layers, one at least of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.errors import ConfigError
from serinus.engine.compile_ahead import Compilers, few_layers, is_compiled
from serinus.engine.progress import counted
from serinus.models import load_spec, spec_of
from serinus.models.small_checkpoints import make_checkpoint


def config_of(path: Path, **names: object) -> ServeConfig:
    return from_names(ServeConfig, {"model_path": str(path), "device": "cpu", "skip_tokenizer_init": True, **names})


@pytest.mark.parametrize(
    ("family", "layers", "expected"),
    [("llama", 5, 2), ("gemma3_text", 8, 7), ("deepseek_v2", 4, 3), ("smollm3", 5, 5), ("llama", 1, 1)],
)
def test_few_layers_have_one_of_each_kind_before_the_last(
    tmp_path: Path, family: str, layers: int, expected: int
) -> None:
    path = make_checkpoint(tmp_path, family, layers=layers, tokenizer=False)
    config = few_layers(config_of(path))
    whole = load_spec(path, load_format="dummy")
    few = spec_of(config.model)
    assert few.layer_count == expected
    assert few.layer_parts == whole.layer_parts[:expected]
    assert set(few.layer_parts) == set(whole.layer_parts)
    assert (few.head_count, few.hidden_size, few.vocab_size) == (whole.head_count, whole.hidden_size, whole.vocab_size)
    assert config.model.load_format == "dummy"


@pytest.mark.slow
def test_processes_compile_what_a_start_runs_and_leave_a_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    path = make_checkpoint(tmp_path / "model", "qwen3", layers=3, tokenizer=False)
    config = config_of(path, max_running_requests=4)
    assert not is_compiled(config)
    with Compilers(config, WallClock()) as ahead:
        assert [sorted(share) for share in ahead.shares] == [[], [1, 2, 4]]
        assert ahead.wait(counted)
    assert is_compiled(config)
    assert not is_compiled(config_of(path, max_running_requests=8)), "other settings, other kernels"


@pytest.mark.slow
def test_a_process_that_fails_is_told_and_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    path = make_checkpoint(tmp_path / "model", "qwen3", layers=3, tokenizer=False)
    config = config_of(path, max_running_requests=4)
    with Compilers(config, WallClock()) as ahead:
        ahead._children[1].kill()
        assert not ahead.wait(counted)
    assert not is_compiled(config)


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    with pytest.raises(ConfigError, match="2 ranks, expected 1"):
        Compilers(config_of(path, tp_size=2), WallClock())
