"""Token ids to text, piece by piece, UTF-8 safe.

Knows nothing of requests or engines. Two ways to the same pieces: byte-level vocabularies (Llama 3, Qwen, GPT-2) have a
byte string per token and need no look back; every other decoder (SentencePiece style) decodes a short tail window
with and without the new tokens and takes the difference.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_WAIT_MAX = 24
"""Tokens after which text that still ends in an incomplete character is printed as it is: no character is that long."""


class Vocabulary(Protocol):
    """What a detokenizer asks of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token of a byte-level vocabulary; empty for ids that print nothing."""

    def has(self, token_id: int) -> bool:
        """Whether there is such a token."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text of these tokens."""


class Detokenizer(Protocol):
    """Tokens in, text out; the pieces joined are the whole text."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens complete; an unfinished character is kept back."""

    def finish(self) -> str:
        """What was kept back, as replacement characters."""


def byte_of_char() -> dict[str, int]:
    """The byte each printable character of a byte-level vocabulary stands for (GPT-2's table, inverted).

    Printable Latin-1 stands for itself; the other 68 bytes follow from U+0100 on, in order.
    """
    table: dict[str, int] = {}
    moved = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            table[chr(byte)] = byte
        else:
            table[chr(0x100 + moved)] = byte
            moved += 1
    return table


class ByteDetokenizer:
    """For byte-level vocabularies: one table look-up and one incremental UTF-8 step per token (about 0.3 us)."""

    __slots__ = ("_skip", "_utf8", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, skip: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        token_bytes = self._vocabulary.token_bytes
        if len(token_ids) == 1:
            token_id = token_ids[0]
            return "" if token_id in self._skip else self._utf8.decode(token_bytes(token_id))
        skip = self._skip
        return self._utf8.decode(b"".join(token_bytes(token_id) for token_id in token_ids if token_id not in skip))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class WindowDetokenizer:
    """For every other decoder: decode a short tail with and without the new tokens.

    The tail begins with an anchor, the last token that prints whole characters of its own: SentencePiece-like decoders
    drop the space of the very first token they see, so no piece may begin a decode. `context` (the last tokens of the
    prompt) is the first anchor. Tokens that a decoder does not see are left out: there may be any number of them in a
    row. Cost: two or three decodes of a few tokens, about 10 us.
    """

    __slots__ = ("_anchor", "_decoded", "_ids", "_skip", "_vocabulary", "_waiting")

    def __init__(self, vocabulary: Vocabulary, skip: frozenset[int], *, context: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._skip = skip
        anchor = list(context)
        while (decoded := self._decode(anchor) if anchor else "").endswith(_REPLACEMENT):
            del anchor[0]  # it may begin within a character, which spoils those behind it
        self._anchor = anchor if decoded else []
        self._ids = list(self._anchor)
        self._decoded = decoded
        self._waiting = 0
        """Tokens since text was last printed."""

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._vocabulary.decode(token_ids, skip_special_tokens=bool(self._skip))

    def feed(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        pieces: list[str] = []
        for token_id in token_ids:
            if token_id in self._skip or not self._vocabulary.has(token_id):
                continue
            self._ids.append(token_id)
            self._waiting += 1
            text = self._decode(self._ids)
            if len(text) > len(self._decoded) and (self._waiting >= _WAIT_MAX or not text.endswith(_REPLACEMENT)):
                pieces.append(text[len(self._decoded) :])
                self._restart(token_id, text)
        return "".join(pieces)

    def _restart(self, token_id: int, text: str) -> None:
        """Begin the next window with the token just printed, where it prints alone; else with the anchor before it."""
        self._waiting = 0
        alone = self._decode([token_id])
        if alone and _REPLACEMENT not in alone:
            self._anchor = [token_id]
            self._ids, self._decoded = [token_id], alone
        elif self._anchor:
            self._ids, self._decoded = list(self._anchor), self._decode(self._anchor)
        else:
            self._decoded = text

    def finish(self) -> str:
        text = self._decode(self._ids) if self._ids else ""
        rest = text[len(self._decoded) :]
        self._decoded = text
        return rest
