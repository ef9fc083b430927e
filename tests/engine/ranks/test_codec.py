"""Frames between ranks: what goes in comes out, what is wrong in any way is a FrameError and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serinus.core.errors import FrameError
from serinus.core.moves import Move, MoveDone, MoveKind, StorageDone
from serinus.core.parts import Part
from serinus.core.plan import SampleSpec, SeqResult, SeqWork, StepPlan, StepResult, TableWrite
from serinus.core.request import TokenLogprobs
from serinus.core.sampling import SamplingParams
from serinus.engine.ranks import RunStep, StepDone, Stop
from serinus.engine.ranks.codec import (
    ANSWERS,
    FINDINGS,
    ORDERS,
    decode_header,
    decode_report,
    encode_header,
    encode_report,
)
from serinus.engine.ranks.orders import RankCounts
from serinus.engine.ranks.plans import pack_plan
from serinus.engine.ranks.tiers import CancelPages, CopyPages, QueryPages, ReadPages, WritePages
from serinus.parallel import Decision, DecisionKind, DecisionLog, OrderTo, Report, ReportKind, StepHeader
from serinus.wire import decode, encode
from serinus.wire.messages import Ack, RankHeader

QUICK = settings(max_examples=60, deadline=None)


def same(a: Any, b: Any) -> bool:
    """Equality of plain data with arrays in it."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def ids(low: int = 0, high: int = 1 << 20) -> st.SearchStrategy[int]:
    return st.integers(low, high)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    slides = draw(st.booleans())
    params = draw(
        st.lists(
            st.builds(
                SamplingParams,
                temperature=st.floats(0, 2),
                top_p=st.floats(0.1, 1),
                max_new_tokens=st.none() | st.integers(1, 9),
                repetition_penalty=st.floats(0.5, 2),
                logit_bias=st.dictionaries(ids(), st.floats(-5, 5), max_size=2),
                logprobs=st.none() | st.integers(0, 5),
            ),
            min_size=1,
            max_size=3,
        )
    )
    work = []
    for index in range(draw(st.integers(0, 6))):
        count = draw(st.integers(1, 5))
        sample = None
        if draw(st.booleans()):
            looks = draw(st.booleans())
            sample = SampleSpec(
                params=draw(st.sampled_from(params)),
                seed=draw(st.integers(0, (1 << 64) - 1)),
                position=draw(ids()),
                generated=draw(ids()),
                stop_ids=draw(st.tuples(ids(), ids()) | st.just(())),
                prompt_ids=np.arange(count, dtype=np.int32) if looks else None,
                output_ids=np.zeros(0, np.int32) if looks else None,
            )
        asks = draw(st.none() | st.integers(0, 5))
        work.append(
            SeqWork(
                rid=draw(st.text(max_size=9)) + str(index),
                row=draw(ids(1)),
                start=draw(ids()),
                tokens=np.array(draw(st.lists(ids(), min_size=count, max_size=count)), np.int32),
                slots=np.arange(count, dtype=np.int64) + draw(ids(1)),
                swa_slots=np.arange(count, dtype=np.int64) + 1 if slides else None,
                sample=sample,
                prompt_logprobs=asks,
                next_ids=None if asks is None else np.arange(count, dtype=np.int32),
            )
        )
    writes = tuple(
        TableWrite(row=draw(ids(1)), start=draw(ids()), slots=np.arange(draw(st.integers(0, 4000)), dtype=np.int64),
                   part=draw(st.sampled_from(Part)))
        for _ in range(draw(st.integers(0, 3)))
    )  # fmt: skip
    return StepPlan(step=draw(ids(1)), work=tuple(work), table_writes=writes)


logprobs = st.builds(
    TokenLogprobs,
    logprob=st.none() | st.floats(-9, 0),
    top_ids=st.just((1, 2)),
    top_logprobs=st.just((-0.5, -1.5)),
)
results = st.builds(
    StepResult,
    step=ids(1),
    seqs=st.lists(
        st.builds(
            SeqResult,
            token=st.none() | ids(),
            logprobs=st.none() | logprobs,
            prompt_logprobs=st.lists(logprobs, max_size=2).map(tuple),
        ),
        max_size=5,
    ).map(tuple),
)


def arrays(dtype: str, size_max: int = 9) -> st.SearchStrategy[NDArray[Any]]:
    return st.integers(0, size_max).map(lambda size: np.arange(size).astype(dtype))


