"""Engines with parts and tiers against the model's own rules: whatever was evicted, loaded back or read from files,
answers are those of an engine that caches nothing."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from serinus.core.clock import ManualClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.errors import ConfigError, InvariantError
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.engine import LLM, build_engine
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_checkpoint, make_toy
from serinus.selftest import EngineDriver
from serinus.testing.builders import make_request
from serinus.testing.oracle import toy_continue
from tests.cells import diagonal, some

SHARED = [list(range(first, first + 41)) for first in (20, 70, 120)]
"""Prefixes that several prompts share."""
PROMPTS = [SHARED[turn // 2 % 3] + [200 + turn, 230 + turn] for turn in range(12)]
"""Each beginning twice, then the next: the device holds two of them."""
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=5, ignore_eos=True)
SMALL = {"skip_tokenizer_init": True, "page_size": 4, "max_total_tokens": 96, "max_running_requests": 2,
         "chunked_prefill_size": 16, "decode_log_interval": 0, "enable_sanity_check": True}  # fmt: skip
"""Two prompts fill the device: each beginning must leave before it comes again."""


def tiered(**settings: Any) -> dict[str, Any]:
    return {**SMALL, "enable_hierarchical_cache": True, "hicache_ratio": 4.0, **settings}


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """One prompt after the other, so that what the last one left is what the next one finds."""
    found = []
    for prompt in prompts:
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        found.append(list(output.outputs[0].token_ids))
    return found


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("toys")
    kinds: dict[str, dict[str, Any]] = {
        "full": {}, "mixed": {"window": 6, "layer_types": "SFS"}, "sliding": {"window": 9},
        "latent": {"latent": True},
    }  # fmt: skip
    return {name: make_toy(home / name, tokenizer=False, **kind) for name, kind in kinds.items()}


@pytest.mark.parametrize(
    ("kind", "policy"),
    diagonal(["full", "mixed", "sliding", "latent"], ["write_through", "write_through_selective", "write_back"]),
)
def test_answers_are_right_whatever_went_to_the_host_and_came_back(
    toys: dict[str, Path], kind: str, policy: str
) -> None:
    with LLM(str(toys[kind]), **tiered(hicache_write_policy=policy)) as llm:
        spec = load_spec(toys[kind])
        assert answers(llm, PROMPTS) == [toy_continue(spec, prompt, 5) for prompt in PROMPTS]
        stats = llm._built.cache.stats()
        assert stats.loaded_tokens > 0, stats
        llm._built.engine.scheduler.sanity_check()
        llm.flush_cache()
        for pool in llm._built.cache.stats().pools.values():
            assert pool.pages.free == pool.page_count, pool


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_an_idle_engine_checks_itself_once_after_it_worked_if_asked_to(toys: dict[str, Path], enabled: bool) -> None:
    names = {**tiered(enable_sanity_check=enabled), "model_path": str(toys["mixed"])}
    clock = ManualClock()
    built = build_engine(from_names(ServeConfig, names), clock)
    engine, cache = EngineDriver(built), built.cache

    def work(rid: str) -> None:
        engine.send(make_request(rid, PROMPTS[0], max_new_tokens=3))
        engine.turn()
        while not built.engine.idle:
            engine.turn()

    work("a")
    assert cache.stats().sanity_checks == 0  # not while there is work
    assert (cache.stats().sanity_steps > 0) is enabled
    for _ in range(3):
        assert engine.turn() == []
    assert cache.stats().sanity_checks == (1 if enabled else 0)
    work("b")
    leaf = [node for node in cache.tree.nodes() if node.parent is not None][-1]
    leaf.pins += 1  # a pin without a lease
    with pytest.raises(InvariantError) if enabled else nullcontext():
        engine.turn()
    built.close()


def test_a_second_engine_finds_what_the_first_one_stored(toys: dict[str, Path], tmp_path: Path) -> None:
    stored = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path),
              "hicache_storage_prefetch_policy": "wait_complete"}  # fmt: skip
    for kind, toy in toys.items():
        with LLM(str(toy), **tiered(**stored)) as first:
            answers(first, PROMPTS[:1])
        with LLM(str(toy), **tiered(**stored)) as second:
            (output,) = second.generate(PROMPTS[1], GREEDY, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == toy_continue(load_spec(toy), PROMPTS[1], 5), kind
        assert output.usage is not None
        assert dict(output.usage.cached_tokens) == {"storage": 40}, kind


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "write_back",
        pytest.param("write_through", marks=pytest.mark.proof),
        pytest.param("write_through_selective", marks=pytest.mark.proof),
    ],
)
@pytest.mark.parametrize("kind", some(["full", "mixed", "sliding", "latent"], "mixed", "latent"))
def test_prompts_on_tiny_pools_never_see_a_byte_of_another_prefix(
    toys: dict[str, Path], kind: str, policy: str, tmp_path: Path
) -> None:
    rng, spec, found = Rng(sum(f"{kind} {policy}".encode())), load_spec(toys[kind]), 0
    trunks = [[rng.randrange(20, 70) for _ in range(4 * rng.randrange(2, 9))] for _ in range(8)]
    tails = [[rng.randrange(20, 70) for _ in range(rng.randrange(1, 20))] for _ in range(12)]
    stored = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path),
              "hicache_storage_prefetch_policy": "wait_complete"}  # fmt: skip
    small = tiered(max_total_tokens=80, hicache_ratio=1.5, hicache_write_policy=policy)
    with LLM(str(toys[kind]), **{**small, **stored}) as llm:
        for _ in range(60 if policy == "write_back" else 150):  # what is copied at its second hit fills tiers slowly
            prompt = rng.choice(trunks) + rng.choice(tails)
            (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == toy_continue(spec, prompt, 5)
            assert output.usage is not None
            found += sum(output.usage.cached_tokens.values())
        stats = llm._built.cache.stats()
    assert found > 250
    assert stats.loaded_tokens > 0
    assert stats.prefetched_tokens > 0
    assert stats.evicted_pages > 0


def test_one_bit_of_other_weights_on_the_same_folder_finds_nothing(tmp_path: Path) -> None:
    """Also where names, sizes, headers, ends of files and most of what lies between are the same."""
    stored = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path / "kv"), "dtype": "float32",
              "hicache_storage_prefetch_policy": "wait_complete"}  # fmt: skip
    model = make_checkpoint(tmp_path / "model", "qwen3", seed=5)
    with LLM(str(model), **tiered(**stored)) as llm:
        answers(llm, PROMPTS[:2])
    (file,) = model.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        weight = opened.get_tensor("model.layers.0.self_attn.v_proj.weight")
    data = bytearray(file.read_bytes())
    at = data.index(weight.numpy().tobytes()) + weight.nbytes // 2
    data[at + 3 - at % 4] ^= 0x40  # the exponent of one number
    file.write_bytes(data)
    with LLM(str(model), **tiered()) as alone:
        right = answers(alone, PROMPTS[:2])
    with LLM(str(model), **tiered(**stored)) as llm:
        assert answers(llm, PROMPTS[:2]) == right
        assert llm._built.cache.stats().prefetched_tokens == 0
    with LLM(str(model), **tiered(**stored)) as llm:
        assert answers(llm, PROMPTS[:2]) == right
        assert llm._built.cache.stats().prefetched_tokens > 0, "the same weights twice"


def test_another_model_of_the_same_shape_finds_nothing_of_it(toys: dict[str, Path], tmp_path: Path) -> None:
    stored = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path / "kv"),
              "hicache_storage_prefetch_policy": "wait_complete"}  # fmt: skip
    with LLM(str(toys["full"]), **tiered(**stored)) as first:
        answers(first, PROMPTS[:1])
    other = make_toy(tmp_path / "other", tokenizer=False, seed=1)
    with LLM(str(other), **tiered(**stored)) as second:
        (output,) = second.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert output.usage is not None
    assert not output.usage.cached_tokens


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", pytest.param("mistral_swa", marks=pytest.mark.proof)])
def test_real_families_answer_alike_with_tiers_and_without_a_cache(family: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / family, family, layers=4, vocab=320, tokenizer=False)
    bare = {**SMALL, "disable_radix_cache": True, "dtype": "float32"}
    expected = answers(LLM(str(checkpoint), **bare), PROMPTS)
    stored = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path / "kv"), "dtype": "float32"}
    with LLM(str(checkpoint), **tiered(**stored)) as llm:
        assert answers(llm, PROMPTS) == expected
        assert llm._built.cache.stats().loaded_tokens > 0


def test_a_long_request_holds_the_pages_of_its_window(toys: dict[str, Path]) -> None:
    config = from_names(ServeConfig, {"model_path": str(toys["mixed"]), **SMALL, "max_total_tokens": 400})
    clock = ManualClock()
    built = build_engine(config, clock)
    engine = EngineDriver(built)
    engine.send(make_request("long", PROMPTS[0], max_new_tokens=200, ignore_eos=True))
    tokens: list[int] = []
    tokens += [token for delta in engine.turn() for token in delta.token_ids]
    while not built.engine.idle:
        tokens += [token for delta in engine.turn() for token in delta.token_ids]
        state = built.engine.scheduler._states.get("long")
        if state is not None and state.generated:
            assert state.windowed[0].count <= 3  # a window of 6 spans 3 pages of 4 at most
    assert tokens == toy_continue(built.spec, PROMPTS[0], 200)


def test_memory_is_split_by_the_ratio_and_a_window_always_fits(toys: dict[str, Path]) -> None:
    def tokens(kind: str, **settings: Any) -> dict[str, int]:
        config = from_names(ServeConfig, {"model_path": str(toys[kind]), **SMALL, **settings})
        pools = build_engine(config, ManualClock()).pools
        return {part.name: (pool.spec.page_count - 1) * pool.spec.page_size for part, pool in pools.items()}

    assert tokens("full") == {"FULL": 96}
    assert tokens("mixed", swa_full_tokens_ratio=0.5) == {"FULL": 96, "SWA": 48}
    assert tokens("sliding", swa_full_tokens_ratio=0.01) == {"FULL": 96, "SWA": 20}


def test_settings_of_tiers_without_tiers_are_refused() -> None:
    with pytest.raises(ConfigError, match="--enable-hierarchical-cache"):
        from_names(ServeConfig, {"model_path": "m", "hicache_ratio": 3.0})
    with pytest.raises(ConfigError, match="--hicache-storage-dir"):
        from_names(
            ServeConfig, {"model_path": "m", "enable_hierarchical_cache": True, "hicache_storage_backend": "file"}
        )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"disable_radix_cache": True}, "--enable-hierarchical-cache is set with --disable-radix-cache"),
        ({"hicache_storage_size": 5.0}, "--hicache-storage-size is 5.0 without --hicache-storage-backend"),
        ({"hicache_prefetch_s_max": 3.0}, "--hicache-prefetch-timeout is 3.0 without --hicache-storage-backend"),
        ({"hicache_storage_prefetch_policy": "best_effort"}, "--hicache-storage-prefetch-policy is 'best_effort'"),
        (
            {
                "hicache_storage_backend": "file",
                "hicache_storage_dir": "kv",
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_prefetch_s_max": 3.0,
            },
            "--hicache-prefetch-timeout is 3.0 without --hicache-storage-prefetch-policy timeout",
        ),
        ({"hicache_ratio": math.inf}, "--hicache-ratio is inf, expected at most"),
        ({"hicache_size": math.inf}, "--hicache-size is inf, expected at most"),
        ({"hicache_storage_size": math.inf}, "--hicache-storage-size is inf, expected at most"),
    ],
)
def test_settings_of_tiers_that_nothing_could_obey_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_names(ServeConfig, {"model_path": "m", "enable_hierarchical_cache": True, **settings})


def test_a_storage_folder_may_begin_at_home(
    toys: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    LLM(str(toys["full"]), **tiered(hicache_storage_backend="file", hicache_storage_dir="~/kv")).close()
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]


def test_an_engine_whose_copies_broke_is_closed_to_its_end(
    toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(toys["full"]), **tiered())
    tiers = llm._built.tiers
    assert tiers is not None
    answers(llm, PROMPTS[:1])

    def broken() -> Any:
        raise InvariantError("pool: the device of copies is lost")

    monkeypatch.setattr(tiers.mover, "poll", broken)
    with pytest.raises(InvariantError, match="is lost"):
        answers(llm, PROMPTS[1:6])
    llm.close()
    with pytest.raises(InvariantError, match="mover is closed"):
        tiers.mover.submit([])
