"""Whatever a peer says, in whatever state: no exception leaves a machine, nothing is left behind (I7 I11 I12 I15)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pd.scripts import run_codec, run_decode, run_prefill

REASONS = {"", "parts", "short", "magic", "version", "type", "length", "payload", "crc", "body"}


class Numbers:
    """Choices of a list of bytes; zeros behind its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def pick(self, count: int) -> int:
        at, self._at = self._at, self._at + 1
        return self._data[at] % count if at < len(self._data) else 0


@pytest.mark.slow
@settings(max_examples=300)
@given(st.binary(min_size=50, max_size=4000))
def test_a_decode_side_takes_anything(data: bytes) -> None:
    run_decode(Numbers(data), steps=60)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.binary(min_size=50, max_size=4000))
def test_a_prefill_side_takes_anything(data: bytes) -> None:
    run_prefill(Numbers(data), steps=60)


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=3))
def test_any_bytes_are_a_frame_or_a_reject(data: bytes, parts: list[int]) -> None:
    assert run_codec(data, parts) in REASONS
