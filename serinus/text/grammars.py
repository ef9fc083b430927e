"""Grammars over the vocabulary of one checkpoint: which tokens may come next. The only user of `llguidance`.

A state is a pure function of a grammar and the tokens that followed: it is made again from them wherever it is wanted.
Knows no requests. Torch-free; the library is imported when the first vocabulary is read.
"""

from __future__ import annotations

import json
import math
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import BadRequest, RequestError
from serinus.core.grammar import GRAMMAR_NAMES, Grammar
from serinus.text.grammar_source import library_source
from serinus.text.refusal_words import refusal_words
from serinus.text.schema_words import where_in
from serinus.text.tokenizer import Tokenizer

_COMPILED_MAX = 64
"""Grammars that are kept compiled; the one that was wanted least lately goes."""
_REASON_CHARS = 300
_SYMBOLS_MAX = 200_000
"""Symbols of a grammar at most, which takes the library well below a second; its other limits of the work for one mask
are as it has them."""
_ITEMS_MAX = 20_000
"""Rules that may be under way at one place of a text: a choice is one, an optional property up to four."""
_STATES_MAX = 50_000
"""States that the texts of one grammar may reach at most: 1 or 2 KB each."""
_MULTIPLES = re.compile(r'"multipleOf"\s*:\s*(-?[\d.]+)')
_ESCAPED = re.compile(r"\\u00([4-7][0-9a-fA-F])")
_DIGITS_MAX = 20
"""Of a number, by which its states are reckoned; the library refuses longer ones."""
_PROBE = 'Probe {"a b": [1, -2.5], "c": true}'


class GrammarFailed(RequestError):
    """The library gave a grammar up while an answer followed it: it needs too much work, or no token can follow."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"grammar: {reason}")


class GrammarCompiler:
    """Says of grammars whether they can be enforced: it compiles them as GrammarVocabulary does, with the same limits,
    but knows only bytes and special tokens, so it has no masks. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, *, width: int, eos_ids: Sequence[int] = ()) -> None:
        """`width`: of a mask, the ids of the model; `eos_ids`: its end-of-sequence tokens.

        Raises BadRequest: the tokenizer cannot be used. Cost: 0.6 us an id, with the GIL; 10 MB.
        """
        self.width = width
        """Ids of the model; those that the tokenizer lacks are never allowed."""
        ends = [each for each in (*eos_ids, *sorted(tokenizer.special_ids)) if each < min(width, tokenizer.vocab_size)]
        if not ends:
            raise _unreadable("it has no end-of-sequence token")
        self.end_id = ends[0]
        """The id by which a mask says that the answer is complete."""
        self.special_ids = tokenizer.special_texts
        """Text of each special token, and its id."""
        try:
            self._library = self._read(tokenizer)
        except Exception as error:  # the library raises what its own parts raise
            raise _unreadable(str(error)[:_REASON_CHARS]) from error
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()

    def _read(self, tokenizer: Tokenizer) -> Any:
        """The tokenizer as the library has it."""
        import llguidance

        named = {
            token_id: text.encode()
            for text, token_id in tokenizer.added_texts.items()
            if text and token_id < self.width and (text in self.special_ids or (text[0], text[-1]) == ("<", ">"))
        }  # these the library takes for special
        described = cast(Any, _Bytes(named, self.width, self.end_id))
        return llguidance.LLTokenizer(described, n_vocab=self.width, eos_token=self.end_id, slices=[])

    def _library_of(self, grammar: Grammar) -> Any:
        """The tokenizer that a grammar is compiled with."""
        return self._library

    def knows(self, grammar: Grammar) -> bool:
        """Whether it is compiled."""
        with self._lock:
            return grammar in self._compiled

    def compile(self, grammar: Grammar) -> Any:
        """The library's matcher before the first token, to be copied. Raises BadRequest, by the name `grammar`: it
        cannot be compiled; the message says where it is wrong.

        Cost: a millisecond the first time for most grammars, below a second for the largest; without the GIL. Nothing
        where it is known.
        """
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
        if known is None:
            known = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = known
                while len(self._compiled) > _COMPILED_MAX:
                    self._compiled.popitem(last=False)
        return known

    def _compile(self, grammar: Grammar) -> Any:
        import llguidance

        source = library_source(grammar, self.special_ids)
        if (states := _states_of_multiples(source)) > _STATES_MAX:
            raise _wrong(grammar, f"numbers for 'multipleOf' that take {_STATES_MAX} states at most, these {states}")
        try:
            limits = llguidance.LLParserLimits(
                max_grammar_size=_SYMBOLS_MAX, max_lexer_states=_STATES_MAX, max_items_in_row=_ITEMS_MAX,
                verbose_errors=False,
            )  # fmt: skip
            matcher = llguidance.LLMatcher(self._library_of(grammar), source, log_level=0, limits=limits)
            first = matcher.deep_copy()
            if not first.is_error() and not first.compute_ff_bytes():
                first.compute_bitmask()  # fails where no text fits, as of a schema that refers to itself alone
            wrong = first.get_error() if first.is_error() else ""
        except Exception as error:  # as above
            raise _wrong(grammar, str(error)) from error
        if wrong:
            raise _wrong(grammar, wrong)
        return matcher


