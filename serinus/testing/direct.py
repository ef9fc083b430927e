"""DirectEngine: one Runner driven by hand, without scheduler, cache or processes, for tests and benchmarks.

Pages are taken from the pools in a shuffled order, so that every page boundary leads to an unrelated page. It decides
just enough to make plans: which slots, which chunks. KV that fell out of a window stays where it is until `forget`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.canary import CanaryRank, RingOverflow, StartCanary, Violation
from serinus.core.errors import InvariantError
from serinus.core.history import TokenHistory
from serinus.core.parts import Part
from serinus.core.plan import SampleSpec, SeqResult, SeqWork, StepPlan, StepResult, TableWrite
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.core.stamps import CHAIN_ANCHOR, chain_hashes
from serinus.kernels import Kernels, put_rows
from serinus.models import ForwardHook, Model, compose_hooks
from serinus.pool import DevicePool, PoolSpec, RequestTable
from serinus.runner import GrammarMasks, Runner


@dataclass(slots=True, kw_only=True)
class DirectSeq:
    """One sequence in progress."""

    row: int
    """Its row of req_to_token."""
    prompt: NDArray[np.int32]
    """Token ids of its prompt."""
    params: SamplingParams
    """How its tokens are chosen."""
    seed: int
    """Seed of its sampler."""
    slots: NDArray[np.int64]
    """Slots of all its positions, prompt and output, in part FULL."""
    others: dict[Part, NDArray[np.int64]] = field(default_factory=dict)
    """The same in the model's other parts."""
    done: int = 0
    """Positions whose KV is in the pool."""
    output: list[int] = field(default_factory=list)
    """Tokens chosen so far."""
    results: list[SeqResult] = field(default_factory=list)
    """What the runner found, chunk by chunk and token by token."""

    @property
    def swa_slots(self) -> NDArray[np.int64] | None:
        """Those in part SWA; None where the model does not slide."""
        return self.others.get(Part.SWA)


class Runs(Protocol):
    """What a runner is to a DirectEngine."""

    def run(self, plan: StepPlan) -> StepResult | None:
        """Compute one step; None where this rank does not sample."""


