"""What an answer looks like as it grows: token deltas in, pieces of text out, stop texts found.

One OutputProcessor per sequence; used by the HTTP front and by the offline LLM alike. Knows nothing of HTTP or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serinus.core.request import FinishReason
from serinus.core.sampling import SamplingParams
from serinus.text.detokenizer import Detokenizer
from serinus.text.stops import StopTexts
from serinus.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class TextPiece:
    """What one delta added to the answer. Not frozen for its cost alone: one a token; nothing changes one."""

    text: str
    """New text; may be empty while a character or a possible stop text is incomplete."""
    token_count: int
    """New tokens that count: those after a matched stop text do not."""
    finish: FinishReason | None
    """Set in the last piece."""
    stopped_here: bool
    """A stop text ended it: the engine still runs the request and must be told."""


class OutputProcessor:
    """Grows one answer. Without a tokenizer only ids are kept, and stop texts must not be asked for."""

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_min_new_tokens",
        "_parts",
        "_stops",
        "finish",
        "matched",
        "token_ids",
    )

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams, prompt: Sequence[int] = ()) -> None:
        """`prompt`: its token ids (the last few are looked at)."""
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens, prompt=prompt)
        assert tokenizer is not None or not sampling.stop, "text: stop texts need a tokenizer"
        self._stops = StopTexts(sampling.stop, include=sampling.include_stop) if sampling.stop else None
        self._include_stop = sampling.include_stop
        self._min_new_tokens = sampling.min_new_tokens
        self._parts: list[str] = []
        self.token_ids: list[int] = []
        """All tokens of the answer so far, the one that ended it included."""
        self.finish: FinishReason | None = None
        """Why it ended, once it did."""
        self.matched: int | str | None = None
        """The token id or the stop text that ended it, where one did."""

    @property
    def text(self) -> str:
        """The whole answer so far. Cost: linear in it, once per call after new pieces."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def feed(
        self, token_ids: Sequence[int], finish: FinishReason | None = None, matched_stop: int | None = None
    ) -> TextPiece:
        """Take one delta. A stop token that ended the answer is its last id (and is not shown unless asked for)."""
        assert self.finish is None, f"text: tokens after the end ({self.finish}): {list(token_ids)}"
        detokenizer = self._detokenizer
        if detokenizer is None:
            self.token_ids.extend(token_ids)
            self.finish, self.matched = finish, matched_stop
            return TextPiece(text="", token_count=len(token_ids), finish=finish, stopped_here=False)
        hide_last = matched_stop is not None and not self._include_stop and bool(token_ids)
        if self._stops is None:
            self.token_ids.extend(token_ids)
            text = detokenizer.feed(token_ids[:-1] if hide_last else token_ids)
        else:
            stopped = self._feed_stops(token_ids, hide_last, self._stops)
            if isinstance(stopped, TextPiece):
                return stopped
            text = stopped
        if finish is not None:
            tail = self._tail(detokenizer)
            text += tail
            if self._stops is not None and self._stops.matched is not None:
                finish, matched_stop = FinishReason.STOP, None
                self.matched = self._stops.matched
            self.finish = finish
            if matched_stop is not None:
                self.matched = matched_stop
        if text:
            self._parts.append(text)
        return TextPiece(text=text, token_count=len(token_ids), finish=finish, stopped_here=False)

    def _feed_stops(self, token_ids: Sequence[int], hide_last: bool, stops: StopTexts) -> TextPiece | str:
        """Token by token, as the one that completes a stop text is the last that counts."""
        assert self._detokenizer is not None
        shown: list[str] = []
        for index, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if hide_last and index == len(token_ids) - 1:
                break
            text = self._detokenizer.feed((token_id,))
            if len(self.token_ids) <= self._min_new_tokens:
                shown.append(text)
                continue
            shown.append(stops.feed(text))
            if stops.matched is not None:
                joined = "".join(shown)
                self._parts.append(joined)
                self.finish, self.matched = FinishReason.STOP, stops.matched
                return TextPiece(text=joined, token_count=index + 1, finish=FinishReason.STOP, stopped_here=True)
        return "".join(shown)

    def _tail(self, detokenizer: Detokenizer) -> str:
        """What was kept back until the end: an unfinished character, a stop text that was none."""
        rest = detokenizer.finish()
        if self._stops is None:
            return rest
        text = self._stops.feed(rest) if rest else ""
        return text if self._stops.matched is not None else text + self._stops.finish()
