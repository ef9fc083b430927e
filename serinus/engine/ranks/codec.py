"""Headers and reports as frames, and back: what ranks of several processes say to each other.

Whoever adds an order or an answer adds its dataclass here. Fields may be int, float, str, bytes, bool, None, enums,
tuples, dicts, other dataclasses and numpy arrays (dtype as annotated, from a fixed list). What comes is checked against
the annotations: other types, dtypes or lengths are FrameErrors. No pickle, ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Final, get_args

import msgspec
import numpy as np

from serinus.canary import Violation
from serinus.canary.perturb import Injection
from serinus.core.errors import FrameError, SerinusError
from serinus.core.moves import MoveDone, StorageDone
from serinus.engine.rank_canary import CANARY_ORDERS, CanaryAnswer
from serinus.engine.ranks.orders import RankCounts, RunStep, StepDone, Stop
from serinus.engine.ranks.plans import (
    PlanColumns,
    ResultColumns,
    pack_plan,
    pack_result,
    unpack_plan,
    unpack_result,
)
from serinus.engine.ranks.tiers import TIER_ORDERS
from serinus.parallel import Decision, DecisionKind, Report, ReportKind, StepHeader
from serinus.pd import HAND_ANSWERS, HAND_ORDERS
from serinus.wire import Parts, decode, encode
from serinus.wire.messages import Message, RankHeader, RankReport

__all__ = [
    "ANSWERS",
    "FINDINGS",
    "ORDERS",
    "Reader",
    "decode_header",
    "decode_report",
    "encode_header",
    "encode_report",
]

ORDERS: Final[tuple[type, ...]] = (
    RunStep,
    Stop,
    *TIER_ORDERS,
    *HAND_ORDERS,
    *CANARY_ORDERS,
)
"""What a header may carry."""
ANSWERS: Final[tuple[type, ...]] = (
    StepDone,
    RankCounts,
    MoveDone,
    StorageDone,
    *HAND_ANSWERS,
    CanaryAnswer,
)
"""What a report may carry."""
FINDINGS: Final[tuple[type, ...]] = (Violation, Injection)
"""What StepDone.findings may hold."""

_DTYPES: Final = {np.dtype(name).str: np.dtype(name) for name in ("?", "u1", "<i4", "<i8", "<u4", "<u8", "<f4", "<f8")}
_APART_BYTES: Final = 1 << 14
"""Arrays and bytes from so many bytes on lie in the payload: they are not copied into the body."""


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """An array: dtype, shape, and its bytes, or where they lie in the payload."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    offset: int = -1


class _Done(msgspec.Struct, frozen=True, array_like=True):
    """StepDone with its result in columns."""

    step: int
    result: ResultColumns | None
    seconds: float
    wait_seconds: float
    findings: tuple[tuple[str, msgspec.Raw], ...]


class _Payload:
    """Bytes that travel beside the body."""

    def __init__(self) -> None:
        self.blobs: list[memoryview] = []
        self.size = 0

    def add(self, array: np.ndarray[Any, Any]) -> int:
        offset = self.size
        self.blobs.append(array.reshape(-1).view(np.uint8).data)
        self.size += array.nbytes
        return offset

    def joined(self) -> bytes | memoryview:
        if not self.blobs:
            return b""
        return self.blobs[0] if len(self.blobs) == 1 else b"".join(self.blobs)


class _Writer:
    """Objects to msgpack; one for each frame."""

    def __init__(self) -> None:
        self.payload = _Payload()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._hook)

    def item(self, value: object) -> tuple[str, msgspec.Raw]:
        """An order or an answer."""
        name = type(value).__name__
        form = _FORMS.get(name)
        if form is None or form.kind is not type(value):
            raise FrameError("type", f"{name} is no order and no answer that the codec knows")
        return name, msgspec.Raw(self._encoder.encode(form.pack(value, self)))

    def _hook(self, value: object) -> object:
        if not isinstance(value, np.ndarray) or value.dtype.str not in _DTYPES:
            raise FrameError("body", f"{type(value).__name__} in an order or answer, expected plain data")
        array = np.ascontiguousarray(value)
        if array.nbytes >= _APART_BYTES:
            return _Packed(array.dtype.str, array.shape, b"", self.payload.add(array))
        return _Packed(array.dtype.str, array.shape, array.tobytes())


class Reader:
    """The reverse; one for each end of a line, as it remembers how types are read. Not for several threads."""

    def __init__(self) -> None:
        self.payload = memoryview(b"")
        """Of the frame that is read."""
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}

    def item(self, name: str, data: msgspec.Raw, allowed: tuple[type, ...]) -> object:
        """Raises FrameError: not one of `allowed`, or not as its fields say."""
        form = _FORMS.get(name)
        if form is None or form.kind not in allowed:
            raise FrameError("type", f"{name!r}, expected one of {[kind.__name__ for kind in allowed]}")
        decoder = self._decoders.get(name)
        if decoder is None:
            decoder = self._decoders[name] = msgspec.msgpack.Decoder(form.wire, dec_hook=self._hook)
        try:
            return form.unpack(decoder.decode(data), self)
        except FrameError:
            raise
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, SerinusError) as error:
            raise FrameError("body", f"{name}: {str(error)[:200]}") from None

    def _hook(self, kind: Any, value: object) -> object:
        if not isinstance(value, list) or len(value) != len(_Packed.__struct_fields__):
            raise FrameError("body", f"{type(value).__name__}, expected an array")
        name, shape, data, offset = value
        wanted = _dtype_of(kind)
        dtype = _DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None or (wanted is not None and dtype != wanted):
            raise FrameError("body", f"an array of {name!r}, expected {wanted}")
        if not isinstance(shape, list) or not 1 <= len(shape) <= 2 or not isinstance(offset, int):
            raise FrameError("body", f"an array of shape {shape!r} at {offset!r}, expected one or two dimensions")
        if not all(isinstance(length, int) and length >= 0 for length in shape) or not isinstance(data, bytes):
            raise FrameError("body", f"an array of shape {shape!r}, expected lengths and bytes")
        size = prod(shape) * dtype.itemsize
        found: bytes | memoryview = data if offset < 0 else self.payload[offset : offset + size]
        if len(found) != size:
            raise FrameError("body", f"an array of shape {shape} in {len(found)} bytes, expected {size}")
        array = np.frombuffer(found, dtype).reshape(shape)
        return array if array.flags.writeable else array.copy()


