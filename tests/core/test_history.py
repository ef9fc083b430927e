"""TokenHistory says what a count of all tokens would, one token at a time."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serinus.core.history import TokenHistory

tokens = st.lists(st.integers(0, 3000) | st.integers(0, 9), max_size=90)


@given(prompt=tokens, output=tokens)
def test_a_history_grown_by_token_is_a_count_of_all_of_them(prompt: list[int], output: list[int]) -> None:
    history = TokenHistory(np.array(prompt, np.int32))
    for token in output:
        history.add(token)
    assert set(np.flatnonzero(np.unpackbits(history.seen, bitorder="little"))) == {*prompt, *output}
    assert dict(zip(history.output_ids.tolist(), history.output_times.tolist(), strict=True)) == Counter(output)
    again = TokenHistory.of(history.seen, history.output_ids, history.output_times)
    assert again.output_ids.tolist() == history.output_ids.tolist()


def test_ids_and_counts_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("history: 2 generated ids, 1 counts")):
        TokenHistory.of(np.zeros(1, np.uint8), np.zeros(2, np.int32), np.ones(1, np.float32))