class _Bytes:
    """A tokenizer, as the library wants one, of special tokens and, at other ids, single bytes."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, named: Mapping[int, bytes], width: int, end_id: int) -> None:
        self.eos_token_id = end_id
        self.special_token_ids = sorted(named)
        plain = (bytes([byte]) for byte in range(256))
        self.tokens = [named[at] if at in named else next(plain, b"") for at in range(width)]

    def __call__(self, text: str) -> list[int]:
        return []


class _Spelled:
    """A tokenizer, as the library wants one, that has the tokens of one and makes them of a text as another does."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, known: Any, plain: Any, end_id: int) -> None:
        self.eos_token_id = end_id
        self.special_token_ids = [at for at in range(known.vocab_size) if known.is_special_token(at)]
        self.tokens = [known.decode_bytes([at]) for at in range(known.vocab_size)]
        self._plain = plain

    def __call__(self, text: str) -> list[int]:
        return list(self._plain.tokenize_str(text))


class GrammarVocabulary(GrammarCompiler):
    """The vocabulary as grammars see it, and the grammars that were compiled for it.

    Cost: about 0.6 s for 150,000 tokens, most of it with the GIL; 180 MB. Three times that once a grammar with the text
    of a special token has come.
    """

    def _read(self, tokenizer: Tokenizer) -> Any:
        import llguidance

        library = llguidance.LLTokenizer(tokenizer.described, n_vocab=self.width, eos_token=self.end_id)
        read_back = library.decode_str(tokenizer.encode(_PROBE, add_special_tokens=False))
        if read_back.strip() != _PROBE:
            raise ValueError(f"it writes {read_back!r} for {_PROBE!r}")
        added = tokenizer.added_texts.items()
        self._named = [text for text, at in added if text and at < self.width and library.is_special_token(at)]
        self._tokenizer = tokenizer
        return library

    def _library_of(self, grammar: Grammar) -> Any:
        written = grammar.text.replace("\\", "")
        return self._spelling if any(text in written for text in self._named) else self._library

    @cached_property
    def _spelling(self) -> Any:
        """The same, but no text is an added token: where a grammar leaves no choice the library makes tokens of the
        text, and gives up where one is special, which it takes for no text. Of a tokenizer that is none without its
        added tokens the same. Cost: that of two more."""
        import llguidance

        described = json.dumps({**json.loads(self._tokenizer.described), "added_tokens": []})
        try:
            plain = llguidance.LLTokenizer(described, eos_token=0, slices=[])
        except ValueError:
            return self._library
        spelled = cast(Any, _Spelled(self._library, plain, self.end_id))
        return llguidance.LLTokenizer(spelled, n_vocab=self.width, eos_token=self.end_id)

    def begin(self, grammar: Grammar) -> GrammarState:
        """The state before the first token. Raises what `compile` does. Cost: some 10 us where the grammar is known."""
        return GrammarState(self.compile(grammar).deep_copy())

    def allow(self, states: Sequence[GrammarState], words_RW: NDArray[np.int32]) -> list[bool | GrammarFailed]:
        """Write the tokens that may come next, a row for each state, one bit each, bit 0 of word 0 first; no
        end-of-sequence token is among them. Returns of each state whether the answer may end there, or that the library
        gave it up.

        Args: words_RW: contiguous, rows of (width + 31) // 32 words.
        Cost: about 10 us a row at 150,000 tokens, most of it without the GIL; up to some milliseconds where a state of
        a grammar is reached for the first time. Row by row: the library's executor has to wake a thread of its own,
        and beside a busy step its masks come after 4 ms in place of 0.3.
        """
        verdicts: list[bool | GrammarFailed] = []
        address, row_bytes = words_RW.ctypes.data, words_RW.strides[0]
        for at, state in enumerate(states):
            try:
                verdicts.append(state.allow(address + at * row_bytes, row_bytes))
            except GrammarFailed as error:
                verdicts.append(error)
        words_RW.view(np.uint32)[:, self.end_id >> 5] &= np.uint32(~(1 << (self.end_id & 31)) & 0xFFFFFFFF)
        return verdicts