@cache
def _dtype_of(kind: Any) -> np.dtype[Any] | None:
    """The dtype that an annotation names; None = any."""
    arguments = get_args(kind)
    if len(arguments) < 2:
        return None
    inner = get_args(arguments[1])
    if not inner or not isinstance(inner[0], type) or not issubclass(inner[0], np.generic):
        return None
    try:
        return np.dtype(inner[0])
    except TypeError:
        return None  # np.integer and its like: any of the list


@dataclass(frozen=True, slots=True)
class _Form:
    """How one type travels."""

    kind: type
    wire: Any
    pack: Callable[[Any, _Writer], object]
    unpack: Callable[[Any, Reader], object]


def _as_it_is(value: Any, end: object) -> Any:
    return value


def _pack_done(done: StepDone, writer: _Writer) -> _Done:
    result = None if done.result is None else pack_result(done.result)
    findings = tuple(writer.item(finding) for finding in done.findings)
    return _Done(done.step, result, done.seconds, done.wait_seconds, findings)


def _unpack_done(done: _Done, reader: Reader) -> StepDone:
    return StepDone(
        step=done.step,
        result=None if done.result is None else unpack_result(done.result),
        seconds=done.seconds,
        wait_seconds=done.wait_seconds,
        findings=tuple(reader.item(name, data, FINDINGS) for name, data in done.findings),
    )


_SPECIAL: Final = {
    RunStep: _Form(
        RunStep,
        PlanColumns,
        lambda order, writer: pack_plan(order.plan),
        lambda columns, reader: RunStep(plan=unpack_plan(columns)),
    ),
    StepDone: _Form(StepDone, _Done, _pack_done, _unpack_done),
}
_FORMS: Final = {
    kind.__name__: _SPECIAL.get(kind, _Form(kind, kind, _as_it_is, _as_it_is))
    for kind in (*ORDERS, *ANSWERS, *FINDINGS)
}
_JSON: Final = json.JSONEncoder(separators=(",", ":"))


def encode_header(header: StepHeader, rank: int, incarnation: int = 0) -> Parts:
    """A header as one rank gets it. Raises FrameError: something in it cannot travel."""
    writer = _Writer()
    message = RankHeader(
        step=header.step,
        digest=header.digest,
        decisions=tuple((d.number, d.kind.value, d.rid, _JSON.encode(d.payload).encode()) for d in header.decisions),
        orders=tuple(writer.item(order) for order in header.orders_of(rank)),
    )
    return encode(message, incarnation, header.step, writer.payload.joined())


def decode_header(parts: Parts, reader: Reader | None = None) -> StepHeader:
    """The reverse. Raises FrameError, and nothing else, whatever the bytes are."""
    frame = decode(parts)
    message = frame.message
    if not isinstance(message, RankHeader):
        raise FrameError("type", f"{type(message).__name__}, expected RankHeader")
    reader = reader or Reader()
    reader.payload = frame.payload
    return StepHeader(
        step=message.step,
        digest=message.digest,
        decisions=tuple(_decision(*written) for written in message.decisions),
        orders=tuple(reader.item(name, data, ORDERS) for name, data in message.orders),
    )


def _decision(number: int, kind: str, rid: str, payload: bytes) -> Decision:
    try:
        found = json.loads(payload)
        kind_of = DecisionKind(kind)
    except (ValueError, RecursionError) as error:
        raise FrameError("body", f"decision {number}: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise FrameError("body", f"decision {number} with a payload of {type(found).__name__}, expected an object")
    return Decision(number=number, kind=kind_of, rid=rid, payload=found)


def encode_report(report: Report, incarnation: int = 0) -> Parts:
    """A report; who it is from, the leader knows by its connection. Raises FrameError: its body cannot travel."""
    writer = _Writer()
    message: Message = RankReport(
        kind=report.kind.value,
        step=report.step,
        key=report.key,
        reason=report.reason[:16_000],
        body=None if report.body is None else writer.item(report.body),
    )
    return encode(message, incarnation, 0, writer.payload.joined())


def decode_report(parts: Parts, rank: int, reader: Reader | None = None) -> Report:
    """The reverse, from a rank that is known. Raises FrameError, and nothing else, whatever the bytes are."""
    frame = decode(parts)
    message = frame.message
    if not isinstance(message, RankReport):
        raise FrameError("type", f"{type(message).__name__}, expected RankReport")
    try:
        kind = ReportKind(message.kind)
    except ValueError:
        raise FrameError("body", f"a report of kind {message.kind!r}, expected a ReportKind") from None
    reader = reader or Reader()
    reader.payload = frame.payload
    body = None if message.body is None else reader.item(*message.body, ANSWERS)
    return Report(rank=rank, kind=kind, key=message.key, reason=message.reason, step=message.step, body=body)
