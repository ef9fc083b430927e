"""An answer grows delta by delta and ends for the right reason."""

from __future__ import annotations

import pytest

from serinus.core.request import FinishReason
from serinus.core.sampling import SamplingParams
from serinus.text import OutputProcessor, Tokenizer


def test_text_and_ids_grow_together(tokenizer: Tokenizer) -> None:
    output = OutputProcessor(tokenizer, SamplingParams())
    assert output.feed(b"hi").text == "hi"
    piece = output.feed(b"\xf0\x9f", FinishReason.LENGTH)
    assert (piece.text, piece.finish, piece.token_count) == ("\ufffd", FinishReason.LENGTH, 2)
    assert output.text == "hi\ufffd"
    assert bytes(output.token_ids) == b"hi\xf0\x9f"
    assert (output.finish, output.matched) == (FinishReason.LENGTH, None)


def test_a_stop_text_across_tokens_ends_the_answer_and_is_not_shown(tokenizer: Tokenizer) -> None:
    output = OutputProcessor(tokenizer, SamplingParams(stop=("END",)))
    assert [output.feed([byte]).text for byte in b"abEN"] == ["a", "b", "", ""]
    piece = output.feed(b"Dxyz")
    assert (piece.text, piece.finish, piece.token_count, piece.stopped_here) == ("", FinishReason.STOP, 1, True)
    assert (output.text, output.matched, bytes(output.token_ids)) == ("ab", "END", b"abEND")


def test_a_stop_text_is_shown_when_asked_for(tokenizer: Tokenizer) -> None:
    output = OutputProcessor(tokenizer, SamplingParams(stop=("END",), include_stop=True))
    assert output.feed(b"abENDx").text == "abEND"


def test_what_only_looked_like_a_stop_text_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    output = OutputProcessor(tokenizer, SamplingParams(stop=("END",)))
    assert output.feed(b"abEN", FinishReason.LENGTH).text == "abEN"
    assert (output.finish, output.matched) == (FinishReason.LENGTH, None)


def test_a_stop_text_made_by_the_last_token_wins_over_the_length(tokenizer: Tokenizer) -> None:
    output = OutputProcessor(tokenizer, SamplingParams(stop=("END",)))
    assert output.feed(b"abEND", FinishReason.LENGTH).finish is FinishReason.STOP
    assert output.matched == "END"


def test_no_stop_text_counts_before_the_least_number_of_tokens(tokenizer: Tokenizer) -> None:
    output = OutputProcessor(tokenizer, SamplingParams(stop=("a",), min_new_tokens=3))
    assert output.feed(b"aaa").text == "aaa"
    assert output.feed(b"ba").text == "b"
    assert output.matched == "a"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abz")])
def test_a_stop_token_is_kept_as_id_and_hidden_as_text(tokenizer: Tokenizer, include: bool, text: str) -> None:
    output = OutputProcessor(tokenizer, SamplingParams(stop_token_ids=(122,), include_stop=include))
    piece = output.feed(b"abz", FinishReason.STOP, 122)
    assert (piece.text, output.text, output.matched) == (text, text, 122)
    assert bytes(output.token_ids) == b"abz"


def test_a_hidden_stop_token_completes_no_stop_text(tokenizer: Tokenizer) -> None:
    output = OutputProcessor(tokenizer, SamplingParams(stop=("bz",), stop_token_ids=(122,)))
    assert output.feed(b"abz", FinishReason.STOP, 122).text == "ab"
    assert output.matched == 122


def test_without_a_tokenizer_only_ids_are_kept() -> None:
    output = OutputProcessor(None, SamplingParams())
    output.feed([5, 6])
    output.feed([7], FinishReason.STOP, 7)
    assert (output.text, output.token_ids, output.matched) == ("", [5, 6, 7], 7)
    with pytest.raises(AssertionError, match="need a tokenizer"):
        OutputProcessor(None, SamplingParams(stop=("x",)))


def test_tokens_after_the_end_are_a_broken_promise(tokenizer: Tokenizer) -> None:
    output = OutputProcessor(tokenizer, SamplingParams())
    output.feed([65], FinishReason.LENGTH)
    with pytest.raises(AssertionError, match="after the end"):
        output.feed([66])