class DirectEngine:
    """A runner with pools of its own, one for each part; `pool` and `table` are those of FULL."""

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
        device: str = "cpu",
        canary: Callable[[DirectEngine], CanaryRank] | None = None,
        token_oracle: bool = False,
        grammars: GrammarMasks | None = None,
        kv_dtype: torch.dtype | None = None,
        beside: DirectEngine | None = None,
    ) -> None:
        """`device`: that of the model and the kernels. `canary`: makes one, once pools and tables are there.
        `grammars`: makes the masks of sequences with a grammar; its owner closes it. `kv_dtype`: None = the model's.
        `beside`: an engine; its pools and free pages are shared."""
        spec = model.spec
        self.model = model
        self.pools: dict[Part, DevicePool] = {} if beside is None else beside.pools
        self._pages: dict[Part, list[int]] = {} if beside is None else beside._pages
        rng = Rng(seed)
        for part in spec.parts if beside is None else ():
            self.pools[part] = DevicePool(
                PoolSpec(
                    layer_count=len(spec.layers_of(part)),
                    kv_head_count=spec.kv_head_count,
                    head_size=spec.head_size,
                    page_size=page_size,
                    page_count=page_count,
                    dtype=kv_dtype or model.dtype,
                    device=device,
                    halves=part.halves,
                    stamped=canary is not None,
                ),
                kernels,
            )
            self._pages[part] = list(range(1, page_count))
            rng.shuffle(self._pages[part])
        self.tables = {part: RequestTable(rows, context or spec.context_length, device) for part in spec.parts}
        self.pool, self.table = self.pools[Part.FULL], self.tables[Part.FULL]
        self.canary = None if canary is None else canary(self)
        if self.canary is not None:
            self.canary.obey(StartCanary())
        self.violations: list[Violation] = []
        self.overflows: list[RingOverflow] = []
        """What the canary found, in order."""
        hooks = [] if hook is None else [hook]
        hooks += [] if self.canary is None else [self.canary.hook]
        self.runner: Runs = Runner(
            model,
            self.pools,
            self.tables,
            kernels,
            hook=compose_hooks(hooks),
            is_watched=canary is not None,
            token_oracle=token_oracle,
            grammars=grammars,
        )
        self._rows = list(range(rows - 1, 0, -1))
        self._rewritten: list[DirectSeq] = []
        self._forgotten: list[TableWrite] = []
        self._step = 0

    def start(self, prompt: Sequence[int], params: SamplingParams, *, tokens: int = 64, seed: int = 0) -> DirectSeq:
        """A new sequence with room for its prompt and `tokens` more. Raises IndexError where pages or rows are out."""
        need = len(prompt) + tokens
        ids = np.asarray(prompt, dtype=np.int32)
        return DirectSeq(
            row=self._rows.pop(),
            prompt=ids,
            params=params,
            seed=seed,
            slots=self._take(Part.FULL, need),
            others={part: self._take(part, need) for part in self.pools if part is not Part.FULL},
        )

    def step(self, work: Sequence[tuple[DirectSeq, int]]) -> None:
        """Advance each sequence: a prompt by that many tokens at most, a decoding one by one token.

        Raises InvariantError where the runner does not sample.
        """
        self._step += 1
        parts = [self._work(seq, count) for seq, count in work]
        fresh = [seq for (seq, _), part in zip(work, parts, strict=True) if part.start == 0]
        writes = [write for seq in [*fresh, *self._rewritten] for write in _rows_of(seq)] + self._forgotten
        self._rewritten.clear()
        self._forgotten = []
        plan = StepPlan(step=self._step, work=tuple(parts), table_writes=tuple(writes))
        if self.canary is not None:
            self.canary.begin(plan)
        result = self.runner.run(plan)
        if self.canary is not None:
            result = self.canary.returned(result)
            findings = self.canary.found()
            self.violations += [found for found in findings if isinstance(found, Violation)]
            self.overflows += [found for found in findings if isinstance(found, RingOverflow)]
        if result is None:
            raise InvariantError("testing: a runner that does not sample, expected the one that does")
        for (seq, _), part, found in zip(work, parts, result.seqs, strict=True):
            seq.done += len(part.tokens)
            seq.results.append(found)
            if found.token is not None:
                seq.output.append(found.token)

    def finish(self, seq: DirectSeq) -> None:
        """Take back the sequence's row and pages."""
        size = self.pool.spec.page_size
        self._rows.append(seq.row)
        for part, slots in _slots_of(seq).items():
            self._pages[part].extend(int(slot) // size for slot in slots[::size])

    def forget(self, seq: DirectSeq) -> int:
        """Poison what fell out of the sequence's window: in the next plan its row says 0 there, and its KV,
        like that of page 0, becomes NaN. Returns the number of these positions."""
        window = self.model.spec.window
        if seq.swa_slots is None or window is None:
            return 0
        count = max(0, seq.done - window + 1)
        size = self.pool.spec.page_size
        slots_T = torch.from_numpy(np.concatenate((seq.swa_slots[:count], np.arange(size))))
        for lane in [lane for pair in self.pools[Part.SWA].layers for lane in pair]:
            put_rows(lane, slots_T.to(lane.device), lane.new_full((1, *lane.shape[-2:]), float("nan")))
        self._forgotten.append(TableWrite(row=seq.row, start=0, slots=np.zeros(count, np.int64), part=Part.SWA))
        return count

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

    def _take(self, part: Part, need: int) -> NDArray[np.int64]:
        size = self.pool.spec.page_size
        pages = np.array([self._pages[part].pop() for _ in range(-(-need // size))], dtype=np.int64)
        return (pages[:, None] * size + np.arange(size)).reshape(-1)[:need]

    def _work(self, seq: DirectSeq, count: int) -> SeqWork:
        known = len(seq.prompt) + len(seq.output)
        end = min(seq.done + count, known)
        if seq.done >= len(seq.prompt):
            tokens = np.array(seq.output[seq.done - len(seq.prompt) : end - len(seq.prompt)], dtype=np.int32)
        else:
            tokens = seq.prompt[seq.done : end]
        before = np.concatenate((seq.prompt, np.array(seq.output, np.int32)))[: seq.done]
        asks = seq.params.prompt_logprobs if seq.done < len(seq.prompt) else None
        return SeqWork(
            rid=f"row{seq.row}",
            row=seq.row,
            start=seq.done,
            tokens=tokens,
            slots={part: slots[seq.done : end] for part, slots in _slots_of(seq).items()},
            chain=int(chain_hashes(before)[-1]) if len(before) else CHAIN_ANCHOR,
            sample=self._sample(seq, known) if end == known else None,
            whole=seq.done < len(seq.prompt),
            prompt_logprobs=asks,
            next_ids=None if asks is None else seq.prompt[seq.done + 1 : end + 1],
        )

    def _sample(self, seq: DirectSeq, position: int) -> SampleSpec:
        history = TokenHistory(seq.prompt) if seq.params.penalised else None
        if history is not None:
            for token in seq.output:
                history.add(token)
        return SampleSpec(
            params=seq.params,
            seed=seq.seed,
            position=position,
            generated=len(seq.output),
            stop_ids=self.model.spec.eos_ids,
            history=history,
            output=None if seq.params.grammar is None else np.array(seq.output, np.int32),
        )


def _rows_of(seq: DirectSeq) -> list[TableWrite]:
    return [TableWrite(row=seq.row, start=0, slots=slots, part=part) for part, slots in _slots_of(seq).items()]


def _slots_of(seq: DirectSeq) -> dict[Part, NDArray[np.int64]]:
    return {Part.FULL: seq.slots, **seq.others}
