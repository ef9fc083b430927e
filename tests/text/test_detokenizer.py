"""Tokens become text piece by piece, and the pieces are the text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serinus.text import Detokenizer, StopTexts, Tokenizer, load_tokenizer
from serinus.text.detokenizer import WindowDetokenizer

BYTE_VOCAB = 267
PIECE_VOCAB = 272


@pytest.fixture(scope="module")
def byte_tokenizer(byte_folder: Path) -> Tokenizer:
    return load_tokenizer(str(byte_folder))


@pytest.fixture(scope="module")
def piece_tokenizer(piece_folder: Path) -> Tokenizer:
    return load_tokenizer(str(piece_folder))


def pieces(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """Feed `ids` cut at `cuts`, then finish."""
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    parts = [detokenizer.feed(ids[low:high]) for low, high in pairwise(edges)]
    return [*parts, detokenizer.finish()]


def test_a_byte_vocabulary_needs_no_look_back(byte_tokenizer: Tokenizer, piece_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.byte_level
    assert not piece_tokenizer.byte_level


@pytest.mark.slow
@settings(max_examples=300)
@given(
    ids=st.lists(st.integers(0, BYTE_VOCAB - 1), max_size=40),
    cuts=st.lists(st.integers(0, 100), max_size=8),
    skip=st.booleans(),
)
def test_the_pieces_of_any_byte_level_tokens_are_their_whole_text(
    byte_tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    got = pieces(byte_tokenizer.detokenizer(skip_special_tokens=skip), ids, cuts)
    assert "".join(got) == byte_tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.slow
@settings(max_examples=200)
@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 100), max_size=8))
def test_the_pieces_of_any_encoded_text_are_that_text(byte_tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = byte_tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(byte_tokenizer.detokenizer(skip_special_tokens=False), ids, cuts)) == text


@pytest.mark.slow
@settings(max_examples=300)
@given(text=st.text(alphabet="theab !日本é🙂", min_size=1, max_size=30), cuts=st.lists(st.integers(0, 100), max_size=8))
def test_a_window_detokenizer_gives_the_text_of_sentence_pieces(
    piece_tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = piece_tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(piece_tokenizer.detokenizer(), ids, cuts)) == piece_tokenizer.decode(ids)


@pytest.mark.slow
@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, PIECE_VOCAB - 1), max_size=60), prompt=st.lists(st.integers(0, 271), max_size=8))
def test_a_window_detokenizer_takes_any_tokens_and_never_shows_half_a_character(
    piece_tokenizer: Tokenizer, ids: list[int], prompt: list[int]
) -> None:
    detokenizer = piece_tokenizer.detokenizer(prompt=prompt)
    shown = [detokenizer.feed([token_id]) for token_id in ids]
    rest = detokenizer.finish()
    whole = piece_tokenizer.decode(ids)
    assert "".join([*shown, rest]).replace("\ufffd", "").strip() or not whole.replace("\ufffd", "").strip()


def test_a_character_of_four_tokens_appears_whole_or_not_at_all(byte_tokenizer: Tokenizer) -> None:
    detokenizer = byte_tokenizer.detokenizer()
    assert [detokenizer.feed([byte]) for byte in "🙂".encode()] == ["", "", "", "🙂"]
    assert detokenizer.feed("é".encode()[:1]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_the_first_word_keeps_its_space_after_a_prompt(piece_tokenizer: Tokenizer) -> None:
    the = piece_tokenizer.encode("the", add_special_tokens=False)
    assert piece_tokenizer.detokenizer(prompt=the).feed(the) == " the"
    assert piece_tokenizer.detokenizer().feed(the) == "the"


@pytest.mark.parametrize("end", ["😀", "a😀", "日😀😀", "👩‍👩‍👧"])
def test_the_first_word_keeps_its_space_after_characters_without_tokens(piece_tokenizer: Tokenizer, end: str) -> None:
    the = piece_tokenizer.encode("the", add_special_tokens=False)
    assert piece_tokenizer.detokenizer(prompt=piece_tokenizer.encode(end)).feed(the) == " the"


def test_special_tokens_between_words_lose_no_space(piece_tokenizer: Tokenizer) -> None:
    the = piece_tokenizer.encode("the", add_special_tokens=False)
    detokenizer = piece_tokenizer.detokenizer()
    assert [detokenizer.feed(the), *(detokenizer.feed([2]) for _ in range(40)), detokenizer.feed(the)] == [
        "the",
        *[""] * 40,
        " the",
    ]


class CountedVocabulary:
    """A tokenizer's, with the tokens that were decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.has, self.token_bytes = tokenizer.has, tokenizer.token_bytes
        self.decoded = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("token_id", [2, 10_000, 3 + 0xF0])
def test_however_many_tokens_print_nothing_each_costs_the_same(piece_tokenizer: Tokenizer, token_id: int) -> None:
    the = piece_tokenizer.encode("the", add_special_tokens=False)
    counted = CountedVocabulary(piece_tokenizer)
    detokenizer = WindowDetokenizer(counted, piece_tokenizer.special_ids, context=the)
    for _ in range(1000):
        detokenizer.feed([token_id])
    assert counted.decoded < 1000 * 50


def test_a_prompt_that_ends_in_half_a_character_does_not_swallow_the_answer(piece_tokenizer: Tokenizer) -> None:
    first, second = (3 + byte for byte in "é".encode())
    detokenizer = piece_tokenizer.detokenizer(prompt=[first])
    assert detokenizer.feed([second, 259]) + detokenizer.finish() != ""


@pytest.mark.slow
@settings(max_examples=300)
@given(
    text=st.text(alphabet="ab", max_size=30) | st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=9), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 100), max_size=8),
    include=st.booleans(),
)
def test_a_stop_text_is_found_wherever_the_pieces_are_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected, matched = text, None
    if ends:
        matched = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        expected = text[: ends[0]] if include else text[: ends[0] - len(matched)]
    finder = StopTexts(stops, include=include)
    shown = ""
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for low, high in pairwise(edges):
        shown += finder.feed(text[low:high])
        assert expected.startswith(shown), "a piece of a stop text was shown"
        if finder.matched is not None:
            break
    else:
        shown += finder.finish()
    assert (shown, finder.matched) == (expected, matched)


def test_what_may_become_a_stop_text_is_held_back() -> None:
    finder = StopTexts(["###", "\n\n"])
    assert [finder.feed(piece) for piece in ("a#", "#b", "\n", "c#")] == ["a", "##b", "", "\nc"]
    assert finder.finish() == "#"


@pytest.mark.parametrize("text", ["a" * 1022 + "x", "ab" * 600, "x" * 3000, ("a" * 200 + "b") * 6])
def test_a_character_costs_a_few_steps_for_each_stop_text(text: str) -> None:
    stops = [("a" * 1023 + chr(0x100 + i), "ab" * 511 + "a" + chr(0x100 + i))[i % 2] for i in range(16)]
    finder, lines = StopTexts(stops), 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        shown = "".join(map(finder.feed, text))
    finally:
        sys.settrace(before)
    assert shown + finder.finish() == text
    assert lines < 16 * 20 * len(text)
