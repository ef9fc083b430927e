"""How many prompt tokens a step may have, so that it takes no longer than a bound: from what the last steps took.

Pure: times are those of `plan` and `commit`. Knows no requests.
"""

from __future__ import annotations

import math

_TOKENS_FIRST = 128
"""Of a step before anything was measured..."""
_TOKENS_MIN = 32
"""...and of any step at least: prompts get on, however slow the steps are."""
_LOOK_STEPS = 4
"""While steps have the fewest tokens, each so many has twice as many: else their cost by itself could not be told."""
_KEPT = 0.7
"""Weight of a step in the measure, for each that came after it."""
_SPREAD_MIN = 0.2
"""Steps tell what a token costs where their numbers of tokens differ by so much of their mean (standard deviation)."""
_SLOWER_MAX = 3.0
_TOKEN_PART_MIN = 0.05
"""Part of a step that its tokens are taken to cost at least."""


class StepPace:
    """The budget of prompt tokens of each step.

    A step with prompt tokens costs something by itself (its decoding too) and so much for each of them: a line through
    what the last ones took, one for steps that decode and one for those that do not.
    """

    def __init__(self, *, step_s_max: float, tokens_max: int, page_size: int) -> None:
        """`step_s_max`: seconds of a step at most, 0 = no bound; `tokens_max`: prompt tokens of a step at most, -1 = no
        bound."""
        self._step_s_max = step_s_max
        self._tokens_max = 1 << 62 if tokens_max == -1 else tokens_max
        self._tokens_min = min(max(page_size, _TOKENS_MIN), self._tokens_max)
        self._lines = {False: PaceLine(), True: PaceLine()}
        self._steps = 0
        self._token_s_least = math.inf
        self._tokens_seen = 0

    def budget(self, *, decodes: bool) -> int:
        """Prompt tokens of the next step; `decodes`: it has decoding requests too.

        Where a step by itself takes more than half of the bound, its prompt tokens may take as long as that: then steps
        take longer than the bound, and prompts still get half of the machine.
        """
        if not self._step_s_max:
            return self._tokens_max
        line = self._lines[decodes] if self._lines[decodes].token_s else self._lines[not decodes]
        tokens = _TOKENS_FIRST
        if line.token_s:
            tokens = int(max(self._step_s_max - line.step_s, line.step_s) / line.token_s)
        if tokens < self._tokens_min:
            tokens = self._tokens_min * (1 + (self._steps % _LOOK_STEPS == 0))
        return min(tokens, self._tokens_max)

    def seconds(self, tokens: int, *, decodes: bool) -> float:
        """What so many prompt tokens are going to take, in as many steps as they need; 0 where none was measured."""
        line = self._lines[decodes] if self._lines[decodes].token_s else self._lines[not decodes]
        return line.step_s * -(-tokens // self.budget(decodes=decodes)) + line.token_s * tokens

    def took(self, seconds: float, *, prompt_tokens: int, decodes: bool) -> None:
        """A step with these tokens took so long."""
        if prompt_tokens and seconds > 0:
            self._steps += 1
            self._lines[decodes].add(prompt_tokens, seconds)
            self._token_s_least = min(self._token_s_least, seconds / prompt_tokens)
            self._tokens_seen = max(self._tokens_seen, prompt_tokens)

    def seconds_least(self, tokens: int) -> float:
        """Seconds below which so many prompt tokens were never computed; 0 where no step was large enough to tell."""
        return tokens * self._token_s_least if min(tokens, self._tokens_max) <= self._tokens_seen else 0.0


class PaceLine:
    """Seconds of a step (or of a handoff) over its prompt tokens, by least squares; the latest ones count most."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """Seconds of a step by itself."""
        self.token_s = 0.0
        """Seconds of one prompt token; 0 = nothing was measured."""
        self._weight = self._n = self._s = self._nn = self._ns = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """One more step. It counts as no slower than some times what was expected: one that stood still is soon
        forgotten, and a machine that stays slow is believed after a few."""
        if self.token_s:
            seconds = min(seconds, _SLOWER_MAX * (self.step_s + self.token_s * tokens))
        self._weight = self._weight * _KEPT + 1
        self._n = self._n * _KEPT + tokens
        self._s = self._s * _KEPT + seconds
        self._nn = self._nn * _KEPT + tokens * tokens
        self._ns = self._ns * _KEPT + tokens * seconds
        mean_n, mean_s = self._n / self._weight, self._s / self._weight
        spread = self._nn / self._weight - mean_n * mean_n
        if spread > (_SPREAD_MIN * mean_n) ** 2:
            self.token_s = (self._ns / self._weight - mean_n * mean_s) / spread
        most = mean_s / mean_n  # tokens cost no more than the whole step
        self.token_s = min(max(self.token_s or most, _TOKEN_PART_MIN * most), most)
        self.step_s = mean_s - self.token_s * mean_n
