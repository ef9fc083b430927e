"""Plans and results as they travel between ranks: columns instead of one object for each sequence.

A step of 64 decoding requests is 64 small objects with the same sampling parameters again and again. On the line there
is one array for each field, and each set of parameters once; both ends remember the sets they have seen as bytes, so
that a plan is read without checking the same parameters in every step. Memory of neither end matters: it may forget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import BadSampling, FrameError
from serinus.core.parts import Part
from serinus.core.plan import SampleSpec, SeqResult, SeqWork, StepPlan, StepResult, TableWrite
from serinus.core.request import TokenLogprobs
from serinus.core.sampling import SamplingParams
from serinus.wire.convert import sampling_from_wire, sampling_to_wire
from serinus.wire.messages import Sampling

__all__ = ["PlanColumns", "ResultColumns", "pack_plan", "pack_result", "unpack_plan", "unpack_result"]

_SETS_MAX: Final = 4096
"""Sets of sampling parameters that an end remembers at most; then it forgets all."""
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Set(msgspec.Struct, frozen=True, array_like=True):
    """Parameters and the ids forbidden while an answer is too short."""

    sampling: Sampling
    stop_ids: tuple[int, ...]


class _Penalty(msgspec.Struct, frozen=True, array_like=True):
    """What a sampler with penalties looks back at."""

    work: Count
    prompt_ids: NDArray[np.int32] | None
    output_ids: NDArray[np.int32] | None


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    """Work that wants log-probabilities of its prompt."""

    work: Count
    count: Count
    next_ids: NDArray[np.int32] | None


class _Write(msgspec.Struct, frozen=True, array_like=True):
    """core.TableWrite."""

    row: Count
    start: Count
    part: Part
    slots: NDArray[np.int64]


class PlanColumns(msgspec.Struct, frozen=True, array_like=True):
    """core.StepPlan; N = sequences, T = tokens, S = sequences that sample."""

    step: Count
    rids: tuple[str, ...]
    rows_N: NDArray[np.int64]
    starts_N: NDArray[np.int64]
    counts_N: NDArray[np.int64]
    tokens_T: NDArray[np.int32]
    slots_T: NDArray[np.int64]
    swa_slots_T: NDArray[np.int64] | None
    sampling_S: NDArray[np.int64]
    """Which of the N sample."""
    set_S: NDArray[np.int64]
    """Which of `sets` each uses."""
    seeds_S: tuple[int, ...]
    positions_S: NDArray[np.int64]
    generated_S: NDArray[np.int64]
    sets: tuple[bytes, ...]
    penalties: tuple[_Penalty, ...]
    asked: tuple[_Asked, ...]
    writes: tuple[_Write, ...]


class _Seq(msgspec.Struct, frozen=True, array_like=True):
    """The log-probabilities of one sequence."""

    work: Count
    logprobs: TokenLogprobs | None
    prompt_logprobs: tuple[TokenLogprobs, ...]


class ResultColumns(msgspec.Struct, frozen=True, array_like=True):
    """core.StepResult."""

    step: Count
    tokens: tuple[int | None, ...]
    logprobs: tuple[_Seq, ...]


_ENCODER: Final = msgspec.msgpack.Encoder()
_SET_DECODER: Final = msgspec.msgpack.Decoder(_Set)


class _Sets:
    """Sets of parameters as bytes, and back; remembers what it has seen."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[int, tuple[int, ...]], tuple[SamplingParams, bytes]] = {}
        self._sets: dict[bytes, tuple[SamplingParams, tuple[int, ...]]] = {}

    def packed(self, params: SamplingParams, stop_ids: tuple[int, ...]) -> bytes:
        key = (id(params), stop_ids)
        known = self._bytes.get(key)
        if known is not None and known[0] is params:
            return known[1]
        if len(self._bytes) >= _SETS_MAX:
            self._bytes.clear()
        data = _ENCODER.encode(_Set(sampling=sampling_to_wire(params), stop_ids=stop_ids))
        self._bytes[key] = (params, data)  # kept alive, so that its id stays its own
        return data

    def unpacked(self, data: bytes) -> tuple[SamplingParams, tuple[int, ...]]:
        known = self._sets.get(data)
        if known is None:
            if len(self._sets) >= _SETS_MAX:
                self._sets.clear()
            try:
                found = _SET_DECODER.decode(data)
                known = sampling_from_wire(found.sampling), found.stop_ids
            except BadSampling as error:
                raise FrameError("body", f"sampling parameters of a plan: {error}") from None
            self._sets[data] = known
        return known


_SETS: Final = _Sets()
_NONE: Final[NDArray[np.int64]] = np.zeros(0, np.int64)