moves = st.builds(
    Move,
    op=ids(1),
    kind=st.sampled_from(MoveKind),
    part=st.sampled_from(Part),
    source=arrays("int32", 5000),
    target=arrays("int32"),
)
keys = st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple)
orders = st.one_of(
    st.builds(RunStep, plan=plans()),
    st.builds(Stop, reason=st.text(max_size=9)),
    st.builds(CopyPages, moves=st.lists(moves, max_size=3).map(tuple)),
    st.builds(QueryPages, op=ids(1), keys=keys, parts=st.just((Part.FULL, Part.SWA))),
    st.builds(ReadPages, op=ids(1), part=st.sampled_from(Part), keys=keys, pages=arrays("int32")),
    st.builds(WritePages, op=ids(1), part=st.sampled_from(Part), keys=keys, pages=arrays("int32")),
    st.builds(CancelPages, op=ids(1)),
)
answers = st.one_of(
    st.builds(StepDone, step=ids(1), result=st.none() | results, seconds=st.floats(0, 9), wait_seconds=st.floats(0, 9)),
    st.builds(RankCounts, counts=st.just((0, 1, 2, 3, 4, 5))),
    st.builds(MoveDone, op=ids(1), ok=st.booleans(), error=st.text(max_size=9), seconds=st.floats(0, 9)),
    st.builds(StorageDone, op=ids(1), present=st.lists(arrays("bool"), max_size=2).map(tuple), good=ids()),
)


def header_of(*given_orders: object) -> StepHeader:
    log = DecisionLog()
    log.decide(DecisionKind.PLACE, "r1", queue="waiting")
    log.decide(DecisionKind.RUN, batch=["r1", "r2"])
    return log.header(3, given_orders)


@pytest.mark.slow
@QUICK
@given(st.lists(orders, max_size=3))
def test_a_header_comes_out_as_it_went_in(given_orders: list[object]) -> None:
    header = header_of(*given_orders)
    assert same(decode_header(encode_header(header, 1)), header)


@pytest.mark.slow
@QUICK
@given(answers)
def test_a_report_comes_out_as_it_went_in(answer: object) -> None:
    report = Report(rank=2, kind=ReportKind.ANSWER, key="k", reason="why", step=9, body=answer)
    assert same(decode_report(encode_report(report), 2), report)


def test_an_order_for_one_rank_travels_to_that_rank_alone() -> None:
    header = header_of(OrderTo(rank=1, order=Stop(reason="you")), Stop(reason="all"), OrderTo(rank=2, order=Stop()))
    assert decode_header(encode_header(header, 1)).orders == (Stop(reason="you"), Stop(reason="all"))
    assert decode_header(encode_header(header, 3)).orders == (Stop(reason="all"),)


def test_arrays_that_came_may_be_written_and_keep_their_dtype() -> None:
    pages = np.arange(20_000, dtype=np.int32)
    header = header_of(*(ReadPages(op=1, part=Part.FULL, keys=(), pages=each) for each in (pages[:3], pages)))
    small, large = decode_header([bytes(part) for part in encode_header(header, 1)]).orders
    for order, expected in ((small, pages[:3]), (large, pages)):
        assert isinstance(order, ReadPages)
        assert order.pages.dtype == np.int32
        assert np.array_equal(order.pages, expected)
        order.pages[0] = 5
    assert pages[0] == 0


def test_a_step_of_many_requests_takes_few_bytes() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9)
    work = tuple(
        SeqWork(rid=f"request-{i}", row=i + 1, start=100, tokens=np.array([7], np.int32),
                slots=np.array([4 * i + 4], np.int64),
                sample=SampleSpec(params=params, seed=i, position=101, generated=3))
        for i in range(64)
    )  # fmt: skip
    parts = encode_header(header_of(RunStep(plan=StepPlan(step=1, work=work))), 1)
    assert sum(len(part) for part in parts) < 6000


@QUICK
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode_header([data])
    with pytest.raises(FrameError):
        decode_report([data], 1)


