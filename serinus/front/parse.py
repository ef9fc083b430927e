"""Bytes of a request body to a checked struct; every refusal names the field, its value and what was expected.

A field that is not declared is refused where it is a declared one misspelled, and wherever it stands in
`sampling_params`. Any other is taken for one of another server and ignored; `unknown_fields` names it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar

import msgspec

from serinus.core.errors import BadRequest
from serinus.core.type_lock import TYPE_LOCK
from serinus.front.schemas import (
    GenerateBody,
    JsonSchemaFormat,
    NativeSampling,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
)

_BodyT = TypeVar("_BodyT", bound=msgspec.Struct)
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<key>key in )?(?:`)?\$?(?P<path>[^`]*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
_NULLS = (None, msgspec.Raw(b"null"))
_EXPECTED = {
    "Number out of range": "a number from -1.8e308 to 1.8e308",
    "Integer value out of range": "an integer of at most 4,300 digits",
}
"""What msgspec says of numbers, as an expectation."""
_TYPES = {"str": str, "int": int, "float": float, "bool": bool, "null": type(None), "array": list, "object": dict}
"""Its names of JSON's types."""
_AROUND_BYTES = 30
"""Shown before and behind the byte at which a body is no JSON."""
VALUES_MAX = 1 << 20
"""Values (ids, texts, messages...) that one body may have: more would hold the interpreter for long when parsed."""
_OBJECTS_MAX = 1 << 16
"""Objects among them: a message, or a part of one, is one and costs as much as twenty ids."""
_COUNTED_BYTES = 1 << 18
"""The values of longer bodies are counted before anything is made of them."""
_SLICE_BYTES = 1 << 15
"""They are looked at in pieces of so many bytes, each a fraction of a millisecond: the event loop takes the GIL several
times for one token, and each time waits for the piece under way."""
_UNKNOWN_MAX = 32
"""Unknown fields that one object may have: each is compared with every name."""
_NAME_CHARS_MAX = 64
_LIKENESS = 0.85
"""From this ratio of difflib on, a name is another one misspelled; max_new_tokens is one of max_tokens."""


@cache
def _decoder(body_type: type[Any]) -> msgspec.json.Decoder[Any]:
    with TYPE_LOCK:
        return msgspec.json.Decoder(body_type)


def parse_body(raw: bytes, body_type: type[_BodyT], *, values_max: int = VALUES_MAX) -> _BodyT:
    """Decode and check the types of a JSON body. Raises BadRequest.

    NaN and infinities are no JSON and are refused; so are bytes that are no UTF-8, wherever they stand, and bodies of
    more than `values_max` values or 65,536 objects, before anything is made of them. Cost: 2 ms per MB; no call holds
    the GIL for more than about that.
    """
    if not raw.strip():
        raise BadRequest("body", "", "a JSON object")
    if not raw.isascii():
        _check_utf8(raw)
    if len(raw) > _COUNTED_BYTES:
        _check_counts(raw, values_max)
    try:
        body: _BodyT = _decoder(body_type).decode(raw)
    except msgspec.ValidationError as err:
        raise _named(raw, str(err), body_type) from err
    except msgspec.DecodeError as err:
        raise _malformed(raw, str(err)) from err
    except RecursionError as err:
        raise BadRequest("body", raw[:20].decode("utf-8", errors="replace"), "JSON of sane depth") from err
    return body


def _check_utf8(raw: bytes) -> None:
    place = 0
    while place < len(raw):
        last = place + _SLICE_BYTES >= len(raw)
        try:
            place += codecs.utf_8_decode(raw[place : place + _SLICE_BYTES], "strict", last)[1]
        except UnicodeDecodeError as err:
            wrong, at = err.object[err.start : err.end], place + err.start
            raise BadRequest("body", wrong, f"UTF-8 ({err.reason} at byte {at})") from err


