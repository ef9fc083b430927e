"""Frames between ranks: what goes in comes out, what is wrong in any way is a FrameError and nothing else."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from serinus.core.errors import FrameError
from serinus.core.grammar import Grammar
from serinus.core.history import TokenHistory
from serinus.core.moves import Move, MoveDone, MoveKind, StorageDone
from serinus.core.parts import Part
from serinus.core.plan import SampleSpec, SeqResult, SeqWork, StepPlan, StepResult, TableWrite, WorkAhead
from serinus.core.request import TokenLogprobs
from serinus.core.sampling import SamplingParams
from serinus.ranks import RankHoldings, RunStep, StepDone, Stop
from serinus.ranks.codec import (
    ANSWERS,
    COMMANDS,
    FINDINGS,
    decode_answers,
    decode_header,
    encode_answers,
    encode_header,
    make_reader,
    pack_commands,
)
from serinus.ranks.plans import pack_plan, pack_result, unpack_result
from serinus.ranks.tiers import CancelPages, CopyPages, QueryPages, ReadPages, WritePages
from serinus.wire import Parts, encode
from serinus.wire.arrays import to_extension
from serinus.wire.messages import Ack, RankHeader

QUICK = settings(max_examples=60)


def same(a: Any, b: Any) -> bool:
    """Equality of plain data with arrays in it."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, TokenHistory):
        return type(a) is type(b) and all(
            same(getattr(a, name), getattr(b, name)) for name in ("seen", "output_ids", "output_times")
        )
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def ids(low: int = 0, high: int = 1 << 20) -> st.SearchStrategy[int]:
    return st.integers(low, high)


def history(tokens: list[int]) -> TokenHistory:
    """Of a prompt of 9 tokens, and of these."""
    made = TokenHistory(np.arange(9, dtype=np.int32))
    for token in tokens:
        made.add(token)
    return made


