"""Headers and answers as frames, and back: what ranks of several processes say to each other.

Every command and every answer is listed here by its dataclass; they travel as wire/objects.py says, plans and results
in columns (plans.py). What is not of a listed type, or not as its annotations say, is a FrameError.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import xxhash

from serinus.canary import CANARY_COMMANDS, CanaryAnswer, HostFindings, RingOverflow, Violation
from serinus.canary.perturb import Injection
from serinus.core.errors import FrameError
from serinus.core.moves import MoveDone, StorageDone
from serinus.core.plan import SeqWork, StepPlan
from serinus.pd import PAGE_ANSWERS, PAGE_COMMANDS
from serinus.ranks.commands import RankHoldings, RunStep, StepDone, Stop
from serinus.ranks.plans import (
    PlanColumns,
    ResultColumns,
    pack_plan,
    pack_result,
    unpack_plan,
    unpack_result,
)
from serinus.ranks.tiers import TIER_COMMANDS, PagesRecalled
from serinus.wire import Forms, Frame, Item, ObjectReader, ObjectWriter, PackedForm, Parts, decode, encode
from serinus.wire.messages import RankAnswers, RankHeader

COMMANDS: Final[tuple[type, ...]] = (
    RunStep,
    Stop,
    *TIER_COMMANDS,
    *PAGE_COMMANDS,
    *CANARY_COMMANDS,
)
"""What a header may carry."""
ANSWERS: Final[tuple[type, ...]] = (
    StepDone,
    RankHoldings,
    MoveDone,
    StorageDone,
    PagesRecalled,
    *PAGE_ANSWERS,
    CanaryAnswer,
    HostFindings,
)
"""What a rank may answer."""
FINDINGS: Final[tuple[type, ...]] = (Violation, Injection, RingOverflow)
"""What StepDone.findings may hold."""

_FOLD: Final = struct.Struct("<QQQ")
_LENGTHS: Final = struct.Struct("<QQ")


class _Done(msgspec.Struct, frozen=True, array_like=True):
    """StepDone with its result in columns."""

    step: int
    result: ResultColumns | None
    seconds: float
    wait_seconds: float
    failed: str
    findings: tuple[Item, ...]
    checked: list[list[int]] | None


def _pack_done(done: StepDone, writer: ObjectWriter) -> _Done:
    result = None if done.result is None else pack_result(done.result)
    findings = tuple(writer.item(finding) for finding in done.findings)
    return _Done(done.step, result, done.seconds, done.wait_seconds, done.failed, findings, done.checked)


def _unpack_done(done: _Done, reader: ObjectReader) -> StepDone:
    return StepDone(
        step=done.step,
        result=None if done.result is None else unpack_result(done.result),
        seconds=done.seconds,
        wait_seconds=done.wait_seconds,
        failed=done.failed,
        findings=tuple(reader.item(name, data, FINDINGS) for name, data in done.findings),
        checked=done.checked,
    )


class LineObjects(ObjectReader):
    """Reads headers or answers, for one end of a line."""

    work_ahead: Sequence[SeqWork] = ()
    """Of the plan that was read last."""


def _unpack_plan(columns: PlanColumns, reader: ObjectReader) -> StepPlan:
    assert isinstance(reader, LineObjects), "ranks: a plan read by none that keeps what is ahead"
    plan = unpack_plan(columns, before=reader.work_ahead)
    reader.work_ahead = () if plan.ahead is None else plan.ahead.work
    return plan


_FORMS: Final = Forms(
    (*COMMANDS, *ANSWERS, *FINDINGS),
    {
        RunStep: PackedForm(
            PlanColumns,
            lambda command, writer: pack_plan(command.plan),
            lambda columns, reader: RunStep(plan=_unpack_plan(columns, reader)),
        ),
        StepDone: PackedForm(_Done, _pack_done, _unpack_done),
    },
)


def make_reader() -> LineObjects:
    """Reads nothing so far."""
    return LineObjects(_FORMS)


@dataclass(frozen=True, slots=True)
class PackedCommands:
    """Commands of one header as bytes, with their hash."""

    items: tuple[Item, ...]
    payload: bytes | memoryview
    content: int
    """Hash of all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Commands as they came to a rank."""

    number: int
    """1, 2, 3... on the line of this rank."""
    digest: int
    """Of this header and all before it, as the leader folded them."""
    content: int
    """Hash of the commands as they came."""
    commands: tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a rank told its leader at once."""

    answers: tuple[object, ...] = ()
    failure: str = ""
    """Why this rank cannot go on; empty = it does."""


def fold(digest: int, number: int, content: int) -> int:
    """The rolling digest of a line with one more header."""
    return xxhash.xxh3_64_intdigest(_FOLD.pack(digest, number, content))


def pack_commands(commands: Sequence[object]) -> PackedCommands:
    """Commands as bytes. Raises FrameError: one of them cannot travel."""
    writer = ObjectWriter(_FORMS)
    items = tuple(writer.item(command) for command in commands)
    payload = writer.payload.joined()
    return PackedCommands(items, payload, _content(items, payload))


def encode_header(number: int, digest: int, packed: PackedCommands) -> Parts:
    """A header as one rank gets it; `digest`: folded for that rank, this header included."""
    message = RankHeader(number=number, digest=digest, commands=packed.items)
    return encode(message, 0, number, packed.payload)


def decode_header(came: Frame | Parts, reader: ObjectReader | None = None) -> Header:
    """The reverse. Raises FrameError, and nothing else, whatever the bytes are."""
    frame = came if isinstance(came, Frame) else decode(came)
    message = frame.message
    if not isinstance(message, RankHeader):
        raise FrameError("type", f"{type(message).__name__}, expected RankHeader")
    reader = reader or make_reader()
    reader.payload = frame.payload
    return Header(
        number=message.number,
        digest=message.digest,
        content=_content(message.commands, frame.payload),
        commands=tuple(reader.item(name, data, COMMANDS) for name, data in message.commands),
    )


def encode_answers(answers: Sequence[object], failure: str = "") -> Parts:
    """Answers of one rank; the leader knows the rank by its connection. Raises FrameError: one cannot travel."""
    writer = ObjectWriter(_FORMS)
    message = RankAnswers(answers=tuple(writer.item(answer) for answer in answers), failure=failure[:16_000])
    return encode(message, 0, 0, writer.payload.joined())


def decode_answers(came: Frame | Parts, reader: ObjectReader | None = None) -> Answers:
    """The reverse. Raises FrameError, and nothing else, whatever the bytes are."""
    frame = came if isinstance(came, Frame) else decode(came)
    message = frame.message
    if not isinstance(message, RankAnswers):
        raise FrameError("type", f"{type(message).__name__}, expected RankAnswers")
    reader = reader or make_reader()
    reader.payload = frame.payload
    answers = tuple(reader.item(name, data, ANSWERS) for name, data in message.answers)
    return Answers(answers=answers, failure=message.failure)


def _content(items: Sequence[Item], payload: bytes | memoryview) -> int:
    """Hash of commands as they travel; their lengths are part of it."""
    state = xxhash.xxh3_64()
    for name, data in items:
        state.update(_LENGTHS.pack(len(name), len(memoryview(data))))
        state.update(name.encode())
        state.update(memoryview(data))
    state.update(payload)
    return state.intdigest()
