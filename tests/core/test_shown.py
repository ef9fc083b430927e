"""Values in error messages: whole where they are short, cut where they are not, never made whole for that."""

from __future__ import annotations

from typing import Any

import pytest

from serinus.core.shown import shown


@pytest.mark.parametrize("value", ["x", b"\xff", None, 1.5, True, [1, "a"], {"b": 1, "a": [None]}, (1,), "é'", 1 << 70])
def test_a_short_value_is_shown_as_it_is(value: Any) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * 200, [7] * 500, {"a": ["y" * 300]}])
def test_a_long_value_is_cut(value: Any) -> None:
    assert shown(value) == repr(value)[:117] + "..."


def test_what_is_not_shown_is_not_made() -> None:
    class Loud:
        made = 0

        def __repr__(self) -> str:
            Loud.made += 1
            return "loud"

    assert shown([Loud()] * 100_000).startswith("[loud, loud, ")
    assert Loud.made < 100
