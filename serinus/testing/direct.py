"""DirectEngine: one Runner driven by hand, without scheduler, cache or processes, for tests and benchmarks.

Pages are taken from the pool in a shuffled order, so that every page boundary leads to an unrelated page. It decides
just enough to make plans: which slots, which chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serinus.core.plan import SampleSpec, SeqResult, SeqWork, StepPlan, TableWrite
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.kernels import Kernels
from serinus.models import ForwardHook, Model
from serinus.pool import DevicePool, PoolSpec, RequestTable
from serinus.runner import Runner

__all__ = ["DirectEngine", "DirectSeq"]


@dataclass(slots=True, kw_only=True)
class DirectSeq:
    """One sequence in progress."""

    row: int
    """Its row of req_to_token."""
    prompt: NDArray[np.int32]
    """Its prompt."""
    params: SamplingParams
    """How its tokens are chosen."""
    seed: int
    """Seed of its sampler."""
    slots: NDArray[np.int64]
    """Slots of all its positions, prompt and output."""
    done: int = 0
    """Positions whose KV is in the pool."""
    output: list[int] = field(default_factory=list)
    """Tokens chosen so far."""
    results: list[SeqResult] = field(default_factory=list)
    """What the runner found, chunk by chunk and token by token."""


class DirectEngine:
    """A runner with a pool of its own."""

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        *,
        page_size: int = 16,
        page_count: int = 128,
        rows: int = 32,
        context: int | None = None,
        seed: int = 0,
        hook: ForwardHook | None = None,
    ) -> None:
        spec = model.spec
        self.model = model
        self.pool = DevicePool(
            PoolSpec(
                layer_count=spec.layer_count,
                kv_head_count=spec.kv_head_count,
                head_size=spec.head_size,
                page_size=page_size,
                page_count=page_count,
                dtype=model.dtype,
            ),
            kernels,
        )
        self.table = RequestTable(rows, context or spec.context_length)
        self.runner = Runner(model, self.pool, self.table, kernels, hook=hook)
        self._pages = list(range(1, page_count))
        Rng(seed).shuffle(self._pages)
        self._rows = list(range(rows - 1, 0, -1))
        self._rewritten: list[DirectSeq] = []
        self._step = 0

    def start(self, prompt: Sequence[int], params: SamplingParams, *, tokens: int = 64, seed: int = 0) -> DirectSeq:
        """A new sequence with room for its prompt and `tokens` more. Raises IndexError where pages or rows are out."""
        size = self.pool.spec.page_size
        need = len(prompt) + tokens
        pages = np.array([self._pages.pop() for _ in range(-(-need // size))], dtype=np.int64)
        slots = (pages[:, None] * size + np.arange(size)).reshape(-1)[:need]
        ids = np.asarray(prompt, dtype=np.int32)
        return DirectSeq(row=self._rows.pop(), prompt=ids, params=params, seed=seed, slots=slots)

    def step(self, work: Sequence[tuple[DirectSeq, int]]) -> None:
        """Advance each sequence: a prompt by that many tokens at most, a decoding one by one token."""
        self._step += 1
        parts = [self._work(seq, count) for seq, count in work]
        fresh = [seq for (seq, _), part in zip(work, parts, strict=True) if part.start == 0]
        writes = tuple(TableWrite(row=seq.row, start=0, slots=seq.slots) for seq in [*fresh, *self._rewritten])
        self._rewritten.clear()
        result = self.runner.run(StepPlan(step=self._step, work=tuple(parts), table_writes=writes))
        for (seq, _), part, found in zip(work, parts, result.seqs, strict=True):
            seq.done += len(part.tokens)
            seq.results.append(found)
            if found.token is not None:
                seq.output.append(found.token)

    def finish(self, seq: DirectSeq) -> None:
        """Take back the sequence's row and pages."""
        size = self.pool.spec.page_size
        self._rows.append(seq.row)
        self._pages.extend(int(slot) // size for slot in seq.slots[::size])

    def rewrite(self, seq: DirectSeq) -> None:
        """The sequence has other slots now: the next step's plan writes its row anew."""
        self._rewritten.append(seq)

    def generate(self, seqs: Sequence[DirectSeq], tokens: int, *, chunk: int = 1 << 30) -> list[list[int]]:
        """Prompts first (each step at most `chunk` tokens), then all decode together, `tokens` each."""
        for seq in seqs:
            while seq.done < len(seq.prompt):
                self.step([(seq, chunk)])
        while len(seqs[0].output) < tokens:
            self.step([(seq, 1) for seq in seqs])
        return [seq.output for seq in seqs]

    def _work(self, seq: DirectSeq, count: int) -> SeqWork:
        known = len(seq.prompt) + len(seq.output)
        end = min(seq.done + count, known)
        if seq.done >= len(seq.prompt):
            tokens = np.array(seq.output[seq.done - len(seq.prompt) : end - len(seq.prompt)], dtype=np.int32)
        else:
            tokens = seq.prompt[seq.done : end]
        asks = seq.params.prompt_logprobs if seq.done < len(seq.prompt) else None
        return SeqWork(
            rid=f"row{seq.row}",
            row=seq.row,
            start=seq.done,
            tokens=tokens,
            slots=seq.slots[seq.done : end],
            sample=self._sample(seq, known) if end == known else None,
            prompt_logprobs=asks,
            next_ids=None if asks is None else seq.prompt[seq.done + 1 : end + 1],
        )

    def _sample(self, seq: DirectSeq, position: int) -> SampleSpec:
        return SampleSpec(
            params=seq.params,
            seed=seq.seed,
            position=position,
            generated=len(seq.output),
            stop_ids=self.model.spec.eos_ids,
            prompt_ids=seq.prompt,
            output_ids=np.array(seq.output, dtype=np.int32),
        )