@st.composite
def work_ahead(draw: st.DrawFn, work: Sequence[SeqWork]) -> WorkAhead | None:
    going = [
        replace(each, tokens=each.tokens[:1], slots={part: slots[:1] for part, slots in each.slots.items()},
                prompt_logprobs=None, next_ids=None, sample=replace(each.sample, history=None, output=None))
        for each in work if each.sample is not None
    ]  # fmt: skip
    looks_back = any(each.sample is not None and each.sample.params.looks_back for each in going)
    follows = [index for index, each in enumerate(work) if each.sample is not None]
    plain = [each for each in work if each.sample is None or not each.sample.params.looks_back]
    chunks = [replace(each, prompt_logprobs=None, next_ids=None, pooled=0) for each in plain]
    chunks = [] if looks_back else chunks[: draw(st.integers(0, len(chunks)))]
    chooses = not looks_back and (bool(chunks) or draw(st.booleans()))
    done = (*going, *chunks)
    return WorkAhead(work=done, follows=np.array(follows, np.int64), chooses=chooses) if done else None


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    parts = draw(st.sampled_from([(Part.FULL,), (Part.FULL, Part.SWA), (Part.FULL, Part.SWA, Part.LATENT)]))
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
                grammar=st.sampled_from([None, Grammar("json_object"), Grammar("regex", "a+")]),
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
            chosen = draw(st.sampled_from(params))
            output = np.array(draw(st.lists(ids(), max_size=4)), np.int32)
            sample = SampleSpec(
                params=chosen,
                seed=draw(st.integers(0, (1 << 64) - 1)),
                position=draw(ids()),
                generated=draw(ids()),
                stop_ids=draw(st.tuples(ids(), ids()) | st.just(())),
                history=history(draw(st.lists(ids(), max_size=4))) if looks else None,
                output=None if chosen.grammar is None else output,
            )
        asks = draw(st.none() | st.integers(0, 5))
        work.append(
            SeqWork(
                rid=draw(st.text(max_size=9)) + str(index),
                row=draw(ids(1)),
                start=draw(ids()),
                tokens=np.array(draw(st.lists(ids(), min_size=count, max_size=count)), np.int32),
                slots={part: np.arange(count, dtype=np.int64) + draw(ids(1)) for part in parts},
                chain=draw(st.integers(-(1 << 63), (1 << 63) - 1)),
                sample=sample,
                whole=draw(st.booleans()),
                prompt_logprobs=asks,
                next_ids=None if asks is None else np.arange(count, dtype=np.int32),
                pooled=draw(st.integers(0, count)),
            )
        )
    writes = tuple(
        TableWrite(row=draw(ids(1)), start=draw(ids()), slots=np.arange(draw(st.integers(0, 4000)), dtype=np.int64),
                   part=draw(st.sampled_from(Part)))
        for _ in range(draw(st.integers(0, 3)))
    )  # fmt: skip
    ahead = draw(work_ahead(work)) if draw(st.booleans()) else None
    takes = np.array(draw(st.permutations(range(len(work)))), np.int64) if work and draw(st.booleans()) else None
    return StepPlan(step=draw(ids(1)), work=tuple(work), table_writes=writes, ahead=ahead, takes=takes)


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
            pooled=st.binary(max_size=8),
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
others = st.one_of(
    st.builds(Stop),
    st.builds(CopyPages, moves=st.lists(moves, max_size=3).map(tuple)),
    st.builds(QueryPages, op=ids(1), keys=keys, parts=st.just((Part.FULL, Part.SWA))),
    st.builds(ReadPages, op=ids(1), part=st.sampled_from(Part), keys=keys, pages=arrays("int32")),
    st.builds(WritePages, op=ids(1), part=st.sampled_from(Part), keys=keys, pages=arrays("int32")),
    st.builds(CancelPages, op=ids(1)),
)
commands = st.builds(RunStep, plan=plans()) | others
answers = st.one_of(
    st.builds(StepDone, step=ids(1), result=st.none() | results, seconds=st.floats(0, 9), wait_seconds=st.floats(0, 9)),
    st.builds(RankHoldings, counts=st.dictionaries(st.text(max_size=9), ids(), max_size=3)),
    st.builds(MoveDone, op=ids(1), ok=st.booleans(), error=st.text(max_size=9), seconds=st.floats(0, 9)),
    st.builds(StorageDone, op=ids(1), present=st.lists(arrays("bool"), max_size=2).map(tuple), good=ids()),
)


def header_of(*given: object) -> Parts:
    return encode_header(3, 77, pack_commands(given))


def ahead_of(command: object) -> list[SeqWork]:
    if not isinstance(command, RunStep) or command.plan.takes is None:
        return []
    plan, places = command.plan, command.plan.takes.tolist()
    work = {place: replace(each, tokens=each.tokens * 0) for place, each in zip(places, plan.work, strict=True)}
    return [work[place] for place in sorted(work)]


@pytest.mark.slow
@QUICK
@given(st.tuples(st.lists(commands, max_size=1), st.lists(others, max_size=2)).map(lambda two: [*two[0], *two[1]]))
def test_a_header_comes_out_as_it_went_in(given_commands: list[object]) -> None:
    packed, reader = pack_commands(given_commands), make_reader()
    for command in given_commands[:1]:  # what it takes was ahead; of its tokens only how many they are
        reader.work_ahead = ahead_of(command)
    header = decode_header(encode_header(5, 9, packed), reader)
    assert same(header.commands, tuple(given_commands))
    assert (header.number, header.digest, header.content) == (5, 9, packed.content)


@pytest.mark.slow
@QUICK
@given(st.lists(answers, max_size=3), st.text(max_size=9))
def test_answers_come_out_as_they_went_in(given_answers: list[object], failure: str) -> None:
    found = decode_answers(encode_answers(given_answers, failure))
    assert same(found.answers, tuple(given_answers))
    assert found.failure == failure


