"""SamplingParams: what is refused, and with which words."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from serinus.core.errors import BadSampling, RequestError
from serinus.core.grammar import Grammar
from serinus.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.01),
        ("min_p", 1.1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("seed", 1 << 63),
        ("seed", 1.0),
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("min_new_tokens", -1),
        ("n", 0),
        ("n", 129),
        ("logprobs", -1),
        ("logprobs", 65),
        ("prompt_logprobs", 65),
        ("pooling", "max"),
        ("pooling", ["mean"]),
        ("pooling", "mean"),  # of hidden states that are not asked for
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 0.0}),
        ("stop", ("",)),
        ("stop", (1,)),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {1: "x"}),
        ("logit_bias", [1]),
        ("logit_bias", dict.fromkeys(range((1 << 16) + 1), 1.0)),
        ("stop", 5),
        ("stop", b"x"),
        ("stop", ["x"] * 65),
        ("stop", "x" * 1025),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1] * 1025),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (True,)),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    with pytest.raises(BadSampling) as raised:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert raised.value.field == field
    assert "expected" in str(raised.value)
    assert isinstance(raised.value, RequestError)
    assert raised.value.status == 400


def test_the_minimum_may_not_exceed_the_maximum() -> None:
    with pytest.raises(BadSampling, match="min_new_tokens"):
        SamplingParams(max_new_tokens=3, min_new_tokens=4)
    assert SamplingParams(max_new_tokens=4, min_new_tokens=4).min_new_tokens == 4


def test_max_tokens_is_another_name_of_max_new_tokens() -> None:
    assert SamplingParams(max_tokens=7).max_new_tokens == 7
    with pytest.raises(BadSampling, match="max_new_tokens"):
        SamplingParams(max_tokens=0)


def test_zero_temperature_and_top_one_are_greedy() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(top_k=1).greedy
    assert not SamplingParams(top_k=2).greedy


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_each_penalty_is_noticed(name: str) -> None:
    assert SamplingParams(**{name: 1.5}).penalised  # type: ignore[arg-type]
    assert not SamplingParams().penalised


def test_one_stop_text_a_list_and_none_are_taken() -> None:
    assert SamplingParams(stop="ZaZ").stop == ("ZaZ",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    empty = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert empty == SamplingParams()
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]


def test_a_top_k_of_zero_keeps_all() -> None:
    assert SamplingParams(top_k=0) == SamplingParams(top_k=-1)


def test_a_grammar_is_a_kind_and_a_text_and_may_be_made_of_an_object() -> None:
    schema = {"type": "object", "properties": {"ü": {"type": "integer"}}}
    grammar = Grammar.of("json_schema", schema)
    assert json.loads(grammar.text) == schema
    assert SamplingParams(grammar=grammar).grammar == Grammar("json_schema", grammar.text)
    assert Grammar.of("choice", ["a", "b"]).text == '["a","b"]'
    assert Grammar("json_object").text == ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [("yaml", "x"), ("regex", ""), ("regex", 5), ("regex", "x" * ((1 << 18) + 1)), ("regex", "\ud800")],
)
def test_a_grammar_that_cannot_be_one_is_refused(kind: Any, text: Any) -> None:
    with pytest.raises(BadSampling, match="grammar"):
        Grammar(kind, text)


def test_parameters_take_a_grammar_and_nothing_like_it() -> None:
    with pytest.raises(BadSampling, match=r"serinus\.Grammar"):
        SamplingParams(grammar={"type": "object"})  # type: ignore[arg-type]
    with pytest.raises(BadSampling, match="what JSON can say"):
        Grammar.of("json_schema", {"a": object()})
