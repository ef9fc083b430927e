"""Parameters of which the default suite runs some, of grids a diagonal, and `make proof` the rest."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def some(values: Iterable[Any], *kept: Any) -> list[Any]:
    """These values, for `parametrize`. All are marked `proof` but those that are kept."""
    return [pytest.param(each, marks=() if each in kept else pytest.mark.proof) for each in values]


def diagonal(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of the values of these axes, for `parametrize`. All are marked `proof` but a diagonal: as many
    as the longest axis has, in which each value of each axis is at least once."""
    given = [list(axis) for axis in axes]
    kept = {tuple(number % len(axis) for axis in given) for number in range(max(map(len, given)))}
    places = product(*(range(len(axis)) for axis in given))
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(given, place, strict=True)), marks=() if place in kept else pytest.mark.proof
        )
        for place in places
    ]
