"""What the files of sentence-transformers say of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serinus.core.errors import ConfigError
from serinus.text import EmbeddingUse, load_embedding_use

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
LAST = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True,
        "include_prompt": True}  # fmt: skip


def said(folder: Path, modules: Any, pooling: Any = None) -> EmbeddingUse:
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return load_embedding_use(str(folder), None)


def test_the_state_of_the_last_token_is_the_embedding(tmp_path: Path) -> None:
    assert said(tmp_path, [TRANSFORMER, POOLING, NORMALIZE], LAST) == EmbeddingUse(normalized=True)


@pytest.mark.parametrize(
    ("pooling", "meant"),
    [
        ({**LAST, "pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"embedding_dimension": 8, "pooling_mode": "mean"}, "mean"),
        ({"embedding_dimension": 8, "pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_so_are_the_mean_and_the_state_of_the_first_token(tmp_path: Path, pooling: Any, meant: str) -> None:
    assert said(tmp_path, [TRANSFORMER, POOLING], pooling) == EmbeddingUse(pooling=meant)


def test_without_that_module_its_length_stays(tmp_path: Path) -> None:
    assert said(tmp_path, [TRANSFORMER, POOLING], LAST) == EmbeddingUse()


def test_a_checkpoint_without_modules_embeds_none(tmp_path: Path) -> None:
    assert "embeds none" in load_embedding_use(str(tmp_path), None).refused


@pytest.mark.parametrize(
    ("modules", "pooling", "reason"),
    [
        ([TRANSFORMER, POOLING], {**LAST, "pooling_mode_lasttoken": False, "pooling_mode_max_tokens": True},
         "this one has max_tokens"),
        ([TRANSFORMER, POOLING], {"pooling_mode": "weightedmean"}, "this one has weightedmean"),
        ([TRANSFORMER, POOLING], {**LAST, "pooling_mode_mean_tokens": True}, "has mean_tokens, lasttoken"),
        ([TRANSFORMER], None, "has none that is known"),
        ([TRANSFORMER, POOLING, {"path": "2_Dense", "type": "models.Dense"}], LAST, "module Dense"),
    ],
)  # fmt: skip
def test_other_ways_are_refused_by_name(tmp_path: Path, modules: Any, pooling: Any, reason: str) -> None:
    assert reason in said(tmp_path, modules, pooling).refused


def test_a_file_that_is_no_list_of_modules_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"modules\.json holds dict, expected a list of objects"):
        said(tmp_path, {})