@pytest.mark.slow
@QUICK
@given(st.lists(commands, min_size=1, max_size=3), st.data())
def test_other_commands_have_another_content(given_commands: list[object], data: st.DataObject) -> None:
    """One left out, one repeated, two exchanged: the hash of a header shows each."""
    content = pack_commands(given_commands).content
    at = data.draw(st.integers(0, len(given_commands) - 1))
    others = [
        [*given_commands[:at], *given_commands[at + 1 :]],
        [*given_commands[: at + 1], *given_commands[at:]],
    ]
    if len(given_commands) > 1 and not same(given_commands[0], given_commands[-1]):
        others.append([given_commands[-1], *given_commands[1:-1], given_commands[0]])
    assert all(pack_commands(each).content != content for each in others)


def test_arrays_that_came_may_be_written_and_keep_their_dtype() -> None:
    pages = np.arange(20_000, dtype=np.int32)
    parts = header_of(*(ReadPages(op=1, part=Part.FULL, keys=(), pages=each) for each in (pages[:3], pages)))
    small, large = decode_header([bytes(part) for part in parts]).commands
    for command, expected in ((small, pages[:3]), (large, pages)):
        assert isinstance(command, ReadPages)
        assert command.pages.dtype == np.int32
        assert np.array_equal(command.pages, expected)
        command.pages[0] = 5
    assert pages[0] == 0


def test_a_step_of_many_requests_takes_few_bytes() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9)
    work = tuple(
        SeqWork(rid=f"request-{i}", row=i + 1, start=100, tokens=np.array([7], np.int32),
                slots={Part.FULL: np.array([4 * i + 4], np.int64)},
                sample=SampleSpec(params=params, seed=i, position=101, generated=3))
        for i in range(64)
    )  # fmt: skip
    parts = header_of(RunStep(plan=StepPlan(step=1, work=work)))
    assert sum(len(part) for part in parts) < 6000


@QUICK
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode_header([data])
    with pytest.raises(FrameError):
        decode_answers([data])


