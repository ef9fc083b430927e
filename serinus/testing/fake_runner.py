"""A runner without a model: the next token is a hash of the KV content reached through its own row tables.

Each slot holds a chained hash of all tokens up to its position, as written. The next token folds the content of *every*
position of the sequence in a part that covers whole sequences, and of the window's positions in the others, read
through the tables: a wrong row, a page freed too early, a missing rewrite or a chunk computed on a foreign prefix (or
on a window that is not there) gives another token. `fake_continue` says what must come out. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from serinus.cache import PartGeometry
from serinus.core.parts import Part
from serinus.core.plan import SampleSpec, SeqResult, SeqWork, StepPlan, StepResult, WorkAhead
from serinus.core.request import Request, TokenLogprobs
from serinus.core.rng import MASK64, splitmix64

_ROOT = 0x5EED


def _link(before: int, token: int) -> int:
    """Content of a position: the chain so far, and its token."""
    return splitmix64(before ^ splitmix64(token + 1))


def _beside(part: Part, content: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What another part holds where FULL holds `content`."""
    return (content ^ np.uint64(0xA0761D6478BD642F + part)) * np.uint64(0xE7037ED1A0B428DB)


def _first(window: int | None, position: int) -> int:
    """First position that computing `position` reads in a part with this window."""
    return 0 if window is None else max(0, position + 1 - window)


def _fold(content: NDArray[np.uint64], first: int = 0) -> int:
    """One number of the content of positions `first` and up; every position counts, and where it stands."""
    positions = np.arange(first + 1, first + len(content) + 1, dtype=np.uint64)
    weights = positions * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
    return int(np.bitwise_xor.reduce(content * weights))


def _check_history(spec: SampleSpec) -> None:
    """What penalties look at counts each generated token once, and is there only where it is needed."""
    counted = None if spec.history is None else int(spec.history.output_times.sum())
    wanted = spec.generated if spec.params.penalised else None
    assert counted == wanted, f"testing: penalties count {counted} tokens, expected {wanted}"


def _choose(fold: int, spec: SampleSpec, vocab_size: int) -> int:
    seed = 0 if spec.params.greedy else splitmix64(spec.seed & MASK64) ^ spec.position
    forbidden = set(spec.stop_ids) if spec.generated < spec.params.min_new_tokens else set()
    state = splitmix64(fold ^ seed)
    for _ in range(1000):
        token = state % vocab_size
        if token not in forbidden:
            return token
        state = splitmix64(state)
    raise AssertionError(f"testing: no token of {vocab_size} is allowed, forbidden are {sorted(forbidden)}")


def _logprob(content: int, token: int) -> TokenLogprobs:
    value = splitmix64(content ^ token) / (MASK64 + 1)
    return TokenLogprobs(logprob=-value)


