"""How many prompt tokens a step may have, so that it takes no longer than a bound: from what the last steps took.

Pure: times are those of `plan` and `commit`. Knows no requests.
"""

from __future__ import annotations

__all__ = ["StepPace"]

_TOKENS_FIRST = 128
"""Of a step before anything was measured..."""
_TOKENS_MIN = 32
"""...and of any step at least: prompts get on, however slow the steps are."""
_TOKENS_TELLING = 64
"""Steps with fewer prompt tokens say little of what one costs, unless they had as many as they might."""
_PROMPT_PART = 0.25
"""Part of the bound that prompts get at least, where decoding takes the rest or more."""


class StepPace:
    """The budget of prompt tokens of each step."""

    def __init__(self, *, step_s_max: float, tokens_max: int, page_size: int) -> None:
        """`step_s_max`: seconds of a step at most, 0 = no bound; `tokens_max`: prompt tokens of a step at most, -1 = no
        bound."""
        self._step_s_max = step_s_max
        self._tokens_max = 1 << 62 if tokens_max == -1 else tokens_max
        self._tokens_min = min(max(page_size, _TOKENS_MIN), self._tokens_max)
        self._token_s = 0.0
        """Seconds of one prompt token; 0 = not measured."""
        self._decode_s = 0.0
        """Seconds of the last step without a prompt token."""

    def budget(self, *, decodes: bool) -> int:
        """Prompt tokens of the next step; `decodes`: it has decoding requests too."""
        if not self._step_s_max:
            return self._tokens_max
        if not self._token_s:
            return max(self._tokens_min, min(_TOKENS_FIRST, self._tokens_max))
        least = _PROMPT_PART * self._step_s_max
        seconds = max(self._step_s_max - self._decode_s, least) if decodes else self._step_s_max
        return max(self._tokens_min, min(int(seconds / self._token_s), self._tokens_max))

    def took(self, seconds: float, *, prompt_tokens: int, budget: int, decodes: bool) -> None:
        """A step with these tokens took so long; it might have had `budget` prompt tokens.

        A slower step counts at once, a faster one by half: the next step is not the one that breaks the bound.
        """
        if not prompt_tokens:
            self._decode_s = seconds
            return
        is_telling = prompt_tokens >= min(budget, _TOKENS_TELLING) or 2 * seconds > self._step_s_max
        if not is_telling or seconds <= 0:
            return
        own = max(seconds - self._decode_s, _PROMPT_PART * seconds) if decodes else seconds
        token_s = own / prompt_tokens
        self._token_s = max(token_s, (token_s + self._token_s) / 2)