@pytest.mark.slow
@QUICK
@given(
    st.sampled_from([kind.__name__ for kind in (*ORDERS, *ANSWERS, *FINDINGS)]),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), (1 << 64) - 1)
        | st.floats()
        | st.text(max_size=5)
        | st.binary(max_size=9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=20,
    ),
)
def test_an_order_of_any_other_content_is_refused_or_what_its_type_says(name: str, body: object) -> None:  # fmt: skip
    message = RankHeader(step=1, digest=0, orders=((name, msgspec.Raw(msgspec.msgpack.encode(body))),))
    try:
        (order,) = decode_header(encode(message)).orders
    except FrameError:
        return
    assert type(order) in ORDERS
    assert type(order).__name__ == name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rids": ("a",)}, "a plan of 1 requests has 2 rows"),
        ({"work_3N": np.array([[1, 2], [0, 0], [0, 2]], np.int32)}, "a stretch of 0"),
        ({"work_3N": np.array([[1, 2], [0, -1], [1, 1]], np.int32)}, "numbers from 0"),
        ({"work_3N": np.zeros((2, 2), np.int32)}, "expected 3"),
        ({"work_3N": np.zeros((3, 2), np.int64)}, "expected int32"),
        ({"tokens_T": np.zeros(3, np.int32)}, "column tokens of a plan"),
        ({"samples_4S": np.array([[0, 2], [0, 0], [1, 1], [0, 0]], np.int32)}, "samples at"),
        ({"samples_4S": np.array([[0, 1], [0, 9], [1, 1], [0, 0]], np.int32)}, "with sets"),
        ({"seeds_S": (1,)}, "column seeds"),
        ({"writes_4K": np.array([[1], [0], [2], [0]], np.int32)}, "column written"),
        ({"writes_4K": np.array([[1], [0], [0], [7]], np.int32)}, "table writes of parts"),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(change: dict[str, Any], reason: str) -> None:
    params = SamplingParams()
    work = tuple(
        SeqWork(rid=rid, row=row, start=0, tokens=np.array([7], np.int32), slots=np.array([row], np.int64),
                sample=SampleSpec(params=params, seed=1, position=1, generated=0))
        for rid, row in (("a", 1), ("b", 2))
    )  # fmt: skip
    columns = msgspec.structs.replace(pack_plan(StepPlan(step=1, work=work)), **change)
    with pytest.raises(FrameError, match=reason):
        decode_header(_forged("RunStep", columns))


def _forged(name: str, columns: object) -> Any:
    def hook(value: Any) -> object:
        return [value.dtype.str, list(value.shape), value.tobytes(), -1]

    data = msgspec.msgpack.Encoder(enc_hook=hook).encode(columns)
    return encode(RankHeader(step=1, digest=0, orders=((name, msgspec.Raw(data)),)))


def test_an_array_beyond_the_payload_or_of_a_strange_dtype_is_refused() -> None:
    for packed in (
        ["<i4", [4], b"", 0],
        ["<i4", [4], b"\0" * 15, -1],
        ["<f2", [1], b"\0\0", -1],
        ["|O", [1], b"\0" * 8, -1],
        ["<i4", [-1], b"", -1],
        ["<i4", [1, 1, 1], b"\0" * 4, -1],
        ["<i8", [1], b"\0" * 8, -1],
    ):
        body = {"op": 1, "part": 0, "keys": [], "pages": packed}
        message = RankHeader(step=1, digest=0, orders=(("ReadPages", msgspec.Raw(msgspec.msgpack.encode(body))),))
        with pytest.raises(FrameError):
            decode_header(encode(message))


def test_an_answer_is_no_order_and_a_frame_of_another_kind_is_no_header() -> None:
    report = encode_report(Report(rank=1, kind=ReportKind.STEP, body=StepDone(step=1)))
    with pytest.raises(FrameError, match="expected RankHeader"):
        decode_header(report)
    with pytest.raises(FrameError, match="expected RankReport"):
        decode_report(encode(Ack()), 1)
    done = msgspec.Raw(msgspec.msgpack.encode({"op": 1, "ok": True}))
    with pytest.raises(FrameError, match="MoveDone"):
        decode_header(encode(RankHeader(step=1, digest=0, orders=(("MoveDone", done),))))


def test_what_nobody_registered_does_not_leave() -> None:
    @dataclass(frozen=True)
    class Strange:
        x: int = 1

    with pytest.raises(FrameError, match="Strange"):
        encode_header(header_of(Strange()), 1)


@pytest.mark.parametrize("payload", [b"[1]", b"nonsense", b"[" * 100_000, b"\xff"])
def test_decisions_must_be_decisions(payload: bytes) -> None:
    with pytest.raises(FrameError, match="decision 1"):
        decode_header(encode(RankHeader(step=1, digest=0, decisions=((1, "place", "r", payload),))))
    with pytest.raises(FrameError, match="decision 2"):
        decode_header(encode(RankHeader(step=1, digest=0, decisions=((2, "dance", "r", b"{}"),))))


def test_a_decision_keeps_its_digest_on_the_way() -> None:
    """Payloads are JSON: what a rank folds is what the leader folded."""
    header = header_of()
    decisions = decode_header(encode_header(header, 1)).decisions
    assert [d.folded(5) for d in decisions] == [d.folded(5) for d in header.decisions]
    assert decisions[1] == Decision(number=2, kind=DecisionKind.RUN, payload={"batch": ["r1", "r2"]})
    assert isinstance(decode(encode_header(header, 1)).message, RankHeader)
