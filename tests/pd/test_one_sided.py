"""What one-sided backends agree on: endpoints as text, strips of pages, and what is said where a package is missing."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serinus.core.errors import ConfigError, InvariantError, TransferFailed
from serinus.core.parts import Part
from serinus.pd.backends import Region, make_one_sided, pack_endpoint, strips_of_part, unpack_endpoint

NUMBERS = st.integers(0, 2**31)


def region(address: int = 1 << 20, lanes: int = 2, strip: int = 32, pages: int = 50, part: Part = Part.FULL) -> Region:
    return Region(
        part=part, address=address, lane_count=lanes, lane_stride=strip * pages, strip_bytes=strip, page_count=pages
    )


@given(session=st.binary(max_size=300), address=NUMBERS, lanes=st.integers(0, 200), strip=NUMBERS, pages=NUMBERS)
def test_an_endpoint_comes_out_as_it_went_in(session: bytes, address: int, lanes: int, strip: int, pages: int) -> None:
    regions = tuple(
        Region(
            part=part, address=address, lane_count=lanes, lane_stride=strip, strip_bytes=strip, page_count=pages
        )
        for part in Part
    )  # fmt: skip
    found = unpack_endpoint(pack_endpoint(session, regions))
    assert (found.session, found.regions) == (session, regions)


@given(text=st.binary(max_size=200))
def test_whatever_is_no_endpoint_is_refused(text: bytes) -> None:
    with pytest.raises(TransferFailed):
        unpack_endpoint(text)


@given(data=st.data())
def test_strips_move_exactly_the_bytes_of_the_pages(data: st.DataObject) -> None:
    """Against a byte-by-byte copy of two small memories."""
    ours, theirs = region(address=0), region(address=0)
    ids = st.lists(st.integers(1, 49), min_size=1, max_size=20, unique=True)
    pages = np.array(data.draw(ids), np.int32)
    others = np.array(data.draw(st.permutations(range(1, 50))), np.int32)[: len(pages)]
    size = ours.byte_count
    source, target = np.random.default_rng(1).integers(1, 256, size, np.uint8), np.zeros(size, np.uint8)
    strips = strips_of_part((ours,), (theirs,), Part.FULL, pages, others)
    for to, start, count in zip(strips.local, strips.remote, strips.byte_counts, strict=True):
        target[to : to + count] = source[start : start + count]
    expected = np.zeros((2, 50, 32), np.uint8)
    expected[:, pages] = source.reshape(2, 50, 32)[:, others]
    assert np.array_equal(target, expected.reshape(-1))


def test_pages_out_of_a_region_are_refused_before_anything_moves() -> None:
    good, bad = np.array([1, 2], np.int32), np.array([1, 50], np.int32)
    with pytest.raises(TransferFailed, match=r"the peer has 1 \.\. 49"):
        strips_of_part((region(),), (region(),), Part.FULL, good, bad)
    with pytest.raises(InvariantError, match="own pages"):
        strips_of_part((region(),), (region(),), Part.FULL, bad, good)
    with pytest.raises(TransferFailed, match="expected equal ones"):
        strips_of_part((region(),), (region(strip=64),), Part.FULL, good, good)
    with pytest.raises(TransferFailed, match="part SWA"):
        strips_of_part((region(),), (region(),), Part.SWA, good, good)


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_a_missing_package_is_said_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in (name, f"{name}.engine", f"{name}._api"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install -e '\.\[{name}\]'"):
        make_one_sided(name, tag="t")
    assert make_one_sided("tcp", tag="t") is None
