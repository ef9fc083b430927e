"""Runner: a StepPlan becomes tensors, one forward pass and a StepResult. Does; decides nothing, owns no page.

Shapes: T = tokens of the step, B = sequences, W = rows of which the hidden state is wanted, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.core.errors import InvariantError, OutOfMemory, StepAbandoned
from serinus.core.parts import Part
from serinus.core.plan import SampleSpec, SeqResult, SeqWork, StepPlan, StepResult, TableWrite
from serinus.core.request import TokenLogprobs
from serinus.core.sampling import SamplingParams
from serinus.kernels import FP8_FORMATS, Kernels
from serinus.models import ForwardBatch, ForwardHook, Model, NullHook, Put
from serinus.parallel.comm import Comm, SoloComm
from serinus.pool import DevicePool, RequestTable
from serinus.runner.flight import Behind, ChosenRows, Flight
from serinus.runner.grammar_masks import GrammarMasks, StepMasks
from serinus.runner.graphs import StepGraphs
from serinus.runner.inbox import Inbox
from serinus.runner.sampler import Chosen, Sampler, token_logprobs
from serinus.runner.step_batch import StepBatch, put_batch
from serinus.runner.token_oracle import OracleSampler

_LOGIT_ROWS_MAX = 256
_REHEARSED_ROWS = (1, 16, 32, 64, 128)
"""Of the output head: what multiplies fewer rows than the next number is made for that."""
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""What torch's allocators say without an error type of their own."""
_OF_ENDED = SampleSpec(params=SamplingParams(temperature=0.0), seed=0, position=1, generated=0)
"""Of the rows of requests that have ended."""