class FakeRunner:
    """Runs StepPlans over a pool of numbers.

    Checks what a real runner could not survive: padding is never written, a step's slots are those of the row, and
    positions are computed in order.
    """

    def __init__(
        self,
        *,
        rows: int,
        context: int,
        page_size: int,
        parts: Mapping[Part, PartGeometry],
        vocab_size: int,
    ) -> None:
        """`parts`: as the cache's, FULL first."""
        self.tables = {part: np.zeros((rows, context), np.int64) for part in parts}
        self.content = {part: np.zeros(shape.pages * page_size, np.uint64) for part, shape in parts.items()}
        """What each slot of a part holds."""
        self.table_RC, self.content_S = self.tables[Part.FULL], self.content[Part.FULL]
        self.windows: Mapping[Part, int | None] = {
            part: shape.window for part, shape in parts.items() if part is not Part.FULL
        }
        """The parts beside FULL, with their windows; None = the part covers the whole sequence."""
        self.gate: Callable[[], None] | None = None
        """Called as a forward pass begins: lets loads land, as the layers of a real one do."""
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.token_count = 0
        """Tokens computed so far."""
        self.followed = 0
        """Steps so far that were computed before their plan came."""
        self.chunks_followed = 0
        """Prompt chunks among them."""
        self._ahead: list[tuple[SeqWork, Callable[[], SeqResult]]] = []
        """Work whose KV is there, and what chooses its token."""

    def run(self, plan: StepPlan) -> StepResult:
        """Table writes first, then all KV of the step, then sampling: as the real one does. Then what goes on behind
        it, where the plan says that: the next plan gets what came of it now."""
        ahead, self._ahead = self._ahead, []
        follows = plan.takes is not None
        if self.gate is not None:
            self.gate()
        for write in plan.table_writes:
            assert write.row > 0, f"testing: {write} writes to the padding row"
            self.tables[write.part][write.row, write.start : write.start + len(write.slots)] = write.slots
        if plan.takes is not None:
            taken = [ahead[number] for number in plan.takes.tolist()]
            is_own = [of is work for (of, _), work in zip(taken, plan.work, strict=True)]
            assert all(is_own), f"testing: step {plan.step} takes other work than its own"
            seqs = [choose() for _, choose in taken]
        else:
            seqs = [self._compute(work)() for work in plan.work]
        self.token_count += plan.token_count
        self.followed += follows
        self.chunks_followed += follows and sum(len(work.tokens) > 1 for work in plan.work)
        if plan.ahead is not None:
            self._ahead = self._go_on(plan.ahead, seqs)
        return StepResult(step=plan.step, seqs=tuple(seqs))

    def _go_on(self, ahead: WorkAhead, seqs: Sequence[SeqResult]) -> list[tuple[SeqWork, Callable[[], SeqResult]]]:
        """Compute work ahead, behind what a step found."""
        found = []
        for work, at in zip_longest(ahead.work, ahead.follows.tolist()):
            if work.sample is not None:
                params = work.sample.params
                late = params.looks_back or params.logprobs is not None
                assert not (late and ahead.chooses), f"testing: a token of {work.rid} is chosen ahead"
            if at is None:
                assert ahead.chooses, f"testing: a chunk of {work.rid} is ahead where tokens are not chosen"
                assert not work.asks_each, f"testing: a chunk of {work.rid} is ahead, and the host waits for it"
                found.append((work, self._compute(work)))
                continue
            assert work.sample is not None, f"testing: {work.rid} goes on without a token"
            token = seqs[at].token
            assert token is not None, f"testing: {work.rid} goes on behind work without a token"
            found.append((work, self._compute(replace(work, tokens=np.array([token], np.int32)))))
        return found

    def _read(self, part: Part, row: int, first: int, end: int) -> NDArray[np.uint64]:
        """Content of a part at positions [first, end) of a row."""
        return self.content[part][self.tables[part][row, first:end]]

    def _check_slots(self, work: SeqWork) -> None:
        assert list(work.slots) == list(self.tables), f"testing: {work.rid} has slots of {list(work.slots)}"
        for part, slots in work.slots.items():
            self._check_part(work, part, slots)

    def _check_part(self, work: SeqWork, part: Part, slots: NDArray[np.int64]) -> None:
        named = self.tables[part][work.row, work.start : work.start + len(work.tokens)]
        assert (slots >= self.page_size).all(), f"testing: {work.rid} writes to padding of {part.name}: {slots}"
        assert np.array_equal(named, slots), f"testing: {work.rid} writes {part.name} {slots}, its row says {named}"

    def _compute(self, work: SeqWork) -> Callable[[], SeqResult]:
        """Write the KV of some work; what is returned chooses its token, by what is known of it then."""
        end = work.start + len(work.tokens)
        assert work.row > 0, f"testing: {work.rid} runs in the padding row"
        self._check_slots(work)
        before = _ROOT if work.start == 0 else int(self.content_S[self.table_RC[work.row, work.start - 1]])
        for part, window in self.windows.items():
            first = _first(window, work.start)
            meant = _beside(part, self._read(Part.FULL, work.row, first, work.start))
            before ^= _fold(meant ^ self._read(part, work.row, first, work.start))  # 0 where it is what it should be
        slots = work.slots[Part.FULL]
        for token, slot in zip(work.tokens.tolist(), slots.tolist(), strict=True):
            before = _link(before, token)
            self.content_S[slot] = before
        for part in self.windows:
            self.content[part][work.slots[part]] = _beside(part, self.content_S[slots])
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if work.next_ids is not None:
            assert work.prompt_logprobs is not None, f"testing: {work.rid} has next_ids, but wants no log-probabilities"
            content = self.content_S[slots[: len(work.next_ids)]].tolist()
            prompt_logprobs = tuple(map(_logprob, content, work.next_ids.tolist()))
        pooled = _states(self.content_S[slots[: work.pooled]]).sum(0, np.float32).tobytes() if work.pooled else b""
        spec = work.sample
        if spec is None:
            return lambda: SeqResult(prompt_logprobs=prompt_logprobs, pooled=pooled)
        assert spec.position == end, f"testing: {work.rid} samples position {spec.position}, expected {end}"
        fold = _fold(self.content_S[self.table_RC[work.row, :end]])
        for part, window in self.windows.items():
            first = _first(window, end - 1)
            fold ^= _fold(self._read(part, work.row, first, end), first)

        def choose() -> SeqResult:
            _check_history(spec)
            token = _choose(fold, spec, self.vocab_size)
            logprobs = _logprob(before, token) if spec.params.logprobs is not None else None
            return SeqResult(token=token, logprobs=logprobs, prompt_logprobs=prompt_logprobs, pooled=pooled)

        return choose


