"""Bytes of a request body to a checked struct; every refusal names the field, its value and what was expected."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar

import msgspec

from serinus.core.errors import BadRequest

__all__ = ["parse_body"]

_BodyT = TypeVar("_BodyT", bound=msgspec.Struct)
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<key>key in )?(?:`)?\$?(?P<path>[^`]*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")


@cache
def _decoder(body_type: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(body_type)


def parse_body(raw: bytes, body_type: type[_BodyT]) -> _BodyT:
    """Decode and check the types of a JSON body. Raises BadRequest.

    NaN and infinities are no JSON and are refused; so are bytes that are no UTF-8, wherever they stand.
    """
    if not raw.strip():
        raise BadRequest("body", "", "a JSON object")
    if not raw.isascii():
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError as err:
            raise BadRequest("body", raw[err.start : err.end], f"UTF-8 ({err.reason} at byte {err.start})") from err
    try:
        body: _BodyT = _decoder(body_type).decode(raw)
    except msgspec.ValidationError as err:
        raise _named(raw, str(err)) from err
    except msgspec.DecodeError as err:
        raise BadRequest("body", raw[:60].decode("utf-8", errors="replace"), f"valid JSON ({err})") from err
    except RecursionError as err:
        raise BadRequest("body", raw[:20].decode("utf-8", errors="replace"), "JSON of sane depth") from err
    return body


def _named(raw: bytes, message: str) -> BadRequest:
    """Turn msgspec's `Expected X, got Y - at $.a[3].b` into field, value and expectation."""
    match = _AT.match(message)
    path = (match["path"] or "") if match else ""
    what = match["what"] if match else message
    missing = re.match(r"Object missing required field `(.*)`$", what)
    if missing:
        field = f"{path.lstrip('.')}.{missing[1]}".lstrip(".")
        return BadRequest(field, None, "a value: this field is required")
    expected = what
    typed = re.match(r"Expected (.*), got `(.*)`$", what, re.DOTALL)
    if typed:
        expected = typed[1].replace("`", "")
    return BadRequest(path.lstrip(".") or "body", _value_at(raw, path, what), expected)


def _value_at(raw: bytes, path: str, what: str) -> Any:
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return what  # a number out of range cannot be shown
    for name, index in _STEP.findall(path):
        if index == "...":
            break
        value = value[name] if name else value[int(index)]
    return value
