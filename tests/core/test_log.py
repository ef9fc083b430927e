"""Log lines: time and rank in brackets, then the message."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import pytest

from serinus.core.log import child_line, fields, get_logger, setup_logging


@pytest.fixture
def root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    root.handlers = handlers
    logging.captureWarnings(False)


def test_a_line_names_its_time_and_rank(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "TP1 PP0")
    get_logger("sched").info("Decode batch, %s", fields(running_req=3, token_usage=0.25))
    line = capsys.readouterr().err
    assert re.fullmatch(
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d TP1 PP0\] Decode batch, running-req: 3, token-usage: 0.25\n", line
    )


def test_lines_below_the_level_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("warning", "")
    get_logger("pd").info("nothing")
    get_logger("pd").warning("something")
    err = capsys.readouterr().err
    assert "nothing" not in err
    assert err.endswith("] something\n")


def test_setting_up_twice_does_not_double_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info")
    setup_logging("info")
    get_logger("cache").info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_fields_are_short_and_readable() -> None:
    assert fields(a=1, b_c=1234.5678, d=0.000123456, e="x") == "a: 1, b-c: 1234.57, d: 0.000123, e: x"


def test_no_value_begins_a_line_of_its_own() -> None:
    assert fields(rid="x\n[2026-01-01 00:00:00] y", other="é") == r"rid: 'x\n[2026-01-01 00:00:00] y', other: é"


@pytest.mark.usefixtures("root_as_before")
def test_json_lines_are_objects_with_the_fields_of_their_call(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "TP1 PP0", "json")
    get_logger("engine").info("request %s\nfails", "r-1", extra={"rid": "r-1", "step": 7, "odd": {1}, "_ray": 1})
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("ts"))
    assert found == {
        "level": "info", "logger": "serinus.engine", "message": "request r-1\nfails", "rank": "TP1 PP0", "rid": "r-1",
        "step": 7, "odd": "{1}",
    }  # fmt: skip


@pytest.mark.usefixtures("root_as_before")
def test_tracebacks_and_lines_of_libraries_are_objects_too(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "", "json")
    try:
        raise KeyError("gone")
    except KeyError:
        get_logger("engine").exception("stopped")
    logging.getLogger("uvicorn.error").warning("theirs")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert "KeyError: 'gone'" in lines[0]["exception"]
    assert (lines[1]["logger"], lines[1]["message"]) == ("uvicorn.error", "theirs")
    assert len(lines) == 2


def test_a_line_of_a_child_names_its_engine_whatever_it_is() -> None:
    child = json.loads(child_line('{"ts": "t", "level": "info", "message": "m"}', "decode-0", 0.0, "json"))
    assert child == {"ts": "t", "level": "info", "message": "m", "engine": "decode-0"}
    for raw in ("Fatal Python error", "[1, 2]", "7"):
        found = json.loads(child_line(raw, "decode-0", 1.5, "json"))
        assert found == {
            "ts": "1970-01-01T00:00:01.500Z", "level": "info", "logger": "stderr", "message": raw, "engine": "decode-0",
        }  # fmt: skip


def test_a_line_of_a_child_is_for_people_where_theirs_are() -> None:
    assert child_line("[12:00] words", "decode-0", 0.0, "text") == "  decode-0 | [12:00] words"
