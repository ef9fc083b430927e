"""Flight: a step that is queued, the results of which can be read. On a CPU it is done by then.

A step can be queued behind another one that is not read: it takes its tokens from where that one chooses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.core.errors import InvariantError
from serinus.core.plan import SeqResult, SeqWork
from serinus.core.request import TokenLogprobs
from serinus.runner.sampler import Chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRows:
    """Tokens of some of a step's rows."""

    chosen: Chosen
    finish: Callable[[list[SeqResult]], list[SeqResult]] | None = None
    """Says more of them, once they are on the host; None = there is nothing to say."""

    def read(self) -> list[SeqResult]:
        """Them on the host; waits for the device."""
        found = self.chosen.read()
        return found if self.finish is None else self.finish(found)


@dataclass(slots=True, kw_only=True)
class Flight:
    """One step of one rank."""

    step: int
    work: Sequence[SeqWork] = ()
    sampling: Sequence[int] = ()
    """Those of `work` that a token is chosen for, ascending."""
    rows: Sequence[ChosenRows] = ()
    """Their tokens; none on a rank that does not sample."""
    prompts: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """By number in `work`, the log-probabilities of its prompt tokens."""
    pooled: Mapping[int, bytes] = field(default_factory=dict)
    """By number in `work`, the sum of hidden states that it asks for."""
    hidden_WE: torch.Tensor | None = None
    """Set where no token is chosen yet: what `Runner.choose` chooses them of, a row for each of `work`."""

    def tokens(self, device: str) -> torch.Tensor:
        """int64, on the device: those of `sampling`, in order; not set on a slice that does not choose them. Does not
        wait."""
        tokens = [rows.chosen.tokens_B for rows in self.rows]
        if not tokens:
            return torch.empty(len(self.sampling), dtype=torch.int64, device=device)
        return tokens[0] if len(tokens) == 1 else torch.cat(tokens)

    def places(self, numbers_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the tokens of these numbers of `work` are in `tokens`. Raises InvariantError: no token is chosen for
        one of them."""
        sampling = np.asarray(self.sampling, np.int64)
        places_B = np.searchsorted(sampling, numbers_B)
        if not np.array_equal(sampling.take(places_B, mode="clip"), numbers_B):
            raise InvariantError(
                f"runner: work goes on behind {numbers_B.tolist()} of step {self.step}, which has tokens of"
                f" {sampling.tolist()}"
            )
        return places_B

    def read(self) -> tuple[SeqResult, ...]:
        """What was found for each of `work`. Waits for the device, as far as this step needs it."""
        chosen = [each for rows in self.rows for each in rows.read()]
        if len(chosen) < len(self.work):  # chunks that are not the last; slices that do not sample found nothing
            found = dict(zip(self.sampling, chosen, strict=False))
            chosen = [found.get(i) or SeqResult() for i in range(len(self.work))]
        for i, places in self.prompts.items():
            chosen[i].prompt_logprobs = places
        for i, states in self.pooled.items():
            chosen[i].pooled = states
        return tuple(chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """What a step goes on from: another one, the tokens of which are not on the host."""

    flight: Flight
    follows_B: NDArray[np.int64]
    """Of each of the first sequences of the new step, the number in `flight.work` of what it goes on behind; the others
    are prompt chunks."""
    chooses: bool = True
    """Whether the tokens of the new step are chosen as well; else by `Runner.choose`, before anything else is run."""
