"""Log lines: time and rank in brackets, then the message."""

from __future__ import annotations

import re

import pytest

from serinus.core.log import fields, get_logger, setup_logging


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
