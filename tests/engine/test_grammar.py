"""Answers under a grammar, on whole engines: what disturbs a request does not change a token of it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from serinus import LLM, Grammar, SamplingParams
from serinus.core.clock import ManualClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.errors import BadRequest
from serinus.core.request import FinishReason
from serinus.engine import build_engine
from serinus.models.small_checkpoints import make_toy
from serinus.ranks.steps_ahead import StepsAhead
from serinus.selftest import EngineDriver, EnginePair
from serinus.text import load_tokenizer
from serinus.wire.messages import EngineCall
from tests.ranks.crew import crew

SMALL = {"page_size": 4, "max_total_tokens": 1024, "max_running_requests": 4, "chunked_prefill_size": 16,
         "decode_log_interval": 0}  # fmt: skip
ANSWER = Grammar.of(
    "json_schema",
    {
        "x-guidance": {"whitespace_flexible": False},
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 6, "maxLength": 12},
            "kinds": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
            "count": {"type": "integer", "minimum": 1000, "maximum": 9999},
        },
        "required": ["name", "kinds", "count"],
        "additionalProperties": False,
    },
)
PROMPT = list(range(10, 47))
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "grammar": ANSWER, "ignore_eos": False}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), vocab=640, context=512, layers=4, kv_heads=4)


@pytest.fixture(scope="module")
def llm(toy: Path) -> Iterator[LLM]:
    with LLM(str(toy), page_size=16, max_total_tokens=16384) as made:
        yield made


def driver(toy: Path, **settings: Any) -> EngineDriver:
    return EngineDriver(
        build_engine(from_names(ServeConfig, {"model_path": str(toy), **SMALL, **settings}), ManualClock())
    )


@pytest.fixture(scope="module")
def alone(toy: Path) -> list[int]:
    """The tokens of the answer that nothing disturbs, which is what the schema asks for."""
    engine = driver(toy)
    engine.add("one", PROMPT, 120, **SAMPLED)
    engine.run()
    tokens = engine.tokens("one")
    assert engine.finish("one") is FinishReason.STOP
    jsonschema.validate(json.loads(load_tokenizer(str(toy)).decode(tokens)), json.loads(ANSWER.text))
    engine.built.close()
    return tokens


def _scraped(engine: EngineDriver) -> dict[str, float]:
    """The first sample of each metric of our own, by its name, and those with a leg by name and leg."""
    found: dict[str, float] = {}
    scraped = engine.engine.calls.answer(EngineCall(call=1, what="metrics"), 0.0, 0).body.decode()
    for name, labels, value in re.findall(r"^serinus:(\w+)\{(.*)\} (\S+)$", scraped, re.MULTILINE):
        leg = re.search(r'leg="\w+"', labels)
        found.setdefault(f"{name} {leg[0]}" if leg else name, float(value))
    return found


def test_a_retracted_request_goes_on_where_its_grammar_was(toy: Path) -> None:
    long = {**SAMPLED, "grammar": Grammar("regex", "([a-f][0-9]){60}")}
    found = []
    for tokens in (176, 1024):
        engine = driver(toy, max_total_tokens=tokens)
        engine.add("old", PROMPT[:5], 200)
        engine.add("one", PROMPT[::-1], 130, **long)
        engine.run()
        usage = engine.deltas["one"][-1].usage
        assert usage is not None
        assert (usage.retractions > 0) == (tokens == 176)
        found.append(engine.tokens("one"))
        engine.built.close()
    assert found[0] == found[1]
    assert len(found[0]) > 100


@pytest.mark.parametrize("stream", [True, False])
def test_a_healed_request_goes_on_where_its_grammar_was(toy: Path, alone: list[int], stream: bool) -> None:
    more = {"kv_canary_stream": "confirmed"} if stream else {}
    engine = driver(toy, kv_canary="heal", kv_canary_coverage="rotating:4", **more)
    engine.add("one", PROMPT, 120, **SAMPLED)
    while "one" not in engine.engine.scheduler or engine.engine.scheduler._states["one"].generated < 9:
        engine.turn()
    engine.engine.scheduler.heals.heal("one", "told by the test", 0.0)
    engine.run()
    assert len(engine.engine.scheduler._states) == 0
    assert engine.tokens("one") == alone
    engine.built.close()


def test_the_first_token_of_a_prefill_engine_is_masked_too(toy: Path, alone: list[int]) -> None:
    both = EnginePair(toy, **SMALL)
    both.add("one", PROMPT, 120, **SAMPLED)
    both.add("choice", PROMPT[:15:-1], 9, grammar=Grammar.of("choice", ["1"]), temperature=1.0)
    both.run_until_idle()
    for rid, count in (("one", len(PROMPT)), ("choice", 21)):
        usage = both.deltas[rid][-1].usage
        assert usage is not None
        assert (usage.prefill_engine, usage.handoff_tokens) == ("prefill-0", count)
        assert both.deltas[rid][-1].finish is FinishReason.STOP
    assert both.tokens("one") == alone
    assert load_tokenizer(str(toy)).decode(both.tokens("choice")) == "1"
    assert len(both.tokens("choice")) == 1, "complete with the token that the prefill engine sampled"
    both.check()


@pytest.mark.parametrize("slices", [1, 2])
def test_passes_that_are_queued_before_the_token_they_follow_is_read_change_no_token(
    toy: Path, alone: list[int], monkeypatch: pytest.MonkeyPatch, slices: int
) -> None:
    """As on a GPU: the pass is computed meanwhile, and its tokens are chosen when the next plan brings what the grammar
    has taken. Beside it others come, end, and ask for penalties and log-probabilities."""
    monkeypatch.setattr(
        "serinus.engine.planning.overlaps", lambda parts: not parts.config.kernels.disable_overlap_schedule
    )
    found = []
    for waits in (True, False):
        with crew(toy, **SMALL, tp_size=slices, skip_tokenizer_init=False, disable_overlap_schedule=waits) as engine:
            engine.add("one", PROMPT, 120, **SAMPLED)
            engine.add("free", PROMPT[:5], 20, repetition_penalty=1.2)
            engine.add("asks", PROMPT[:7], 9, logprobs=2)
            engine.add("wrong", PROMPT[:9], 20, grammar=Grammar.of("json_schema", {"not": {}}))
            engine.run()
            runner = engine.line.body._runner
            assert isinstance(runner, StepsAhead)
            assert (runner.taken > 20) is not waits
            assert _scraped(engine)["grammar_mask_seconds_count"] >= len(alone), "each token has its mask"
            assert engine.tokens("one") == alone
            assert engine.finish("one") is FinishReason.STOP
            assert "#/not" in engine.deltas["wrong"][-1].error
            logprobs = [each for delta in engine.deltas["asks"] for each in delta.logprobs or ()]
            assert len(logprobs) == 9
            found.append((engine.tokens("free"), engine.tokens("asks"), logprobs))
    assert found[0] == found[1]


@pytest.mark.parametrize("mesh", [{"tp_size": 2}, {"pp_size": 2}])
def test_the_rank_that_samples_makes_the_masks(toy: Path, alone: list[int], mesh: dict[str, int]) -> None:
    with crew(toy, **SMALL, **mesh, skip_tokenizer_init=False) as engine:
        engine.add("one", PROMPT, 120, **SAMPLED)
        engine.add("free", PROMPT[:5], 20)
        engine.add("wrong", PROMPT[:9], 20, grammar=Grammar.of("json_schema", {"not": {}}))
        engine.run()
        assert engine.tokens("one") == alone
        assert len(engine.tokens("free")) == 20
        assert "#/not" in engine.deltas["wrong"][-1].error


def test_a_scrape_tells_what_masks_and_canary_took_and_how_much_each_leg_verified(toy: Path) -> None:
    engine = driver(toy, kv_canary="raise", kv_canary_sweep_interval=1)
    engine.add("one", PROMPT, 40, **SAMPLED)
    engine.run()
    engine.add("again", PROMPT, 4)
    engine.run()
    found = _scraped(engine)
    assert found["grammar_mask_seconds_count"] == found["grammar_wait_seconds_count"] > 10
    assert found["kv_canary_coverage_ratio"] == 1
    legs = ("head", "tail", "sweep", "end", "arrival")
    slots = {leg: found[f'kv_canary_checks_total leg="{leg}"'] for leg in legs}
    assert slots["arrival"] == 0, "nothing came from another engine"
    assert min(slots["head"], slots["tail"], slots["sweep"]) > 0, slots
    assert found["kv_canary_overhead_seconds_total"] >= 0  # the clock of these engines stands still
    engine.built.close()


def test_a_grammar_that_cannot_be_followed_fails_its_request_and_no_other(toy: Path, alone: list[int]) -> None:
    engine = driver(toy)
    engine.add("one", PROMPT, 120, **SAMPLED)
    engine.add("wrong", PROMPT[:15:-1], 20, grammar=Grammar.of("json_schema", {"not": {}}))
    engine.run()
    end = engine.deltas["wrong"][-1]
    assert (end.finish, end.error_status) == (FinishReason.ERROR, 400)
    assert "#/not" in end.error
    found = engine.built.cache.probe("", np.array(PROMPT[:15:-1], np.int32))
    assert found.device > 0, "the KV of its prompt is sound, and stays cached"
    assert engine.tokens("one") == alone
    engine.engine.scheduler.sanity_check()
    engine.built.close()


@pytest.mark.parametrize("without", [{"skip_tokenizer_init": True}, {"grammar_backend": "none"}])
def test_an_engine_without_a_tokenizer_or_grammars_says_so(toy: Path, without: dict[str, Any]) -> None:
    engine = driver(toy, **without)
    engine.add("one", PROMPT, 20, **SAMPLED)
    engine.add("free", PROMPT, 5)
    engine.run()
    assert "no tokenizer" in engine.deltas["one"][-1].error
    assert len(engine.tokens("free")) == 5
    engine.built.close()


# ---- the offline LLM -----------------------------------------------------------------------------------------------


def texts(llm: LLM, grammar: Grammar, **sampling: Any) -> list[str]:
    params = SamplingParams(**{"grammar": grammar, "max_tokens": 200, "seed": 5, **sampling})
    (output,) = llm.generate("hello", params, use_tqdm=False)
    assert {answer.finish_reason for answer in output.outputs} == {"stop"}
    return [answer.text for answer in output.outputs]


def test_a_choice_is_one_of_the_texts_and_each_of_n_draws_its_own(llm: LLM) -> None:
    words = ["red", "green", "blue"]
    found = texts(llm, Grammar.of("choice", words), n=16, temperature=2.0)
    assert set(found) <= set(words)
    assert len(set(found)) > 1


def test_parameters_keep_their_meaning_under_a_grammar(llm: LLM) -> None:
    assert llm.tokenizer is not None
    (token,) = llm.tokenizer.encode("b")
    grammar = Grammar("regex", "[abc]{8}")
    assert texts(llm, grammar, logit_bias={token: 100.0}, temperature=0) == ["b" * 8]
    assert "b" not in texts(llm, grammar, logit_bias={token: -100.0})[0]
    assert texts(llm, Grammar("regex", "a"), min_new_tokens=50, ignore_eos=True) == ["a"], "the grammar ends it"


def test_logprobs_are_of_the_masked_distribution(llm: LLM) -> None:
    params = SamplingParams(grammar=Grammar("regex", "[ab]"), logprobs=5, seed=1, max_tokens=3)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    place = output.outputs[0].logprobs[0]
    assert np.exp(place.top_logprobs[:2]).sum() == pytest.approx(1.0, abs=1e-5)
    assert place.logprob in place.top_logprobs[:2]


def test_a_wrong_grammar_is_refused_before_anything_starts(llm: LLM) -> None:
    schema = {"properties": {"a": {"properties": {"b": {"not": {}}}}}}
    with pytest.raises(BadRequest, match=r"#/properties/a/properties/b/not.*cannot be enforced: .not."):
        llm.generate("x", SamplingParams(grammar=Grammar.of("json_schema", schema)))


def a_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A random schema; every answer to it is short."""
    kind = rng.choice(
        ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "object", "array", "anyOf"]
    )
    if depth == 0 and kind in ("object", "array", "anyOf"):
        kind = "boolean"
    if kind == "string":
        low = rng.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(6)}
    if kind in ("integer", "number"):
        low = rng.randrange(-500, 500)
        return {"type": kind, "minimum": low, "maximum": low + rng.randrange(1, 300)}
    if kind == "enum":
        return {"enum": rng.sample(["a", 'b"', "ü", 5, -1.5, True, None, [1], {"k": "v"}], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["x y", 17, [1, "a"], {"b": None}])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^(yes|no)$", r"^\d{3}-\d{2}$"])}
    if kind == "anyOf":
        return {"anyOf": [a_schema(rng, depth - 1) for _ in range(2)]}
    if kind == "array":
        low = rng.randrange(3)
        return {"type": "array", "items": a_schema(rng, depth - 1), "minItems": low, "maxItems": low + rng.randrange(3)}
    if kind == "object":
        names = rng.sample(["a", "b c", "ß", "d/e", '"'], rng.randint(1, 4))
        return {
            "type": "object", "properties": {name: a_schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))), "additionalProperties": False,
        }  # fmt: skip
    return {"type": kind}


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.proof)])
def test_every_answer_under_a_random_schema_parses_and_validates(llm: LLM, count: int) -> None:
    rng = random.Random(20)
    schemas = [a_schema(rng) for _ in range(count)]
    params = [
        SamplingParams(
            grammar=Grammar.of("json_schema", {**schema, "x-guidance": {"whitespace_pattern": "[ \\n]{1,2}"}}),
            max_tokens=400, seed=rng.randrange(1 << 30), temperature=rng.choice([0.0, 0.7, 1.5]),
            top_p=rng.choice([0.8, 1.0]), top_k=rng.choice([-1, 20]), min_p=rng.choice([0.0, 0.05]),
            frequency_penalty=rng.choice([0.0, 0.5]),
        )
        for schema in schemas
    ]  # fmt: skip
    outputs = llm.generate([[1 + index % 600] for index in range(count)], params, use_tqdm=False)
    ended = [(s, o.outputs[0]) for s, o in zip(schemas, outputs, strict=True) if o.outputs[0].finish_reason == "stop"]
    assert len(ended) >= 0.95 * count
    for schema, answer in ended:
        jsonschema.validate(json.loads(answer.text), schema)
