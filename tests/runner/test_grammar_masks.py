"""Masks of a step: a function of grammar and tokens, whatever was asked for before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serinus.core.clock import WallClock
from serinus.core.errors import BadRequest
from serinus.core.grammar import Grammar
from serinus.core.plan import SampleSpec
from serinus.core.sampling import SamplingParams
from serinus.runner.grammar_masks import GrammarMasks, StepMasks
from serinus.testing.small_tokenizers import make_byte_tokenizer
from serinus.text import GrammarVocabulary, Tokenizer, load_tokenizer

EOS = 263
WIDTH = 280


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = make_byte_tokenizer(tmp_path_factory.mktemp("byte"))
    return load_tokenizer(str(path))


@pytest.fixture
def masks(tokenizer: Tokenizer) -> Iterator[GrammarMasks]:
    made = GrammarMasks(
        lambda: GrammarVocabulary(tokenizer, width=WIDTH, eos_ids=(EOS,)), WallClock(), width=WIDTH, kept=3
    )
    yield made
    made.close()


def spec(grammar: Grammar | None, output: str = "", *, stop_ids: tuple[int, ...] = (EOS,), **more: Any) -> SampleSpec:
    """A request whose answer is these bytes so far: ids below 256 are bytes."""
    ids = np.frombuffer(output.encode(), np.uint8).astype(np.int32)
    params = SamplingParams(grammar=grammar, **more)
    return SampleSpec(params=params, seed=1, position=9, generated=len(ids), stop_ids=stop_ids, output=ids)


def made(masks: GrammarMasks, specs: dict[str, SampleSpec]) -> StepMasks:
    begun = masks.begin(list(specs), list(specs.values()))
    assert begun is not None
    return begun.result()


def allowed(words: np.ndarray) -> str:  # type: ignore[type-arg]
    """The bytes that may come, `$` for the end of sequence; tokens of several bytes are left out."""
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return "".join("$" if token == EOS else chr(token) for token in ids if token < 256 or token == EOS)


DIGITS = Grammar("regex", r"[0-9]{2}(ab)?")


def test_the_end_of_sequence_is_allowed_where_the_answer_is_complete(masks: GrammarMasks) -> None:
    step = made(masks, {"a": spec(DIGITS), "free": spec(None), "b": spec(DIGITS, "4"), "c": spec(DIGITS, "42")})
    assert step.rows == [0, 2, 3]
    assert [allowed(words) for words in step.words_RW] == ["0123456789", "0123456789", "a$"]
    assert not masks.chosen("b", ord("7"))
    assert not step.last
    again = made(masks, {"c": spec(DIGITS, "42a")})
    assert allowed(again.words_RW[0]) == "b"
    assert masks.chosen("c", ord("b")), "nothing can follow"


def test_what_was_asked_before_changes_nothing(masks: GrammarMasks) -> None:
    grammar = Grammar.of("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}})
    text = '{"a": -12, "b": [true, "x"]}'
    fresh = [allowed(made(masks, {f"r{at}": spec(grammar, text[:at])}).words_RW[0]) for at in range(len(text) + 1)]
    for at in (3, 4, 5, 20, 2, 9, 10, 0, len(text) - 1, 7):
        assert allowed(made(masks, {"one": spec(grammar, text[:at])}).words_RW[0]) == fresh[at]
    other = spec(Grammar("regex", "[xy]"))
    assert allowed(made(masks, {"one": other}).words_RW[0]) == "xy", "another request may have the same name"
    assert len(masks._states) <= 3


def test_a_mask_allows_what_lies_behind_its_first_words_too(
    masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serinus.runner.grammar_masks._FIRST_WORDS", 1)  # 0 to 9, a and b are in later ones
    step = made(masks, {"a": spec(DIGITS), "b": spec(DIGITS, "42ab"), "c": spec(DIGITS, "42")})
    assert [allowed(words) for words in step.words_RW] == ["0123456789", "$", "a$"]
    assert step.last == {1}


def test_no_step_without_a_grammar_costs_a_mask(masks: GrammarMasks) -> None:
    assert masks.begin(["a"], [spec(None)]) is None


def test_only_the_rows_that_cannot_go_on_fail(masks: GrammarMasks) -> None:
    step = made(masks, {"bad": spec(Grammar("regex", "([")), "good": spec(DIGITS), "lost": spec(DIGITS, "x")})
    assert step.rows == [1]
    assert len(step.words_RW) == 1
    assert "unclosed character class" in step.failures[0]
    assert "token 120 at place 0" in step.failures[2]
    part = step.part(1, 3)
    assert (part.rows, list(part.failures)) == ([0], [1])


def test_a_grammar_that_the_library_gives_up_fails_its_row_alone(
    masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serinus.text.grammars._STATES_MAX", 20)
    wide = Grammar("regex", "(a|b)*a(a|b){12}c")
    step = made(masks, {"good": spec(DIGITS), "wide": spec(wide, "a"), "more": spec(DIGITS, "42")})
    assert "too many states: 20" in step.failures[1]
    assert (step.rows, [allowed(words) for words in step.words_RW]) == ([0, 2], ["0123456789", "a$"])


def test_stop_ids_of_a_request_end_it_only_where_the_answer_is_complete(masks: GrammarMasks) -> None:
    both = (EOS, ord("b"))
    step = made(masks, {"a": spec(DIGITS, "4", stop_ids=both), "b": spec(DIGITS, "42", stop_ids=both)})
    assert [allowed(words) for words in step.words_RW] == ["0123456789", "ab$"]
    ignoring = made(masks, {"c": spec(DIGITS, "42", stop_ids=())})
    assert allowed(ignoring.words_RW[0]) == "a"


def test_a_vocabulary_that_cannot_be_read_fails_requests_and_nothing_else() -> None:
    def broken() -> GrammarVocabulary:
        raise BadRequest("grammar", "here", "a tokenizer that can be read")

    masks = GrammarMasks(broken, WallClock(), width=WIDTH)
    step = made(masks, {"a": spec(DIGITS)})
    assert "a tokenizer that can be read" in step.failures[0]
    masks.close()
