"""The table of docs/MODELS.md is what its script makes of the code, and it says what the code does."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from serinus.models.families import FAMILIES

from .commands import REPO

PAGE = REPO / "docs" / "MODELS.md"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The module of scripts/models_table.py."""
    spec = importlib.util.spec_from_file_location("models_table", REPO / "scripts" / "models_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(script: ModuleType) -> dict[str, dict[str, str]]:
    """Architecture -> column -> what stands there."""
    lines = [line.strip("|\n ").split(" | ") for line in script.table().splitlines()]
    return {line[0].strip("`"): dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def test_the_table_is_as_the_script_makes_it(script: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert script.page(text) == text, "docs/MODELS.md is stale: run python scripts/models_table.py"


def test_what_was_changed_by_hand_in_the_table_is_made_anew(script: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    odd = text.replace("| TP by KV heads, PP |", "| PP |", 1)
    assert odd != text
    assert script.page(odd) == text


def test_every_family_has_a_row(script: ModuleType) -> None:
    assert list(rows(script)) == sorted(FAMILIES)
    assert sorted(script.MODELS) == sorted(FAMILIES)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("LlamaForCausalLM", {"KV": "FULL", "at load": "int8, int4, fp8", "ranks": "TP by KV heads, PP"}),
        ("Gemma3ForCausalLM", {"KV": "FULL, SWA", "windows": "by pattern", "canary": "keys, values"}),
        ("GptOssForCausalLM", {"quantized files": "MXFP4", "ranks": "TP by KV heads, PP, EP"}),
        ("DeepseekV3ForCausalLM", {"KV": "LATENT", "ranks": "TP by query heads, PP, EP", "canary": "latent rows"}),
        ("MixtralForCausalLM", {"at load": "int8, int4, fp8; experts: int8, int4, fp8"}),
        ("Glm4ForCausalLM", {"quantized files": "AWQ, GPTQ, compressed-tensors, FP8", "windows": "-"}),
    ],
)
def test_a_row_says_what_the_code_does(script: ModuleType, name: str, said: dict[str, str]) -> None:
    row = rows(script)[name]
    assert {column: row[column] for column in said} == said