class Runner:
    """Runs the steps of one rank."""

    def __init__(
        self,
        model: Model,
        pools: Mapping[Part, DevicePool],
        tables: Mapping[Part, RequestTable],
        kernels: Kernels,
        *,
        hook: ForwardHook | None = None,
        is_watched: bool = False,
        token_oracle: bool = False,
        comm: Comm | None = None,
        grammars: GrammarMasks | None = None,
    ) -> None:
        """A pool and a table for each of model.spec.parts. `token_oracle`: tokens come from no logits (OracleSampler).
        `comm`: to the other ranks of the mesh that the model is cut for; None = there are none. `grammars`: makes
        masks, where this rank samples; None = a request that has a grammar fails.

        Raises InvariantError where the parts, or a pool's layers or dtype, are not the model's.
        """
        parts = model.spec.parts
        if tuple(sorted(pools)) != parts or tuple(sorted(tables)) != parts:
            raise InvariantError(
                f"runner: pools of {_names(pools)} and tables of {_names(tables)}, expected both of {_names(parts)}"
            )
        for part, pool in pools.items():
            layers = len(model.spec.layers_of(part))
            if len(pool.layers) != layers or pool.spec.dtype not in (model.dtype, *FP8_FORMATS):
                raise InvariantError(
                    f"runner: a pool of {len(pool.layers)} layers, {pool.spec.dtype}; "
                    f"expected {layers} layers, {model.dtype} or FP8"
                )
        layers_left = {part: iter(pool.layers) for part, pool in pools.items()}
        self._comm: Comm = comm or SoloComm()
        mesh, rank = self._comm.mesh, self._comm.rank
        self._takes, self._sends = mesh.pp_rank(rank) > 0, mesh.pp_rank(rank) < mesh.pp - 1
        self._answers = rank == mesh.result_rank
        self._model = model
        self._kernels = kernels
        self._kv = tuple(next(layers_left[part]) for part in model.spec.layer_parts)
        self._tables = dict(tables)
        self._rows = {part: table.table for part, table in tables.items()}
        self._device = pools[Part.FULL].spec.device
        self._sampler: Sampler | OracleSampler = OracleSampler() if token_oracle else Sampler(kernels)
        self._grammars = grammars
        self._hook: ForwardHook = hook or NullHook()
        self._is_watched = is_watched
        self._inbox = Inbox(self._device)
        self.graphs: StepGraphs | None = None
        """Recorded decode steps; None = there are none."""
        self._inflow: torch.Tensor | None = None
        """What recorded steps take from the stage before."""
        self._passes = 0
        """Forward passes and choices behind them so far, the same number on all ranks. Those of plans begin anew after
        a warm-up."""

    def close(self) -> None:
        """End the thread that makes masks, and forget recorded steps: before the communicator that they name is closed.
        No step is run any more. May be called again."""
        if self._grammars is not None:
            self._grammars.close()
        if self.graphs is not None:
            self.graphs.close()

    def run(self, plan: StepPlan) -> StepResult | None:
        """Write the table, compute the KV of all tokens of the plan, choose the tokens it asks for.

        Returns: results in the order of plan.work, on the rank that samples (mesh.result_rank); None on the others.
        Raises PeerGone where another rank does not do its part; OutOfMemory, on all ranks that the step then cannot go
        on with: what of the KV of this step is written is not known, and nothing else has changed.
        Cost: one forward pass; one host wait, for the chosen tokens. A stage waits for the one before it, and hands on
        to the next without waiting.
        """
        return self.read(self.launch(plan))

    def launch(self, plan: StepPlan, behind: Behind | None = None) -> Flight:
        """Queue all that `run` does up to the chosen tokens; `read` is the rest.

        `behind`: the first of the plan's work goes on behind another step by one token each, which that one chooses and
        which need not be read: what `tokens` says of it means nothing. The rest is prompt chunks. Raises as `run` does.
        Waits for the device only where grammars or log-probabilities are asked for, or where a hook or a kernel of the
        reference does.
        """
        with torch.inference_mode():
            if not plan.work:
                self.write_tables(plan.table_writes)
                return Flight(step=plan.step)
            return self._run(plan, lambda: self._compute(plan, self._stage(plan, behind), behind))

    def choose(self, flight: Flight, plan: StepPlan, places: Sequence[int]) -> Flight:
        """Choose the tokens of a step that was launched without that, as a plan says of those at `places`; what is
        chosen for the others means nothing. Raises and waits as `launch` does."""
        assert flight.hidden_WE is not None, f"runner: step {flight.step} has its tokens"
        goes_on = dict(zip(places, plan.work, strict=True))
        work = [goes_on.get(place) or replace(each, sample=_OF_ENDED) for place, each in enumerate(flight.work)]
        with torch.inference_mode():
            return self._run(plan, partial(self._chosen, plan.step, work, flight.hidden_WE))

    def read(self, flight: Flight) -> StepResult | None:
        """What came of a step that was launched. Waits until the device has chosen its tokens."""
        if not self._answers:
            return None
        seqs = flight.read()
        made, waited = (None, 0.0) if self._grammars is None else self._grammars.take_seconds()
        return StepResult(step=flight.step, seqs=seqs, mask_seconds=made, mask_wait_seconds=waited)

    @torch.inference_mode()
    def write_tables(self, writes: Sequence[TableWrite]) -> None:
        """Write the row tables alone."""
        if not writes:
            return
        with torch.inference_mode():
            self._inbox.begin()
            self._stage_tables(writes, self._inbox.put)
            self._inbox.send()
            self._write_tables()

    def record(self, sizes: Sequence[int], tell: Callable[[int], object] = lambda size: None) -> None:
        """Record decode steps of so many sequences, the largest first; from now on steps that fit are replayed. All
        slices of a stage do it side by side: they exchange tensors. `tell`: is told each size that is done.

        Cost: each step is run once and recorded once.
        """
        graphs = StepGraphs(self._device, tuple(sorted(sizes)))
        self.graphs = None
        shape, dtype = self._model.activation(graphs.sizes[-1])
        self._inflow = torch.zeros(shape, dtype=dtype, device=self._device) if self._takes else None
        with ExitStack() as undo, torch.inference_mode():
            undo.callback(graphs.close)
            for size in reversed(graphs.sizes):
                compute = partial(self._forward, inflow=None if self._inflow is None else self._inflow[:size])
                batch = self._rehearsed(size)
                if self._inflow is not None:
                    self._inflow.zero_()  # behind what the step is told, as when it comes: kernels read that early
                compute(batch)
                graphs.record(size, compute, self._rehearsed(size))
                tell(size)
            undo.pop_all()
        self.graphs = graphs

    def rehearse(self, sizes: Sequence[int]) -> None:
        """Compute decode steps of so many sequences, and logits of as many rows as kernels tell apart, for nothing but
        what is compiled, loaded or allocated at first use. All ranks of a stage do it side by side.

        Of a step in which nothing is verified attention digests nothing: so beside steps as they are recorded those of
        powers of two are computed without the hook, recorded or not.
        """
        powers = [1 << i for i in range(len(self._rows[Part.FULL]).bit_length())]
        with torch.inference_mode():
            self._comm.broadcast(torch.zeros(1, dtype=torch.int64, device=self._device))
            for size, hook in [(size, self._hook) for size in sizes] + [(size, NullHook()) for size in powers]:
                batch, (shape, dtype) = self._rehearsed(size), self._model.activation(size)
                inflow = torch.zeros(shape, dtype=dtype, device=self._device) if self._takes else None
                self._model.forward(batch, self._kv, self._rows, hook, inflow)
            for rows in () if self._sends else _REHEARSED_ROWS:
                shape, dtype = self._model.activation(rows)
                logits_BV = self._model.logits(torch.zeros(shape, dtype=dtype, device=self._device))
                if logits_BV is not None and self._grammars is not None:
                    words = (logits_BV.shape[1] + 31) // 32
                    self._kernels.mask_logits(logits_BV, [0], np.zeros((1, words), np.int32))

    def _rehearsed(self, size: int) -> ForwardBatch:
        """A step of padding alone, staged."""
        self._inbox.begin()
        staged = put_batch((), tuple(self._tables), self._inbox.put, is_watched=self._is_watched, room=size)
        self._hook.stage(staged.host, self._inbox.put)
        self._inbox.send()
        return staged.batch

    def _run(self, plan: StepPlan, act: Callable[[], Flight]) -> Flight:
        """Act on a plan, side by side with the other ranks. Raises as `run` does."""
        comm = self._comm
        self._passes += 1
        comm.begin(self._passes)
        try:
            return act()
        except (MemoryError, RuntimeError, StepAbandoned) as error:
            is_told = isinstance(error, StepAbandoned)
            own = comm.mesh.name(comm.rank) if comm.mesh.size > 1 else ""
            if not is_told and not is_out_of_memory(error):
                raise  # other ranks may be in the middle of this step and wait for this one: the engine ends as a whole
            if not (is_told or comm.can_abandon):
                raise MemoryError(
                    f"{_out_of_memory(plan, own, error)}. Ranks that exchange over NCCL, or from machine to machine,"
                    f" cannot leave a step together: the engine ends"
                ) from error
            said = _out_of_memory(plan, "another rank" if is_told else own, error)
        comm.abandon(*self._model.activation(plan.token_count))  # what the pass had allocated is free again
        raise OutOfMemory(said)

    def _stage(self, plan: StepPlan, behind: Behind | None) -> StepBatch:
        """Send all that the step reads to the device, in one copy, and write the tables. They are written as well
        where there is no memory for the rest: they are not of this step's requests alone."""
        try:
            return self._sent(plan, behind)
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                self.write_tables(plan.table_writes)
            raise

    def _sent(self, plan: StepPlan, behind: Behind | None) -> StepBatch:
        work, inbox = plan.work, self._inbox
        room = self._room_of(work)
        inbox.begin()
        staged = put_batch(work, tuple(self._tables), inbox.put, is_watched=self._is_watched, room=room)
        self._hook.stage(staged.host, inbox.put)
        self._stage_tables(plan.table_writes, inbox.put)
        follows = behind is not None and len(behind.follows_B) > 0
        places_B = inbox.put(behind.flight.places(behind.follows_B)) if behind is not None and follows else None
        inbox.send()
        self._write_tables()
        if behind is not None and places_B is not None:
            tokens_B = self._comm.broadcast(behind.flight.tokens(self._device))
            torch.index_select(tokens_B, 0, places_B, out=staged.batch.tokens_T[: len(places_B)])
        return staged

    def _room_of(self, work: Sequence[SeqWork]) -> int | None:
        """The recorded size on which this work is replayed; None = it is computed call by call."""
        if self.graphs is None or any(len(w.tokens) > 1 or w.sample is None or w.asks_each for w in work):
            return None
        room = self.graphs.size_of(len(work))
        return room if room is not None and self._hook.can_replay(room) else None

    def _stage_tables(self, writes: Sequence[TableWrite], put: Put | None) -> None:
        for part, table in self._tables.items():
            table.stage([write for write in writes if write.part is part], put)
        strange = [write.part for write in writes if write.part not in self._tables]
        if strange:
            raise InvariantError(f"runner: a table write of part {strange[0].name}, expected {_names(self._tables)}")

    def _write_tables(self) -> None:
        for table in self._tables.values():
            table.write()

    def _compute(self, plan: StepPlan, staged: StepBatch, behind: Behind | None) -> Flight:
        work, chooses = plan.work, behind is None or behind.chooses
        sampling = [i for i, w in enumerate(work) if w.sample is not None and chooses]
        inflow = None
        if self._takes:
            inflow = self._comm.recv(*self._model.activation(sum(len(w.tokens) for w in work)))
        if self.graphs is not None and staged.host.room is not None:
            if inflow is not None and self._inflow is not None:
                self._inflow[: len(work)].copy_(inflow)
            hidden_WE = self.graphs.replay(staged.host.room, staged.batch)[: len(work)]
            masks = self._begin_masks(work, sampling)  # while the device computes: its thread competes for the GIL
            self._hook.replayed()
        else:
            masks = self._begin_masks(work, sampling)
            hidden_WE = self._forward(staged.batch, inflow)
        if self._sends:  # of a replay a copy: the next one writes to the same place while this one is on its way
            self._comm.send(hidden_WE if staged.host.room is None else hidden_WE.clone())
            return Flight(step=plan.step, work=work)
        if not chooses:
            return Flight(step=plan.step, work=work, hidden_WE=hidden_WE)
        whole = staged.batch.wanted_W is None
        rows = self._sample(work, sampling, hidden_WE, staged.ends_B, masks, whole=whole)
        asked, ends = [(i, w) for i, w in enumerate(work) if w.asks_each], staged.ends_B
        prompts = {i: self._prompt_logprobs(w, hidden_WE, ends[i]) for i, w in asked if w.next_ids is not None}
        pooled = {i: self._pooled(w, hidden_WE, ends[i]) for i, w in asked if w.pooled}
        return Flight(step=plan.step, work=work, sampling=sampling, rows=rows, prompts=prompts, pooled=pooled)

    def _chosen(self, step: int, work: Sequence[SeqWork], hidden_WE: torch.Tensor) -> Flight:
        """All of the work samples, each of its own row."""
        sampling, ends = range(len(work)), np.arange(1, len(work) + 1)
        rows = self._sample(work, sampling, hidden_WE, ends, self._begin_masks(work, sampling), whole=True)
        return Flight(step=step, work=work, sampling=sampling, rows=rows)

    def _forward(self, batch: ForwardBatch, inflow: torch.Tensor | None) -> torch.Tensor:
        return self._model.forward(batch, self._kv, self._rows, self._hook, inflow)

    def _sample(
        self,
        work: Sequence[SeqWork],
        sampling: Sequence[int],
        hidden_WE: torch.Tensor,
        ends: NDArray[np.int64],
        masks: Future[StepMasks] | None,
        *,
        whole: bool,
    ) -> list[ChosenRows]:
        """Tokens for work[i], i in `sampling`. `whole`: hidden has all T rows, else just those of `sampling`. `masks`:
        of those with a grammar, waited for when the logits are on their way."""
        if not sampling:
            return []
        if whole and len(sampling) < len(hidden_WE):
            rows_W = torch.from_numpy(ends[list(sampling)] - 1)
            hidden_WE = hidden_WE.index_select(0, rows_W.to(self._device))
        specs = [spec for i in sampling if (spec := work[i].sample) is not None]
        found: list[ChosenRows] = []
        for at in range(0, len(specs), _LOGIT_ROWS_MAX):
            rows = slice(at, at + _LOGIT_ROWS_MAX)
            logits_BV = self._model.logits(hidden_WE[rows])
            if logits_BV is None:
                continue
            if masks is None:
                lacks_masks = self._grammars is None and any(spec.params.grammar is not None for spec in specs[rows])
                finish = partial(_without_masks, specs=specs[rows]) if lacks_masks else None
                chosen = self._sampler.sample(logits_BV, specs[rows])
                self._add_hidden(chosen, specs[rows], hidden_WE[rows])
                found.append(ChosenRows(chosen=chosen, finish=finish))
                continue
            assert self._grammars is not None, "runner: masks without grammars"
            part = self._grammars.wait(masks).part(at, at + _LOGIT_ROWS_MAX)
            chosen = self._sampler.sample(logits_BV, specs[rows], part)
            self._add_hidden(chosen, specs[rows], hidden_WE[rows])
            finish = partial(self._with_ends, rids=[work[i].rid for i in sampling[rows]], masks=part)
            found.append(ChosenRows(chosen=chosen, finish=finish))
        return found

    def _add_hidden(self, chosen: Chosen, specs: Sequence[SampleSpec], hidden_BE: torch.Tensor) -> None:
        """Give the rows that ask for it their hidden state, where the model gives it out. Waits for the device then."""
        params = [spec.params for spec in specs]
        asked = [row for row in chosen.logprobs if params[row].hidden_state and params[row].pooling == "last"]
        states_BE = self._model.final_hidden(hidden_BE[asked]) if asked else None
        if states_BE is None:
            return
        states = states_BE.float().cpu().numpy().astype("<f4", copy=False)
        given = {row: replace(chosen.logprobs[row], hidden=states[at].tobytes()) for at, row in enumerate(asked)}
        chosen.logprobs = {**chosen.logprobs, **given}

    def _with_ends(self, chosen: Sequence[SeqResult], rids: Sequence[str], masks: StepMasks) -> list[SeqResult]:
        """The same, with what the grammars say of it: which answers are complete, and which cannot go on."""
        assert self._grammars is not None, "runner: masks without grammars"
        found = list(chosen)
        for row in masks.rows:
            token = found[row].token
            if token is not None and (self._grammars.chosen(rids[row], token) or row in masks.last):
                found[row] = replace(found[row], ends=True)
        for row, reason in masks.failures.items():
            found[row] = SeqResult(failure=reason)
        return found

    def _begin_masks(self, work: Sequence[SeqWork], sampling: Sequence[int]) -> Future[StepMasks] | None:
        """A thread begins the masks of the step's grammars, on the rank that samples."""
        if self._grammars is None:
            return None
        specs = [spec for i in sampling if (spec := work[i].sample) is not None]
        return self._grammars.begin([work[i].rid for i in sampling], specs)

    def _pooled(self, work: SeqWork, hidden_TE: torch.Tensor, end: int) -> bytes:
        """The sum of the hidden states that one chunk wants; empty where the model gives out none. Waits for the
        device."""
        begin = int(end) - len(work.tokens)
        states_NE = self._model.final_hidden(hidden_TE[begin : begin + work.pooled])
        return b"" if states_NE is None else states_NE.sum(0, dtype=torch.float32).cpu().numpy().astype("<f4").tobytes()

    def _prompt_logprobs(self, work: SeqWork, hidden_TE: torch.Tensor, end: int) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt tokens after each position of one chunk, some rows at a time."""
        next_ids = work.next_ids if work.next_ids is not None else np.zeros(0, dtype=np.int32)
        begin = int(end) - len(work.tokens)
        found: list[TokenLogprobs] = []
        for at in range(0, len(next_ids), _LOGIT_ROWS_MAX):
            ids = next_ids[at : at + _LOGIT_ROWS_MAX].tolist()
            logits_RV = self._model.logits(hidden_TE[begin + at : begin + at + len(ids)])
            if logits_RV is not None:
                found += token_logprobs(self._kernels, logits_RV, ids, [work.prompt_logprobs or 0] * len(ids))
        return tuple(found)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: of Python, numpy, numba, torch on a host or on a device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _NO_MEMORY)


def _out_of_memory(plan: StepPlan, where: str, error: Exception) -> str:
    said = (str(error) or type(error).__name__).splitlines()[0][:200]
    return (
        f"runner: no memory{where and f' on {where}'} for a step of {plan.token_count} tokens in {len(plan.work)}"
        f" requests ({said}); expected"
        f" less KV (--max-total-tokens, --mem-fraction-static) or shorter steps (--chunked-prefill-size)"
    )


def _without_masks(chosen: Sequence[SeqResult], specs: Sequence[SampleSpec]) -> list[SeqResult]:
    """The same; those with a grammar fail."""
    reason = "grammar: this engine has no tokenizer, samples from no logits, or runs with --grammar-backend none"
    return [
        each if spec.params.grammar is None else SeqResult(failure=reason)
        for each, spec in zip(chosen, specs, strict=True)
    ]


def _names(parts: Iterable[Part]) -> str:
    return ", ".join(part.name for part in sorted(parts))
