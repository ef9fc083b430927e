"""Plans and results as they travel between ranks: columns instead of one object for each sequence.

A step of 64 decoding requests is 64 small objects with the same sampling parameters again and again. On the line there
is one array for each field, and each set of parameters once; both ends remember the sets they have seen as bytes, so
that a plan is read without checking the same parameters in every step. Memory of neither end matters: it may forget.

Work that a plan takes of what the one before has ahead does not travel again, but for its tokens: the reader of a line
keeps what is ahead. Where sampling looks back at tokens it comes as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import BadSampling, FrameError
from serinus.core.history import TokenHistory
from serinus.core.parts import Part
from serinus.core.plan import SampleSpec, SeqResult, SeqWork, StepPlan, StepResult, TableWrite, WorkAhead
from serinus.core.request import TokenLogprobs
from serinus.core.sampling import SamplingParams

_SETS_MAX: Final = 4096
"""Sets of sampling parameters that an end remembers at most; then it forgets all."""
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Set(msgspec.Struct, frozen=True, array_like=True):
    """Parameters and the ids forbidden while an answer is too short."""

    sampling: SamplingParams
    stop_ids: tuple[int, ...]


class _Penalty(msgspec.Struct, frozen=True, array_like=True):
    """What a sampler with penalties looks back at."""

    work: Count
    seen: NDArray[np.uint8]
    output_ids: NDArray[np.int32]
    output_times: NDArray[np.float32]


class _Output(msgspec.Struct, frozen=True, array_like=True):
    """What a grammar follows: the tokens of the answer so far."""

    work: Count
    tokens: NDArray[np.int32]


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    """Work that wants something of each token of its prompt."""

    work: Count
    count: Count | None
    next_ids: NDArray[np.int32] | None
    pooled: Count


class PlanColumns(msgspec.Struct, frozen=True, array_like=True):
    """core.StepPlan; P = parts, N = sequences, T = tokens, S = sequences that sample, K = table writes, X = slots they
    write."""

    step: Count
    rids: tuple[str, ...]
    work_4N: NDArray[np.int32]
    """Row, start, token count, 1 where it is verified as a whole."""
    chains_N: NDArray[np.int64]
    tokens_T: NDArray[np.int32]
    parts_P: tuple[Count, ...]
    """The parts of the model, FULL first."""
    slots_PT: NDArray[np.int64]
    samples_4S: NDArray[np.int32]
    """Which of the N, which of `sets`, position, tokens generated."""
    seeds_S: tuple[int, ...]
    sets: tuple[bytes, ...]
    penalties: tuple[_Penalty, ...]
    outputs: tuple[_Output, ...]
    asked: tuple[_Asked, ...]
    writes_4K: NDArray[np.int32]
    """Row, start, slot count, part."""
    written_X: NDArray[np.int64]
    takes_N: NDArray[np.int64] | None
    ahead: PlanColumns | None
    """Work ahead, as the plan that it would be."""
    follows_A: NDArray[np.int64]
    """Of each work ahead that goes on by a token, the number in `work` of what it goes on behind; the rest is prompt
    chunks."""
    chooses: bool
    """As WorkAhead has it; what sampling looks back at comes with the next plan where it does not."""


class _Seq(msgspec.Struct, frozen=True, array_like=True):
    """The log-probabilities and hidden states of one sequence."""

    work: Count
    logprobs: TokenLogprobs | None
    prompt_logprobs: tuple[TokenLogprobs, ...]
    pooled: bytes


class ResultColumns(msgspec.Struct, frozen=True, array_like=True):
    """A core.StepResult as columns."""

    step: Count
    tokens: tuple[int | None, ...]
    logprobs: tuple[_Seq, ...]
    ended: tuple[Count, ...]
    """Those that end with their token, whatever it is."""
    failures: tuple[tuple[Count, str], ...]
    mask_seconds: float | None
    mask_wait_seconds: float


_ENCODER: Final = msgspec.msgpack.Encoder()
_SET_DECODER: Final = msgspec.msgpack.Decoder(_Set)


_PARTS: Final = {part.value: part for part in Part}


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
        data = _ENCODER.encode(_Set(sampling=params, stop_ids=stop_ids))
        self._bytes[key] = (params, data)  # kept alive, so that its id stays its own
        return data

    def unpacked(self, data: bytes) -> tuple[SamplingParams, tuple[int, ...]]:
        known = self._sets.get(data)
        if known is None:
            if len(self._sets) >= _SETS_MAX:
                self._sets.clear()
            try:
                found = _SET_DECODER.decode(data)
                known = found.sampling, found.stop_ids
            except BadSampling as error:
                raise FrameError("body", f"sampling parameters of a plan: {error}") from None
            self._sets[data] = known
        return known


_SETS: Final = _Sets()
_NONE: Final[NDArray[np.int64]] = np.zeros(0, np.int64)


def pack_plan(plan: StepPlan, *, looks_back: bool = True) -> PlanColumns:
    """A plan in columns, without the tokens that sampling looks back at unless it `looks_back`. Cost: about 1 us a
    sequence ahead, and for one that was not. Raises FrameError: its arrays do not fit each other."""
    work, writes, ahead = () if _is_known(plan) else plan.work, plan.table_writes, plan.ahead
    sampling = [(index, w.sample) for index, w in enumerate(work) if w.sample is not None]
    sets: dict[bytes, int] = {}
    packed = _SETS.packed
    samples = [
        (index, sets.setdefault(packed(s.params, s.stop_ids), len(sets)), s.position, s.generated)
        for index, s in sampling
    ]
    parts = tuple(work[0].slots) if work else (Part.FULL,)
    if any(len(w.slots) != len(parts) for w in work):
        raise FrameError("body", f"sequences of a plan have slots of other parts than {parts}, expected the same")
    return PlanColumns(
        step=plan.step,
        rids=tuple([w.rid for w in work]),
        work_4N=_columns([(w.row, w.start, len(w.tokens), w.whole) for w in work], 4),
        chains_N=np.array([w.chain for w in work], np.int64),
        tokens_T=np.concatenate([w.tokens for w in plan.work]) if plan.work else _NONE.astype(np.int32),
        parts_P=tuple([int(part) for part in parts]),
        slots_PT=_slots(work, parts),
        samples_4S=_columns(samples, 4),
        seeds_S=tuple([s.seed for _, s in sampling]),
        sets=tuple(sets),
        penalties=tuple(
            _Penalty(index, s.history.seen, s.history.output_ids, s.history.output_times)
            for index, s in sampling
            if looks_back and s.history is not None
        ),
        outputs=tuple(_Output(index, s.output) for index, s in sampling if looks_back and s.output is not None),
        asked=tuple(
            _Asked(index, w.prompt_logprobs, w.next_ids, w.pooled) for index, w in enumerate(work) if w.asks_each
        ),
        writes_4K=_columns([(w.row, w.start, len(w.slots), w.part.value) for w in writes], 4),
        written_X=np.concatenate([w.slots for w in writes]) if writes else _NONE,
        takes_N=plan.takes,
        ahead=None if ahead is None else pack_plan(StepPlan(step=plan.step + 1, work=ahead.work), looks_back=False),
        follows_A=_NONE if ahead is None else ahead.follows,
        chooses=ahead is None or ahead.chooses,
    )


def _is_known(plan: StepPlan) -> bool:
    """Whether all of its work was said as the work ahead of the plan before."""
    if plan.takes is None:
        return False
    params = {id(w.sample.params): w.sample.params for w in plan.work if w.sample is not None}
    return not any(each.looks_back for each in params.values())


def _slots(work: Sequence[SeqWork], parts: Sequence[Part]) -> NDArray[np.int64]:
    if not work:
        return np.zeros((len(parts), 0), np.int64)
    rows = [np.concatenate([w.slots[part] for w in work]) for part in parts]
    return rows[0][None] if len(rows) == 1 else np.stack(rows)


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> NDArray[np.int32]:
    """Rows of numbers as columns: int array [width, len(rows)]."""
    return np.array(rows, np.int32).T if rows else np.zeros((width, 0), np.int32)


def unpack_plan(columns: PlanColumns, *, looks_back: bool = True, before: Sequence[SeqWork] = ()) -> StepPlan:
    """The reverse. `before`: the work ahead of the plan before, which this one may take. Raises FrameError where the
    columns do not fit each other, or it. Cost: about 2 us a sequence that was not ahead."""
    takes_N, is_known = columns.takes_N, columns.takes_N is not None and not columns.rids
    takes: list[int] = [] if takes_N is None else takes_N.tolist()
    if takes_N is not None and not (takes and min(takes) >= 0):
        raise FrameError("body", f"a plan takes {takes} of the work ahead, expected numbers from 0")
    work = _taken(takes, columns.tokens_T, before) if is_known else _work(columns, looks_back=looks_back)
    if takes_N is not None:
        _same(len(work), takes=takes)
    return StepPlan(
        step=columns.step, work=tuple(work), table_writes=_writes(columns), ahead=_ahead(columns, work), takes=takes_N
    )


def _taken(takes: Sequence[int], tokens_T: NDArray[np.int32], before: Sequence[SeqWork]) -> list[SeqWork]:
    """What came as the work ahead of the plan before, with the tokens that are known by now."""
    if max(takes) >= len(before):
        raise FrameError("body", f"a plan takes {takes} of the work ahead, expected numbers below {len(before)}")
    work = [before[number] for number in takes]
    cuts = _cuts([len(each.tokens) for each in work], 1)
    _same(cuts[-1], tokens=tokens_T)
    for each, begin, end in zip(work, cuts[:-1], cuts[1:], strict=True):
        each.tokens = tokens_T[begin:end]
    return work


def _work(columns: PlanColumns, *, looks_back: bool) -> list[SeqWork]:
    rids = columns.rids
    rows, starts, counts, wholes = _lists(columns.work_4N, 4, "work")
    if len(rids) != len(rows):
        raise FrameError("body", f"a plan of {len(rids)} requests has {len(rows)} rows, expected one for each")
    cuts = _cuts(counts, 1)
    tokens_T, parts = columns.tokens_T, columns.parts_P
    _same(cuts[-1], tokens=tokens_T)
    _same(len(rids), chains=columns.chains_N)
    chains = columns.chains_N.tolist()
    known = bool(parts) and set(parts) <= _PARTS.keys() and len(set(parts)) == len(parts)
    if not known or columns.slots_PT.shape != (len(parts), cuts[-1]):
        shape = columns.slots_PT.shape
        raise FrameError("body", f"slots {shape} of parts {parts} for {cuts[-1]} tokens, expected a row for each part")
    slots_P = [(_PARTS[part], slots_T) for part, slots_T in zip(parts, columns.slots_PT, strict=True)]
    (first, slots_T), others = slots_P[0], slots_P[1:]
    work = []
    for rid, row, start, begin, end, whole, chain, spec in zip(
        rids, rows, starts, cuts[:-1], cuts[1:], wholes, chains, _specs(columns, len(rids), looks_back=looks_back),
        strict=True,
    ):  # fmt: skip
        slots = {first: slots_T[begin:end]}
        for part, others_T in others:
            slots[part] = others_T[begin:end]
        work.append(
            SeqWork(
                rid=rid,
                row=row,
                start=start,
                tokens=tokens_T[begin:end],
                slots=slots,
                chain=chain,
                sample=spec,
                whole=whole > 0,
            )
        )
    _below(len(work), columns.asked)
    for item in columns.asked:
        each = work[item.work]
        each.prompt_logprobs, each.next_ids, each.pooled = item.count, item.next_ids, item.pooled
    return work


def _ahead(columns: PlanColumns, behind: Sequence[SeqWork]) -> WorkAhead | None:
    """`behind`: the work of the plan itself."""
    if columns.ahead is None:
        return None
    work, follows = unpack_plan(columns.ahead, looks_back=False).work, columns.follows_A
    sampling = [number for number, each in enumerate(behind) if each.sample is not None]
    if not work or len(follows) > len(work) or not set(sampling).issuperset(follows.tolist()):
        raise FrameError(
            "body",
            f"{len(work)} work ahead goes on behind {follows.tolist()}, expected some of {sampling}, which sample",
        )
    tokens, chunks = work[: len(follows)], work[len(follows) :]
    if any(len(each.tokens) != 1 or each.sample is None for each in tokens):
        raise FrameError("body", "work ahead of many tokens, or that does not sample; expected one that samples")
    if chunks and (not columns.chooses or any(each.asks_each for each in chunks)):
        raise FrameError("body", "prompt chunks ahead that the host waits for, expected what it need not wait for")
    params = {id(each.sample.params): each.sample.params for each in work if each.sample is not None}
    if columns.chooses and any(each.looks_back for each in params.values()):
        raise FrameError("body", "work ahead whose tokens are chosen by those before them, expected only to compute it")
    return WorkAhead(work=work, follows=follows, chooses=columns.chooses)


def _specs(columns: PlanColumns, count: int, *, looks_back: bool) -> list[SampleSpec | None]:
    """How each samples; None of those that do not."""
    places, sets, positions, generated = _lists(columns.samples_4S, 4, "samples")
    seeds = columns.seeds_S
    _same(len(places), seeds=seeds)
    if not looks_back and (columns.penalties or columns.outputs):
        raise FrameError("body", "work ahead with what sampling looks back at, expected that with the next plan")
    if places and (min(places) < 0 or max(places) >= count or min(sets) < 0 or max(sets) >= len(columns.sets)):
        raise FrameError("body", f"a plan of {count} sequences samples at {places} with sets {sets}")
    known = [_SETS.unpacked(data) for data in columns.sets]
    specs: list[SampleSpec | None] = [None] * count
    for place, number, position, tokens, seed in zip(places, sets, positions, generated, seeds, strict=True):
        params, stop_ids = known[number]
        specs[place] = SampleSpec(params=params, seed=seed, position=position, generated=tokens, stop_ids=stop_ids)
    _below(count, columns.penalties)
    for penalty in columns.penalties:
        if (spec := specs[penalty.work]) is not None:
            spec.history = _history(penalty)
    outputs = {item.work: item.tokens for item in columns.outputs}
    if outputs or (looks_back and any(params.grammar is not None for params, _ in known)):
        for place, spec in enumerate(specs):
            if (spec is not None and spec.params.grammar is not None) != (place in outputs):
                raise FrameError(
                    "body", f"sequence {place} of a plan: a grammar needs its output, and nothing else does"
                )
            if spec is not None:
                spec.output = outputs.get(place)
    return specs


def _below(count: int, items: Sequence[_Penalty | _Asked]) -> None:
    for item in items:
        if item.work >= count:
            raise FrameError("body", f"a plan of {count} sequences names number {item.work}, expected one of them")


def _history(item: _Penalty) -> TokenHistory:
    _same(len(item.output_ids), output_times=item.output_times)
    if len(item.output_ids) and int(item.output_ids.min()) < 0:
        raise FrameError("body", f"a plan penalises id {int(item.output_ids.min())}, expected ids from 0")
    return TokenHistory.of(item.seen, item.output_ids, item.output_times)


def _writes(columns: PlanColumns) -> tuple[TableWrite, ...]:
    rows, starts, counts, parts = _lists(columns.writes_4K, 4, "writes")
    cuts = _cuts(counts, 0)
    _same(cuts[-1], written=columns.written_X)
    if not set(parts) <= _PARTS.keys():
        raise FrameError("body", f"table writes of parts {parts}, expected {list(_PARTS)}")
    return tuple(
        TableWrite(
            row=row, start=start, slots=columns.written_X[cuts[index] : cuts[index + 1]], part=_PARTS[parts[index]]
        )
        for index, (row, start) in enumerate(zip(rows, starts, strict=True))
    )


def _lists(array: NDArray[np.int32], width: int, name: str) -> list[list[int]]:
    """Its rows. Raises FrameError: not `width` of them, or a number below 0."""
    if array.ndim != 2 or array.shape[0] != width or (array.size and int(array.min()) < 0):
        raise FrameError("body", f"columns {name} of a plan, shape {array.shape}, expected {width} of numbers from 0")
    rows: list[list[int]] = array.tolist()
    return rows


def _cuts(counts: list[int], least: int) -> list[int]:
    """Where each stretch begins, and where the last one ends. Raises FrameError: one is shorter than `least`."""
    if counts and min(counts) < least:
        raise FrameError("body", f"a stretch of {min(counts)} in a plan, expected at least {least}")
    return list(accumulate(counts, initial=0))


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
            _Seq(index, seq.logprobs, seq.prompt_logprobs, seq.pooled)
            for index, seq in enumerate(result.seqs)
            if seq.logprobs is not None or seq.prompt_logprobs or seq.pooled
        ),
        ended=tuple(index for index, seq in enumerate(result.seqs) if seq.ends),
        failures=tuple((index, seq.failure) for index, seq in enumerate(result.seqs) if seq.failure),
        mask_seconds=result.mask_seconds,
        mask_wait_seconds=result.mask_wait_seconds,
    )


def unpack_result(columns: ResultColumns) -> StepResult:
    """The result that `pack_result` made these columns of."""
    with_logprobs = {seq.work: seq for seq in columns.logprobs}
    ended, failures = set(columns.ended), dict(columns.failures)
    seqs = []
    for index, token in enumerate(columns.tokens):
        more = with_logprobs.get(index)
        seq = SeqResult(token=token, ends=index in ended, failure=failures.get(index, ""))
        if more is not None:
            seq.logprobs, seq.prompt_logprobs, seq.pooled = more.logprobs, more.prompt_logprobs, more.pooled
        seqs.append(seq)
    return StepResult(
        step=columns.step, seqs=tuple(seqs), mask_seconds=columns.mask_seconds,
        mask_wait_seconds=columns.mask_wait_seconds,
    )  # fmt: skip