@pytest.mark.slow
@QUICK
@given(
    st.sampled_from([kind.__name__ for kind in (*COMMANDS, *ANSWERS, *FINDINGS)]),
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
def test_a_command_of_any_other_content_is_refused_or_what_its_type_says(name: str, body: object) -> None:  # fmt: skip
    message = RankHeader(number=1, digest=0, commands=((name, msgspec.Raw(msgspec.msgpack.encode(body))),))
    try:
        (command,) = decode_header(encode(message)).commands
    except FrameError:
        return
    assert type(command) in COMMANDS
    assert type(command).__name__ == name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rids": ("a",)}, "a plan of 1 requests has 2 rows"),
        ({"work_4N": np.array([[1, 2], [0, 0], [0, 2], [0, 0]], np.int32)}, "a stretch of 0"),
        ({"work_4N": np.array([[1, 2], [0, -1], [1, 1], [0, 1]], np.int32)}, "numbers from 0"),
        ({"work_4N": np.zeros((3, 2), np.int32)}, "expected 4"),
        ({"work_4N": np.zeros((4, 2), np.int64)}, "expected int32"),
        ({"tokens_T": np.zeros(3, np.int32)}, "column tokens of a plan"),
        ({"slots_PT": np.zeros((1, 3), np.int64)}, "expected a row for each part"),
        ({"parts_P": (0, 0), "slots_PT": np.zeros((2, 2), np.int64)}, "expected a row for each part"),
        ({"parts_P": (9,)}, "expected a row for each part"),
        ({"samples_4S": np.array([[0, 2], [0, 0], [1, 1], [0, 0]], np.int32)}, "samples at"),
        ({"samples_4S": np.array([[0, 1], [0, 9], [1, 1], [0, 0]], np.int32)}, "with sets"),
        ({"seeds_S": (1,)}, "column seeds"),
        ({"takes_N": np.array([0])}, "column takes"),
        ({"takes_N": np.array([0, -1])}, "of the work ahead"),
        ({"ahead": "own", "follows_A": np.array([0, 1, 0])}, "goes on behind"),
        ({"ahead": "own", "follows_A": np.array([0, 2])}, "goes on behind"),
        ({"writes_4K": np.array([[1], [0], [2], [0]], np.int32)}, "column written"),
        ({"writes_4K": np.array([[1], [0], [0], [7]], np.int32)}, "table writes of parts"),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(change: dict[str, Any], reason: str) -> None:
    params = SamplingParams()
    work = tuple(
        SeqWork(rid=rid, row=row, start=0, tokens=np.array([7], np.int32), slots={Part.FULL: np.array([row])},
                sample=SampleSpec(params=params, seed=1, position=1, generated=0))
        for rid, row in (("a", 1), ("b", 2))
    )  # fmt: skip
    plan = pack_plan(StepPlan(step=1, work=work))
    columns = msgspec.structs.replace(plan, **(change | ({"ahead": plan} if "ahead" in change else {})))
    with pytest.raises(FrameError, match=reason):
        decode_header(_forged("RunStep", columns))


@pytest.mark.parametrize(
    "given",
    [
        {"sample": SampleSpec(params=SamplingParams(), seed=1, position=1, generated=0, history=history([3]))},
        {"pooled": 1},
    ],
)
def test_what_is_said_of_a_sequence_that_is_not_there_is_refused(given: dict[str, Any]) -> None:
    """Of the second of two, where a plan has one."""
    plain = SeqWork(rid="a", row=1, start=0, tokens=np.array([7], np.int32), slots={Part.FULL: np.array([1])})
    one, two = (pack_plan(StepPlan(step=1, work=work)) for work in ((plain,), (plain, replace(plain, **given))))
    columns = msgspec.structs.replace(one, penalties=two.penalties, asked=two.asked)
    with pytest.raises(FrameError, match="a plan of 1 sequences names number 1"):
        decode_header(_forged("RunStep", columns))


@pytest.mark.parametrize("looked_at", [{"history": history([3])}, {"output": np.array([3], np.int32)}])
def test_work_ahead_with_what_sampling_looks_back_at_is_refused(looked_at: dict[str, Any]) -> None:
    grammar = Grammar("json_object") if "output" in looked_at else None
    sample = SampleSpec(params=SamplingParams(grammar=grammar), seed=1, position=1, generated=0, **looked_at)
    work = SeqWork(rid="a", row=1, start=0, tokens=np.array([7], np.int32), slots={Part.FULL: np.array([1])},
                   sample=sample)  # fmt: skip
    plan = pack_plan(StepPlan(step=1, work=(work,)))
    columns = msgspec.structs.replace(plan, ahead=plan, follows_A=np.array([0]), chooses=False)
    with pytest.raises(FrameError, match="what sampling looks back at"):
        decode_header(_forged("RunStep", columns))


def test_chunks_ahead_that_the_host_would_wait_for_are_refused() -> None:
    work = SeqWork(rid="a", row=1, start=0, tokens=np.array([7, 8], np.int32), slots={Part.FULL: np.array([1, 2])},
                   sample=SampleSpec(params=SamplingParams(), seed=1, position=2, generated=0))  # fmt: skip
    none = np.zeros(0, np.int64)
    decode_header(
        _forged("RunStep", pack_plan(StepPlan(step=1, work=(work,), ahead=WorkAhead(work=(work,), follows=none))))
    )
    for ahead in (
        WorkAhead(work=(work,), follows=none, chooses=False),
        WorkAhead(work=(replace(work, pooled=1),), follows=none),
        WorkAhead(work=(replace(work, prompt_logprobs=0, next_ids=np.array([8], np.int32)),), follows=none),
    ):
        with pytest.raises(FrameError, match="that the host waits for"):
            decode_header(_forged("RunStep", pack_plan(StepPlan(step=1, work=(work,), ahead=ahead))))
    behind = StepPlan(step=1, work=(replace(work, sample=None),), ahead=WorkAhead(work=(work,), follows=np.array([0])))
    with pytest.raises(FrameError, match="which sample"):
        decode_header(_forged("RunStep", pack_plan(behind)))


def test_a_grammar_without_the_tokens_that_it_follows_is_refused() -> None:
    sample = SampleSpec(params=SamplingParams(grammar=Grammar("json_object")), seed=1, position=1, generated=0)
    work = SeqWork(
        rid="a", row=1, start=0, tokens=np.array([7], np.int32), slots={Part.FULL: np.array([1])}, sample=sample
    )
    with pytest.raises(FrameError, match="a grammar needs its output"):
        decode_header(_forged("RunStep", pack_plan(StepPlan(step=1, work=(work,)))))
    plain = StepPlan(step=1, work=(replace(work, sample=replace(sample, params=SamplingParams())),))
    ahead = WorkAhead(work=(work,), follows=np.array([0]))
    with pytest.raises(FrameError, match="expected only to compute it"):
        decode_header(_forged("RunStep", pack_plan(replace(plain, ahead=ahead))))
    decode_header(_forged("RunStep", pack_plan(replace(plain, ahead=replace(ahead, chooses=False)))))


def test_a_result_says_what_a_grammar_ended_and_what_it_could_not_follow() -> None:
    seqs = (SeqResult(token=5), SeqResult(token=7, ends=True), SeqResult(failure="grammar: no"), SeqResult(token=0))
    result = StepResult(step=3, seqs=seqs)
    assert unpack_result(pack_result(result)) == result


def _forged(name: str, columns: object) -> Any:
    data = msgspec.msgpack.Encoder(enc_hook=to_extension).encode(columns)
    return encode(RankHeader(number=1, digest=0, commands=((name, msgspec.Raw(data)),)))


def test_an_array_beyond_the_payload_or_of_a_strange_dtype_is_refused() -> None:
    for packed in (
        [1, 2],
        Ext(66, struct.pack("<QII", 0, 4, 0)),
        Ext(66, struct.pack("<QII", 1 << 63, 4, 0)),
        Ext(66, struct.pack("<QII", 0, (1 << 32) - 1, (1 << 32) - 1)),
        Ext(66, b""),
        Ext(2, b"\0" * 15),
        Ext(34, b"\0" * 4),
        Ext(34, struct.pack("<II", 1, 3) + b"\0" * 8),
        Ext(99, b"\0" * 8),
        Ext(9, b"\0" * 8),
        Ext(-30, b"\0" * 8),
        Ext(3, b"\0" * 8),
    ):
        body = {"op": 1, "part": 0, "keys": [], "pages": packed}
        message = RankHeader(number=1, digest=0, commands=(("ReadPages", msgspec.Raw(msgspec.msgpack.encode(body))),))
        with pytest.raises(FrameError):
            decode_header(encode(message))


def test_an_answer_is_no_command_and_a_frame_of_another_kind_is_no_header() -> None:
    with pytest.raises(FrameError, match="expected RankHeader"):
        decode_header(encode_answers([StepDone(step=1)]))
    with pytest.raises(FrameError, match="expected RankAnswers"):
        decode_answers(encode(Ack()))
    done = msgspec.Raw(msgspec.msgpack.encode({"op": 1, "ok": True}))
    with pytest.raises(FrameError, match="MoveDone"):
        decode_header(encode(RankHeader(number=1, digest=0, commands=(("MoveDone", done),))))


def test_a_type_that_is_not_listed_does_not_leave() -> None:
    @dataclass(frozen=True)
    class Strange:
        x: int = 1

    with pytest.raises(FrameError, match="Strange"):
        pack_commands([Strange()])
