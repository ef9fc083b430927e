"""KV in FP8 through an engine: caches, tiers, files and handoffs change no token; pools hold twice as many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serinus.core.config import ServeConfig, from_names
from serinus.core.parts import Part
from serinus.engine import LLM, kv_sizes
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_checkpoint, make_toy
from serinus.selftest import EnginePair
from serinus.testing.oracle import toy_continue
from tests.cells import diagonal

from .test_tiers import PROMPTS, SMALL, answers, tiered

KINDS = ("fp8_e4m3", "fp8_e5m2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "gemma2", layers=4, vocab=320, tokenizer=False)


@pytest.fixture(scope="module")
def models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The second one has latent rows."""
    root = tmp_path_factory.mktemp("latent")
    return {"gemma2": model, "deepseek_v3": make_checkpoint(root, "deepseek_v3", layers=3, vocab=320, tokenizer=False)}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), window=9, layer_types="SFS", tokenizer=False)


def stored(folder: Path, kind: str, **more: Any) -> dict[str, Any]:
    return tiered(
        hicache_storage_backend="file", hicache_storage_dir=str(folder), kv_cache_dtype=kind,
        hicache_storage_prefetch_policy="wait_complete", **more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    [
        # each of the three once; `make proof` has the rest
        ("gemma2", KINDS[0], "bfloat16"),
        ("deepseek_v3", KINDS[1], "float32"),
        pytest.param("gemma2", KINDS[1], "float32", marks=pytest.mark.proof),
        pytest.param("deepseek_v3", KINDS[0], "float32", marks=pytest.mark.proof),
        pytest.param("deepseek_v3", KINDS[1], "bfloat16", marks=pytest.mark.proof),
        pytest.param("gemma2", KINDS[0], "float32", marks=pytest.mark.proof),
        pytest.param("gemma2", KINDS[1], "bfloat16", marks=pytest.mark.proof),
        pytest.param("deepseek_v3", KINDS[0], "bfloat16", marks=pytest.mark.proof),
    ],
)
def test_answers_are_those_without_a_cache_whatever_went_to_host_and_files(
    models: dict[str, Path], tmp_path: Path, family: str, kind: str, dtype: str
) -> None:
    model = models[family]
    watched = {"dtype": dtype, "kv_canary": "raise", "kv_canary_real_data": "all"}
    with LLM(str(model), **SMALL, disable_radix_cache=True, dtype=dtype, kv_cache_dtype=kind) as bare:
        expected = answers(bare, PROMPTS)
    with LLM(str(model), **SMALL, disable_radix_cache=True, dtype=dtype) as wide:
        assert answers(wide, PROMPTS) != expected, "FP8 changes some token"
    with LLM(str(model), **stored(tmp_path, kind, **watched)) as llm:
        assert answers(llm, PROMPTS) == expected
        assert llm._built.cache.stats().loaded_tokens > 0
    with LLM(str(model), **stored(tmp_path, kind, **watched)) as again:
        assert answers(again, PROMPTS) == expected
        assert again._built.cache.stats().prefetched_tokens > 0


def test_a_folder_of_one_type_is_never_read_as_another(toy: Path, tmp_path: Path) -> None:
    found = {}
    for kind in ("auto", *KINDS, "fp8"):
        with LLM(str(toy), **stored(tmp_path, kind)) as llm:
            (tokens,) = answers(llm, PROMPTS[:1])
            found[kind] = llm._built.cache.stats().prefetched_tokens
        dtype = "bfloat16" if kind == "auto" else "float8_e4m3fn"
        assert tokens == toy_continue(load_spec(toy), PROMPTS[0], 5, dtype=dtype)
    assert found == {"auto": 0, "fp8_e4m3": 0, "fp8_e5m2": 0, "fp8": 40}


@pytest.mark.parametrize(("family", "kind"), diagonal(["gemma2", "deepseek_v3"], KINDS))
def test_a_prompt_computed_elsewhere_goes_on_as_if_computed_here(
    models: dict[str, Path], family: str, kind: str
) -> None:
    model = models[family]
    prompts = [list(range(1, 90)), [*range(1, 60), *range(100, 140)]]
    settings = {
        "skip_tokenizer_init": True, "dtype": "bfloat16", "kv_cache_dtype": kind, "max_total_tokens": 2048,
        "chunked_prefill_size": 32,
    }  # fmt: skip
    with LLM(str(model), **settings, disable_radix_cache=True) as alone:
        expected = answers(alone, prompts)
    both = EnginePair(model, **settings, kv_canary="raise", kv_canary_real_data="all")
    for rid, prompt in enumerate(prompts):
        both.add(str(rid), prompt, 5)
        both.run_until_idle()
        usage = both.deltas[str(rid)][-1].usage
        assert usage is not None
        assert (usage.prefill_engine, both.tokens(str(rid))) == ("prefill-0", expected[rid])
    assert sum(both.deltas["1"][-1].usage.cached_tokens.values()) == 48  # type: ignore[union-attr]
    both.check()
    both.close()


def test_engines_of_two_types_refuse_each_other_in_words(toy: Path, caplog: pytest.LogCaptureFixture) -> None:
    both = EnginePair(toy, decode_settings={"kv_cache_dtype": "fp8"}, page_size=4, max_total_tokens=256)
    both.add("a", list(range(1, 38)), 6)
    both.run_until_idle()
    usage = both.deltas["a"][-1].usage
    assert usage is not None
    assert usage.prefill_engine == ""
    assert both.tokens("a") == toy_continue(load_spec(toy), list(range(1, 38)), 6, dtype="float8_e4m3fn")
    assert "kv_dtype: 'bfloat16' here, 'float8_e4m3fn' there" in caplog.text + usage.local_reason
    both.close()


def test_the_same_memory_holds_twice_the_tokens(model: Path) -> None:
    config = from_names(ServeConfig, {"model_path": str(model), "dtype": "bfloat16", "max_total_tokens": 4096})
    wide, narrow = (
        kv_sizes(replace(config, memory=replace(config.memory, kv_cache_dtype=kind)), 0).pools[Part.FULL]
        for kind in ("auto", "fp8")
    )
    assert (wide.kv_bytes, wide.page_count) == (2 * narrow.kv_bytes, narrow.page_count)
    assert wide.stamp_bytes == narrow.stamp_bytes, "the canary's stamps are what they were"