def _check_counts(raw: bytes, values_max: int) -> None:
    """Count commas and opening brackets outside of strings: a value follows each, whether the rest is JSON or not."""
    values = objects = place = 0
    inside = False
    while place < len(raw):
        piece = raw[place : place + _SLICE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # what it escapes belongs to it
            piece = raw[place : place + _SLICE_BYTES + 1]
        place += len(piece)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[1 if inside else 0 :: 2])
        inside ^= len(parts) % 2 == 0
        opened = outside.count(b"{")
        objects += opened
        values += opened + outside.count(b"[") + outside.count(b",")
        if objects > _OBJECTS_MAX:
            raise BadRequest("body", f"more than {_OBJECTS_MAX} objects", f"at most {_OBJECTS_MAX} (a message is one)")
        if values > values_max:
            raise BadRequest("body", f"more than {values_max} values", f"at most {values_max} (a token id is one)")


@contextmanager
def fields_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors within name fields as the client does: `names` has patterns of fields as they are named here, and what
    stands there in his body; the first that fits counts."""
    try:
        yield
    except BadRequest as error:
        renamed = (re.sub(pattern, name, error.field) for pattern, name in names.items())
        if field := next((each for each in renamed if each != error.field), ""):
            error.rename(field)
        raise


class _Verbatim:
    """JSON that Python has no value for, shown as it came."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def __repr__(self) -> str:
        return self._raw[:_NAME_CHARS_MAX].decode("utf-8", errors="replace")


def _malformed(raw: bytes, reason: str) -> BadRequest:
    """No JSON: show what stands around the byte that the parser names."""
    at = re.search(r"\(byte (\d+)\)", reason)
    start = max(0, int(at[1]) - _AROUND_BYTES) if at else 0
    return BadRequest(
        "body", raw[start : start + 2 * _AROUND_BYTES].decode("utf-8", errors="replace"), f"valid JSON ({reason})"
    )


def _named(raw: bytes, message: str, body_type: type[msgspec.Struct]) -> BadRequest:
    """Turn msgspec's `Expected X, got Y - at $.a[3].b` into field, value and expectation."""
    match = _AT.match(message)
    path = (match["path"] or "") if match else ""
    what = match["what"] if match else message
    field = path.lstrip(".")
    missing = re.match(r"Object missing required field `(.*)`$", what)
    if missing:
        return BadRequest(f"{field}.{missing[1]}".lstrip("."), None, "a value: this field is required")
    try:
        unknown = re.match(r"Object contains unknown field `(.*)`$", what)
        if unknown:
            value = _value_at(raw, path, what)[unknown[1]]  # its name may have any characters
            names = f"one of {', '.join(body_type.__struct_fields__)}" if not path else "a field that is known"
            return BadRequest(f"{field}.{unknown[1]}".lstrip("."), value, names)
        value = _value_at(raw, path, what)
    except msgspec.DecodeError:  # and what follows is no JSON either
        return _malformed(raw, what)
    except RecursionError:
        return BadRequest(field or "body", _Verbatim(raw), "JSON of sane depth")
    typed = re.match(r"Expected (.*?)(?:, got `[^`]*`)?$", what, re.DOTALL)
    expected = typed[1].replace("`", "") if typed else _EXPECTED.get(what, what)
    return BadRequest(field or "body", value, expected)


def _value_at(raw: bytes, path: str, what: str) -> Any:
    """The value at a place of a body, as far as Python has one. `[...]`: that of a table which `what` is said of."""
    here = raw
    for name, index in _STEP.findall(path):
        if index == "...":
            values = _FIELDS.decode(here).values()
            here = next((bytes(value) for value in values if _is_meant(bytes(value), what)), here)
        else:
            here = bytes(_FIELDS.decode(here)[name] if name else _ITEMS.decode(here)[int(index)])
    return _value(here)


def _value(given: Any) -> Any:
    """JSON as far as Python has a value for it; what is a value already stays one."""
    try:
        return msgspec.json.decode(given) if isinstance(given, (bytes, msgspec.Raw)) else given
    except msgspec.DecodeError:
        return _Verbatim(bytes(given))


