"""Whether a prompt is handed over, or computed by the decode engine itself: where its first token comes sooner.

Pure: from what both engines measured of their steps, from their queues, and from how late handoffs came lately.
Knows no requests and no addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from serinus.sched.step_pace import PaceLine


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPace:
    """How soon an engine computes a prompt that comes now."""

    queue_s: float = 0.0
    """Seconds until it begins: those of the prompt tokens that are ahead."""
    token_s: float = 0.0
    """Seconds of one prompt token; 0 = none was measured yet."""

    def behind(self, tokens: int) -> PrefillPace:
        """Its pace for what comes behind so many more tokens."""
        return replace(self, queue_s=self.queue_s + tokens * self.token_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """Of this engine and of those that could compute prompts for it."""

    here: Callable[[], PrefillPace] = PrefillPace
    there: dict[str, PrefillPace] = field(default_factory=dict)
    """By address; what is handed over counts as ahead of what follows."""


_LOCAL_MAX: Final = 15
"""Prompts that stay for the sake of the way alone, one after the other: the next is handed over, or a way that is fast
again would never be known."""


class HandoffChoice:
    """What one decode engine knows of its handoffs, and what it makes of that."""

    def __init__(self, gain: float) -> None:
        """`gain`: a prompt stays here where that brings its first token so many times sooner; 0 = never for that."""
        self._gain = gain
        self._late = PaceLine()
        self._stayed = 0
        """Prompts that stayed for the sake of the way, since one was handed over."""

    def landed(self, tokens: int, late_s: float) -> None:
        """A handoff of so many tokens ended so long after the prefill engine had done its work: what was sent and not
        there yet, checks, messages."""
        if tokens > 0:
            self._late.add(tokens, max(0.0, late_s))

    def seconds_there(self, tokens: int, there: PrefillPace) -> float:
        """Until the first token of a prompt that lacks so many tokens and is handed over now."""
        return there.queue_s + tokens * (there.token_s + self._late.token_s) + self._late.step_s

    def seconds_here(self, tokens: int, here: PrefillPace, *, streams: bool) -> float:
        """The same where it is computed here. `streams`: requests decode here meanwhile. Their tokens come later by as
        much as the prompt takes, so it counts twice."""
        return here.queue_s + tokens * here.token_s * (2 if streams else 1)

    def stays(self, tokens: int, here: PrefillPace, there: PrefillPace, *, streams: bool) -> bool:
        """Whether the prompt is computed here. Never before both engines have measured what a token takes them."""
        if not (self._gain and here.token_s and there.token_s):
            return False
        here_s = self._gain * self.seconds_here(tokens, here, streams=streams)
        if here_s < there.queue_s + tokens * there.token_s:  # whatever the way is like
            return True
        sooner = here_s < self.seconds_there(tokens, there) and self._stayed < _LOCAL_MAX
        self._stayed = self._stayed + 1 if sooner else 0
        return sooner