class GrammarState:
    """Where an answer stands in its grammar. Used by one thread at a time."""

    __slots__ = ("_matcher", "tokens")

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.tokens = array("i")
        """The tokens that led here, int32."""

    def follow(self, token_ids: Sequence[int]) -> None:
        """These tokens come next. Raises GrammarFailed: the grammar has no such continuation. Cost: 3 us a token."""
        try:
            for token_id in token_ids:
                if not self._matcher.consume_token(token_id):
                    raise self._failed(f"token {token_id} at place {len(self.tokens)} is none that it allows")
                self.tokens.append(token_id)
        except GrammarFailed:
            raise
        except Exception as error:  # the library raises what its own parts raise
            raise GrammarFailed(str(error)[:_REASON_CHARS]) from error

    def allow(self, address: int, size: int) -> bool:
        """Write the mask there, `size` bytes, as the library has it: its end-of-sequence token may be in it. Returns
        whether the answer may end here. Raises GrammarFailed: the library gave up."""
        try:
            self._matcher.unsafe_compute_mask_ptr(address, size)
            failed = self._matcher.is_error()
            accepting = not failed and bool(self._matcher.is_accepting())
        except Exception as error:  # as above
            raise GrammarFailed(str(error)[:_REASON_CHARS]) from error
        if failed:
            raise self._failed("the library gave it up")
        return accepting

    @property
    def complete(self) -> bool:
        """Whether the answer is complete, and nothing can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _failed(self, what: str) -> GrammarFailed:
        said = self._matcher.get_error().strip().splitlines()
        return GrammarFailed(f"{what}{f' ({said[0][:_REASON_CHARS]})' if said else ''}")


def _states_of_multiples(source: str) -> int:
    """States that the multiples in a grammar take where all hold for one number: the library makes them as it compiles,
    30 us each, and none of its limits counts them. Zeros at the end of a number take none."""
    read = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), source)  # a key may be written with escapes
    numbers = (found.replace(".", "").strip("-0")[:_DIGITS_MAX] for found in _MULTIPLES.findall(read))
    return math.lcm(*(int(digits or 1) for digits in numbers))


def _unreadable(reason: str) -> BadRequest:
    return BadRequest("grammar", "a grammar", f"nothing: this tokenizer cannot be used with grammars ({reason})")


def _wrong(grammar: Grammar, said: str) -> BadRequest:
    """The library's reason as the client reads it: where the grammar is wrong, and why."""
    reason = " ".join(line.strip() for line in said.strip().splitlines() if line.strip())[:_REASON_CHARS]
    place = where_in(grammar.text, reason) if grammar.kind == "json_schema" else ""
    words = refusal_words(said, own_rules=grammar.kind == "lark")
    expected = f"{GRAMMAR_NAMES[grammar.kind]} that can be enforced"
    return BadRequest("grammar", place or grammar.text, f"{expected}: {words[:_REASON_CHARS]}")