def pack_plan(plan: StepPlan) -> PlanColumns:
    """A plan in columns. Cost: about 1 us a sequence."""
    work = plan.work
    sampling = [(index, w.sample) for index, w in enumerate(work) if w.sample is not None]
    sets: dict[bytes, int] = {}
    set_S = [sets.setdefault(_SETS.packed(s.params, s.stop_ids), len(sets)) for _, s in sampling]
    slides = [w.swa_slots for w in work if w.swa_slots is not None]
    if slides and len(slides) != len(work):
        raise FrameError("body", f"{len(slides)} of {len(work)} sequences of a plan have SWA slots, expected all")
    return PlanColumns(
        step=plan.step,
        rids=tuple(w.rid for w in work),
        rows_N=np.array([w.row for w in work], np.int64),
        starts_N=np.array([w.start for w in work], np.int64),
        counts_N=np.array([len(w.tokens) for w in work], np.int64),
        tokens_T=np.concatenate([w.tokens for w in work]) if work else _NONE.astype(np.int32),
        slots_T=np.concatenate([w.slots for w in work]) if work else _NONE,
        swa_slots_T=np.concatenate(slides) if slides else None,
        sampling_S=np.array([index for index, _ in sampling], np.int64),
        set_S=np.array(set_S, np.int64),
        seeds_S=tuple(s.seed for _, s in sampling),
        positions_S=np.array([s.position for _, s in sampling], np.int64),
        generated_S=np.array([s.generated for _, s in sampling], np.int64),
        sets=tuple(sets),
        penalties=tuple(
            _Penalty(index, s.prompt_ids, s.output_ids)
            for index, s in sampling
            if s.prompt_ids is not None or s.output_ids is not None
        ),
        asked=tuple(
            _Asked(index, w.prompt_logprobs, w.next_ids)
            for index, w in enumerate(work)
            if w.prompt_logprobs is not None
        ),
        writes=tuple(_Write(w.row, w.start, w.part, w.slots) for w in plan.table_writes),
    )


def unpack_plan(columns: PlanColumns) -> StepPlan:
    """The reverse. Raises FrameError where the columns do not fit each other."""
    count = len(columns.rids)
    _same(count, rows=columns.rows_N, starts=columns.starts_N, counts=columns.counts_N)
    ends = np.cumsum(columns.counts_N)
    if count and int(columns.counts_N.min()) < 1:
        raise FrameError("body", "a sequence of a plan without tokens, expected at least one")
    tokens = int(ends[-1]) if count else 0
    _same(tokens, tokens=columns.tokens_T, slots=columns.slots_T)
    if columns.swa_slots_T is not None:
        _same(tokens, swa_slots=columns.swa_slots_T)
    specs = _specs(columns, count)
    asked = {item.work: item for item in columns.asked}
    cuts = [0, *ends.tolist()]
    rows, starts = columns.rows_N.tolist(), columns.starts_N.tolist()
    tokens_T, slots_T, swa_T = columns.tokens_T, columns.slots_T, columns.swa_slots_T
    work = []
    for index, rid in enumerate(columns.rids):
        begin, end = cuts[index], cuts[index + 1]
        wanted = asked.get(index)
        work.append(
            SeqWork(
                rid=rid,
                row=rows[index],
                start=starts[index],
                tokens=tokens_T[begin:end],
                slots=slots_T[begin:end],
                swa_slots=None if swa_T is None else swa_T[begin:end],
                sample=specs.get(index),
                prompt_logprobs=None if wanted is None else wanted.count,
                next_ids=None if wanted is None else wanted.next_ids,
            )
        )
    writes = tuple(TableWrite(row=w.row, start=w.start, slots=w.slots, part=w.part) for w in columns.writes)
    return StepPlan(step=columns.step, work=tuple(work), table_writes=writes)


def _specs(columns: PlanColumns, count: int) -> dict[int, SampleSpec]:
    """How those that sample do it, by their place."""
    places, sets = columns.sampling_S.tolist(), columns.set_S.tolist()
    _same(len(places), sets=sets, seeds=columns.seeds_S, positions=columns.positions_S, generated=columns.generated_S)
    if any(not 0 <= place < count for place in places) or any(not 0 <= s < len(columns.sets) for s in sets):
        raise FrameError("body", f"a plan of {count} sequences samples at {places} with sets {sets}")
    known = [_SETS.unpacked(data) for data in columns.sets]
    back = {item.work: item for item in columns.penalties}
    positions, generated = columns.positions_S.tolist(), columns.generated_S.tolist()
    specs = {}
    for index, place in enumerate(places):
        params, stop_ids = known[sets[index]]
        looks = back.get(place)
        specs[place] = SampleSpec(
            params=params,
            seed=columns.seeds_S[index],
            position=positions[index],
            generated=generated[index],
            stop_ids=stop_ids,
            prompt_ids=None if looks is None else looks.prompt_ids,
            output_ids=None if looks is None else looks.output_ids,
        )
    return specs


def _same(count: int, **columns: Sequence[object] | NDArray[np.generic]) -> None:
    for name, column in columns.items():
        if len(column) != count:
            raise FrameError("body", f"column {name} of a plan has {len(column)} entries, expected {count}")


def pack_result(result: StepResult) -> ResultColumns:
    """A result in columns."""
    return ResultColumns(
        step=result.step,
        tokens=tuple(seq.token for seq in result.seqs),
        logprobs=tuple(
            _Seq(index, seq.logprobs, seq.prompt_logprobs)
            for index, seq in enumerate(result.seqs)
            if seq.logprobs is not None or seq.prompt_logprobs
        ),
    )


def unpack_result(columns: ResultColumns) -> StepResult:
    """The reverse."""
    with_logprobs = {seq.work: seq for seq in columns.logprobs}
    seqs = []
    for index, token in enumerate(columns.tokens):
        more = with_logprobs.get(index)
        if more is None:
            seqs.append(SeqResult(token=token))
        else:
            seqs.append(SeqResult(token=token, logprobs=more.logprobs, prompt_logprobs=more.prompt_logprobs))
    return StepResult(step=columns.step, seqs=tuple(seqs))