def copy_pages(
    source: FakeRunner,
    source_pages: NDArray[np.int32],
    target: FakeRunner,
    target_pages: NDArray[np.int32],
    part: Part = Part.FULL,
) -> None:
    """What a transfer does: the content of pages of one pool goes to pages of another, in order."""
    assert len(source_pages) == len(target_pages), f"testing: {len(source_pages)} pages into {len(target_pages)}"
    size = source.page_size
    read, written = source.content[part].reshape(-1, size), target.content[part].reshape(-1, size)
    written[target_pages] = read[source_pages]


def fake_continue(
    request: Request,
    count: int,
    vocab_size: int,
    stop_ids: Sequence[int] = (),
    windows: Mapping[Part, int | None] = MappingProxyType({}),
) -> list[int]:
    """What the fake model answers: at most `count` tokens, ending with the first of `stop_ids` that may end it.

    Written from the request alone: no pages, no rows, no cache. `windows`: of the parts beside FULL, as the runner has.
    """
    chain = [_ROOT]
    for token in request.prompt.tolist():
        chain.append(_link(chain[-1], token))
    output: list[int] = []
    while len(output) < count:
        spec = SampleSpec(
            params=request.sampling, seed=request.seed, position=len(chain) - 1, generated=len(output),
            stop_ids=tuple(stop_ids),
        )  # fmt: skip
        content = np.array(chain[1:], np.uint64)
        fold = _fold(content)
        for part, window in windows.items():
            first = _first(window, len(content) - 1)
            fold ^= _fold(_beside(part, content[first:]), first)
        token = _choose(fold, spec, vocab_size)
        output.append(token)
        if token in stop_ids:
            break
        chain.append(_link(chain[-1], token))
    return output


def fake_pooled(request: Request) -> bytes:
    """What the fake model gives out as the pooled hidden state of a prompt."""
    content = [_ROOT]
    for token in request.prompt.tolist():
        content.append(_link(content[-1], token))
    states = _states(np.array(content[1:], np.uint64))
    return bytes((states.mean(0, np.float32) if request.sampling.pooling == "mean" else states[0]).tobytes())


def _states(content: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Hidden states, of whole numbers: their sums are exact."""
    return np.stack([content % 1009, content % 31], axis=1).astype("<f4")


def fake_prompt_logprobs(request: Request) -> list[TokenLogprobs]:
    """Log-probabilities the fake model gives to the prompt's own tokens; the first has none."""
    found = [TokenLogprobs(logprob=None)]
    content = _ROOT
    prompt = request.prompt.tolist()
    for token, following in pairwise(prompt):
        content = _link(content, token)
        found.append(_logprob(content, following))
    return found
