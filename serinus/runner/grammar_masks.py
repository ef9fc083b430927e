"""The masks of a step: which tokens the grammar of each row allows, made by a thread while the forward pass runs.

They are made on the rank that samples, and there alone. A state is a function of the grammar and of the tokens that the
plan brings; what is kept from step to step only saves following them again. So a request that was retracted, healed or
handed over goes on as if nothing had been.

Shapes: B = rows of the step, R = those with a grammar, V = vocabulary, W = words of 32 bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serinus.core.clock import Clock
from serinus.core.errors import RequestError
from serinus.core.grammar import Grammar
from serinus.core.plan import SampleSpec
from serinus.text import GrammarFailed, GrammarState, GrammarVocabulary

_FIRST_WORDS = 128
"""Of a mask that allows anything some of these words mostly do: most vocabularies begin with the single bytes."""


@dataclass(slots=True, kw_only=True)
class StepMasks:
    """The masks of one step; `rows[i]`, an index into the rows of the step, has `words_RW[i]`."""

    rows: list[int]
    words_RW: NDArray[np.int32]
    """They are those of the next step as soon as that is begun."""
    last: frozenset[int] = frozenset()
    """Rows whose answer can only end: an end-of-sequence token is all that is left."""
    failures: dict[int, str] = field(default_factory=dict)
    """Rows that have no mask, and why; their requests fail."""
    seconds: float = 0.0
    """That they took to make."""

    def part(self, start: int, end: int) -> StepMasks:
        """Those of rows start .. end - 1, by their index from `start`; these themselves where they are all of them."""
        if start == 0 and all(row < end for row in (*self.rows, *self.failures)):
            return self
        some = [index for index, row in enumerate(self.rows) if start <= row < end]
        return StepMasks(
            rows=[self.rows[index] - start for index in some],
            words_RW=self.words_RW[some],
            last=frozenset(row - start for row in self.last if start <= row < end),
            failures={row - start: reason for row, reason in self.failures.items() if start <= row < end},
        )


class GrammarMasks:
    """Makes masks for the steps of one rank; keeps the states of at most `kept` requests."""

    def __init__(
        self, vocabulary: Callable[[], GrammarVocabulary], clock: Clock, *, width: int, kept: int = 1024
    ) -> None:
        """`vocabulary`: loads it, in a thread that starts here: it takes a second. `width`: ids of the model."""
        self._clock = clock
        self._seconds: tuple[float | None, float] = (None, 0.0)
        self._words = (width + 31) // 32
        self._kept = kept
        self._room_RW = np.empty((0, self._words), np.int32)
        self._states: OrderedDict[str, tuple[Grammar, GrammarState]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._vocabulary: Future[GrammarVocabulary] = self._thread.submit(vocabulary)

    def begin(self, rids: Sequence[str], specs: Sequence[SampleSpec]) -> Future[StepMasks] | None:
        """Begin the masks of a step, for those of its rows that have a grammar; None = none has. Cost: 30 us."""
        rows = [row for row, spec in enumerate(specs) if spec.params.grammar is not None]
        if not rows:
            return None
        return self._thread.submit(self._masks, rows, [rids[row] for row in rows], [specs[row] for row in rows])

    def wait(self, under_way: Future[StepMasks]) -> StepMasks:
        """The masks that `begin` began."""
        begun = self._clock.now()
        masks = under_way.result()
        self._seconds = (masks.seconds, self._seconds[1] + self._clock.now() - begun)
        return masks

    def take_seconds(self) -> tuple[float | None, float]:
        """Seconds that the masks of the latest step took, None = it had none; and of them those that it waited."""
        seconds, self._seconds = self._seconds, (None, 0.0)
        return seconds

    def chosen(self, rid: str, token: int) -> bool:
        """This token was chosen for a request whose mask is made. Returns whether the answer is complete with it.
        Cost: 3 us."""
        known = self._states.get(rid)
        if known is None:
            return False
        state = known[1]
        try:
            state.follow((token,))
        except GrammarFailed:  # an end-of-sequence token, behind which nothing is asked for
            del self._states[rid]
            return False
        if state.complete:
            del self._states[rid]
            return True
        return False

    def close(self) -> None:
        """Begin nothing more; what runs ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _masks(self, rows: Sequence[int], rids: Sequence[str], specs: Sequence[SampleSpec]) -> StepMasks:
        begun = self._clock.now()
        masks = self._made(rows, rids, specs)
        masks.seconds = self._clock.now() - begun
        return masks

    def _made(self, rows: Sequence[int], rids: Sequence[str], specs: Sequence[SampleSpec]) -> StepMasks:
        failures: dict[int, str] = {}
        states: list[GrammarState] = []
        begun: list[int] = []
        """Of each state, the index in `rows`."""
        for index, (row, rid, spec) in enumerate(zip(rows, rids, specs, strict=True)):
            try:
                states.append(self._state(rid, spec))
                begun.append(index)
            except RequestError as error:
                failures[row] = str(error)
        words_RW = self._room(len(states))
        verdicts = self._vocabulary.result().allow(states, words_RW) if states else []
        some = np.bitwise_or.reduce(words_RW[:, :_FIRST_WORDS], axis=1).tolist()  # in half the time of `any`
        last: set[int] = set()
        good: list[int] = []
        """Of the states, those with a mask."""
        for at, (index, verdict) in enumerate(zip(begun, verdicts, strict=True)):
            row, goes_on = rows[index], some[at] != 0 or bool(words_RW[at].any())
            if verdict is True:
                _allow_ids(words_RW[at], specs[index].stop_ids)
            if isinstance(verdict, GrammarFailed):
                failures[row] = str(verdict)
            elif not goes_on and not words_RW[at].any():
                what = (
                    "it is complete, and the model has no end-of-sequence token" if verdict else "no token can follow"
                )
                failures[row] = str(GrammarFailed(f"{what} after {len(states[at].tokens)} tokens"))
            else:
                good.append(at)
                if not goes_on:
                    last.add(row)
        for index, row in enumerate(rows):
            if row in failures:
                self._states.pop(rids[index], None)
        while len(self._states) > self._kept:
            self._states.popitem(last=False)
        return StepMasks(
            rows=[rows[begun[at]] for at in good], words_RW=words_RW if len(good) == len(states) else words_RW[good],
            last=frozenset(last), failures=failures,
        )  # fmt: skip

    def _room(self, count: int) -> NDArray[np.int32]:
        """For so many masks. That of the step before, which has been read: new memory costs a fault for each page."""
        if len(self._room_RW) < count:
            self._room_RW = np.empty((count, self._words), np.int32)
        return self._room_RW[:count]

    def _state(self, rid: str, spec: SampleSpec) -> GrammarState:
        """The state after the tokens of the answer so far. Cost: one look at them, and 3 us for each that is new."""
        grammar, output = spec.params.grammar, spec.output
        assert grammar is not None, f"runner: a mask for {rid}, which has no grammar"
        assert output is not None, f"runner: {rid} has a grammar, expected its output"
        known = self._states.get(rid)
        if known is not None and (known[0] is grammar or known[0] == grammar):
            state, done = known[1], len(known[1].tokens)
            if state.tokens.tobytes() == output[:done].tobytes():
                self._states.move_to_end(rid)
                if done < len(output):
                    state.follow(output[done:].tolist())
                return state
        state = self._vocabulary.result().begin(grammar)
        self._states[rid] = (grammar, state)
        self._states.move_to_end(rid)
        state.follow(output.tolist())
        return state


def _allow_ids(words_W: NDArray[np.int32], ids: Sequence[int]) -> None:
    """Set the bits of these tokens, as far as the mask has them."""
    bits = words_W.view(np.uint32)
    for token in ids:
        if token >> 5 < len(bits):
            bits[token >> 5] |= np.uint32(1 << (token & 31))
