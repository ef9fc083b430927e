"""OpenAI's batch files: a line of JSON for each request, a line of JSON for each answer. Pure: knows no server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serinus.core.bounds import is_unicode
from serinus.core.errors import ConfigError
from serinus.core.ids import new_rid
from serinus.core.json_line import one_line
from serinus.core.shown import shown

BATCH_URLS: Final = ("/v1/chat/completions", "/v1/completions")
_LINE_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request of the input."""

    number: int
    """From 1 on, as editors count lines."""
    custom_id: str
    """The name by which its answer is found."""
    url: str
    """The endpoint, one of BATCH_URLS."""
    body: bytes
    """JSON, as it is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line of the input that is no request."""

    number: int
    custom_id: str | None
    """Where it has one."""
    reason: str
    """Which field, which value, what was expected."""


def line_count(path: str) -> int:
    """Lines of a file that are not empty. Raises ConfigError: it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return sum(bool(raw.strip()) for raw in file)
    except OSError as error:
        raise ConfigError(f"batch: cannot read {path}: {error.strerror}") from None


def lines_of(path: str) -> Iterator[BatchLine | BadLine]:
    """The requests of a file, and the lines that are none; empty lines are left out. A custom_id that an earlier line
    has too makes a line bad. Raises ConfigError: the file cannot be read."""
    seen: dict[str, int] = {}
    try:
        with Path(path).open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.strip():
                    continue
                line = _parsed(number, raw)
                if line.custom_id is not None and (before := seen.setdefault(line.custom_id, number)) != number:
                    reason = f"custom_id: got {shown(line.custom_id)}, expected another one: line {before} has it"
                    line = BadLine(number=number, custom_id=None, reason=reason)
                yield line
    except OSError as error:
        raise ConfigError(f"batch: cannot read {path}: {error.strerror}") from None


def _parsed(number: int, raw: bytes) -> BatchLine | BadLine:
    custom_id: str | None = None

    def bad(reason: str) -> BadLine:
        return BadLine(number=number, custom_id=custom_id, reason=reason)

    if len(raw) > _LINE_BYTES_MAX:
        return bad(f"the line has {len(raw):,} bytes, expected at most {_LINE_BYTES_MAX:,}")
    try:
        given: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return bad(f"no JSON ({error}), expected an object")
    if not isinstance(given, dict):
        return bad(f"a JSON {type(given).__name__}, expected an object")
    named = given.get("custom_id")
    if not isinstance(named, str) or not named or not is_unicode(named):
        return bad(f"custom_id: got {shown(named)}, expected a text that is valid Unicode")
    custom_id = named
    body = given.get("body")
    for field, value, right, expected in (
        ("method", given.get("method"), given.get("method") == "POST", "POST"),
        ("url", given.get("url"), given.get("url") in BATCH_URLS, f"one of {', '.join(BATCH_URLS)}"),
        ("body", body, isinstance(body, dict), "an object"),
        ("body.stream", True, not (isinstance(body, dict) and body.get("stream")), "false: answers come whole"),
    ):
        if not right:
            return bad(f"{field}: got {shown(value)}, expected {expected}")
    return BatchLine(number=number, custom_id=named, url=given["url"], body=json.dumps(body).encode())


def answer_line(line: BatchLine, status: int, request_id: str, body: bytes) -> bytes:
    """The line of an answer, whatever its status."""
    try:
        told: Any = json.loads(body)
    except ValueError:
        told = body.decode(errors="replace")
    response = {"status_code": status, "request_id": request_id, "body": told}
    return _line(line.custom_id, response=response, error=None)


def bad_line(line: BadLine) -> bytes:
    """The line of what was never asked; `error.line` names the line of the input."""
    error = {"code": "invalid_line", "message": f"line {line.number}: {line.reason}", "line": line.number}
    return _line(line.custom_id, response=None, error=error)


def _line(custom_id: str | None, **rest: Any) -> bytes:
    found = {"id": f"batch_req_{new_rid()}", "custom_id": custom_id, **rest}
    text = json.dumps(found, ensure_ascii=False).encode(errors="backslashreplace")  # of half characters
    return one_line(text) + b"\n"


def done_before(path: str) -> tuple[set[str], set[int]]:
    """The custom_ids that an output has an answer of, and the numbers of the lines that it says are bad. What follows
    the last whole line is cut off: the run before was ended there. Raises ConfigError: it is no output of a batch, or
    cannot be written."""
    answered: set[str] = set()
    bad: set[int] = set()
    try:
        with Path(path).open("rb+") as file:
            end = 0
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    break
                end += len(raw)
                _note(path, number, raw, answered, bad)
            file.truncate(end)
    except FileNotFoundError:
        if not os.access(folder := Path(path).parent, os.W_OK):
            raise ConfigError(f"batch: cannot write {path}: {folder} is no folder that can be written to") from None
    except OSError as error:
        raise ConfigError(f"batch: cannot write {path}: {error.strerror}") from None
    return answered, bad


def _note(path: str, number: int, raw: bytes, answered: set[str], bad: set[int]) -> None:
    try:
        found = json.loads(raw)
        error, custom_id = found["error"], found["custom_id"]
        if error is not None:
            bad.add(error["line"])
        else:
            answered.add(custom_id)
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"batch: line {number} of {path} is no answer of a batch, expected an output to go on with, or a new file"
        ) from None
