"""Clock, chance, identities, errors: what every room stands on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serinus.core.clock import ManualClock, WallClock
from serinus.core.errors import BadRequest, ConfigError, FrameError, SerinusError
from serinus.core.ids import GrantCounter, new_incarnation, new_rid, new_xid
from serinus.core.rng import MASK64, Rng, choice_seed, splitmix64


def test_the_wall_clock_never_goes_back() -> None:
    clock = WallClock()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times)
    assert clock.unix() > 1_700_000_000


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(1.5)
    assert clock.now() == 6.5
    with pytest.raises(AssertionError, match="never goes back"):
        clock.advance(-1.0)


def test_a_seed_is_a_stream_and_parts_have_their_own() -> None:
    assert [Rng(1).random() for _ in range(3)] == [Rng(1).random() for _ in range(3)]
    left, right = Rng(1).split("left"), Rng(1).split("right")
    assert left.random() != right.random()
    assert Rng(1).split("left").random() == Rng(1).split("left").random()
    assert Rng(1).split("left").random() != Rng(2).split("left").random()


def test_drawing_from_a_part_does_not_disturb_the_whole() -> None:
    disturbed, calm = Rng(7), Rng(7)
    disturbed.split("part").random()
    assert disturbed.random() == calm.random()


@given(st.sets(st.integers(min_value=0, max_value=MASK64), min_size=2, max_size=50))
def test_splitmix_never_maps_two_words_to_one(words: set[int]) -> None:
    mixed = {splitmix64(word) for word in words}
    assert len(mixed) == len(words)
    assert all(0 <= word <= MASK64 for word in mixed)


def test_splitmix_gives_the_published_sequence() -> None:
    """The first outputs for state 0, as in the reference implementation by Vigna."""
    state, outputs = 0, []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state = (state + 0x9E3779B97F4A7C15) & MASK64
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_no_two_answers_of_neighbouring_seeds_have_the_same_seed() -> None:
    pairs = [(seed, choice) for seed in range(-20, 20) for choice in range(8)]
    assert len({choice_seed(seed, choice) for seed, choice in pairs}) == len(pairs)
    assert all(choice_seed(seed, 0) == seed for seed, _ in pairs)
    assert all(-(1 << 63) <= choice_seed(seed, choice) < 1 << 63 for seed, choice in pairs)


def test_identities_do_not_repeat() -> None:
    assert len({new_incarnation() for _ in range(1000)}) == 1000
    assert all(0 < new_incarnation() < 1 << 63 for _ in range(1000))
    assert len({new_rid() for _ in range(1000)}) == 1000
    assert new_rid("bench").startswith("bench-")
    assert new_xid(3).endswith(".3")


def test_a_grant_is_never_given_twice() -> None:
    counter = GrantCounter()
    assert [counter.take() for _ in range(3)] == [1, 2, 3]


def test_a_bad_request_names_field_value_and_expectation() -> None:
    error = BadRequest("n", "x" * 1000, "a number")
    assert str(error).startswith("n: got 'xxx")
    assert str(error).endswith("expected a number")
    assert len(str(error)) < 200
    assert (error.field, error.status, error.kind) == ("n", 400, "invalid_request_error")


def test_a_frame_error_keeps_its_reason_for_the_counter() -> None:
    assert FrameError("crc", "of a Grant").reason == "crc"
    assert str(FrameError("crc", "of a Grant")) == "wire: crc: of a Grant"
    assert isinstance(ConfigError(""), SerinusError)