def _fields_of(given: Any) -> Mapping[str, Any]:
    """The fields of an object, those of JSON as they came; none of what is no object."""
    if isinstance(given, msgspec.Raw):
        return _FIELDS.decode(given) if bytes(given).startswith(b"{") else {}
    return given if isinstance(given, dict) else {}


def _is_meant(raw: bytes, what: str) -> bool:
    """Whether a parser says `what` of this value: it cannot be had, or is of that type."""
    got = re.search(r", got `([^`]*)`$", what)
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return got is None
    return got is not None and _TYPES.get(got[1]) is type(value)


def unknown_fields(raw: bytes, body_type: type[msgspec.Struct]) -> list[str]:
    """Fields of a body that `parse_body` took which are not declared, and not null.

    Raises BadRequest: one is a declared field misspelled or in the wrong place, is in sampling_params, or there are
    more than 32.
    """
    given = _FIELDS.decode(raw)
    unknown = _unknown(given, body_type)
    if "stream_options" in given and "stream_options" in body_type.__struct_fields__:
        unknown += _unknown(_fields_of(given["stream_options"]), StreamOptions, "stream_options.")
    for name, struct in _OF_GRAMMARS.items():
        if name in given and name in body_type.__struct_fields__:
            check_known(_fields_of(given[name]), struct, name)
    if "sampling_params" in given and body_type is GenerateBody:
        params = given["sampling_params"]
        _unknown(_fields_of(params), NativeSampling, "sampling_params.")
        if bytes(params).startswith(b"["):
            for index, each in enumerate(_ITEMS.decode(params)):
                _unknown(_fields_of(each), NativeSampling, f"sampling_params[{index}].")
    return unknown


def check_known(given: Mapping[str, Any], struct: type[msgspec.Struct], where: str) -> None:
    """Raise BadRequest for a field that an object which asks for a grammar does not have: the answer would not follow
    it, and that would not be seen."""
    names = struct.__struct_fields__
    for name, value in given.items():
        if name not in names and value not in _NULLS:
            field, expected = f"{where}.{name[:_NAME_CHARS_MAX]}", f"one of {', '.join(names)}"
            raise BadRequest(field, _value(value), f"{expected}: what an answer must look like is not ignored")
    if struct is ResponseFormat:
        check_known(_fields_of(given.get("json_schema")), JsonSchemaFormat, f"{where}.json_schema")


_OF_GRAMMARS: dict[str, type[msgspec.Struct]] = {
    "response_format": ResponseFormat,
    "structured_outputs": StructuredOutputs,
}
"""Fields that hold an object which asks for a grammar."""


def _unknown(given: Mapping[str, Any], struct: type[msgspec.Struct], where: str = "") -> list[str]:
    """Those of one object. Raises BadRequest."""
    declared = struct.__struct_fields__
    unknown: list[str] = []
    for name in given.keys() - set(declared):
        if given[name] in _NULLS:
            continue
        field = where + name[:_NAME_CHARS_MAX]
        near = _near(name, declared)
        if near and near not in given:
            raise BadRequest(field, _value(given[name]), f"the name of a field: did you mean {near!r}?")
        if struct is NativeSampling:
            raise BadRequest(field, _value(given[name]), f"one of {', '.join(_SAMPLING_NAMES)}")
        if struct is GenerateBody and name in NativeSampling.__struct_fields__:
            raise BadRequest(field, _value(given[name]), "it in sampling_params")
        unknown.append(field)
        if len(unknown) > _UNKNOWN_MAX:
            raise BadRequest("body", sorted(unknown), f"at most {_UNKNOWN_MAX} fields that this server does not know")
    return sorted(unknown)


_SAMPLING_NAMES = [field.name for field in msgspec.structs.fields(NativeSampling) if field.type is not Any]


def _near(name: str, declared: tuple[str, ...]) -> str:
    """The declared field that a name is like, but for case, separators and a character or two; empty = none."""
    plain = {each.replace("_", ""): each for each in declared}
    found = get_close_matches(re.sub("[^a-z0-9]", "", name[:_NAME_CHARS_MAX].lower()), plain, n=1, cutoff=_LIKENESS)
    return plain[found[0]] if found else ""
