"""Pages that are hashed while they are copied: XXH3 as its library says, bytes as the reference puts them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash

from serinus.kernels import load

PAGES = np.array([5, 1, 8])


def pools(widths: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (9, width), generator=noise, dtype=torch.uint8) for width in widths]


def hashes(rows: np.ndarray, seed: int) -> list[int]:
    return [xxhash.xxh3_64_intdigest(row.tobytes(), seed) for row in rows]


@pytest.mark.parametrize("column", ["ref", "cpu"])
@pytest.mark.parametrize(
    "widths",
    [
        pytest.param((64, 128), id="short"),
        pytest.param((256,), id="one lane"),
        pytest.param((1024, 1024), id="whole blocks"),
        pytest.param((64, 960, 192), id="blocks across lanes"),
        pytest.param((100, 300), id="no whole stripes"),
        pytest.param((16384,) * 4 + (512,) * 4, id="a model's, with stamps"),
    ],
)
def test_the_hash_is_that_of_the_bytes_that_were_moved(column: str, widths: tuple[int, ...]) -> None:
    move, lanes = load("cpu", column).hashed_pages, pools(widths, 1)
    expected = torch.cat([lane[PAGES] for lane in lanes], dim=1).numpy()
    for seed in (0, 7, (1 << 63) + 12345):
        rows = np.zeros_like(expected)
        assert move(lanes, PAGES, rows, seed).tolist() == hashes(expected, seed)
        assert np.array_equal(rows, expected)
        assert move(lanes, PAGES, None, seed).tolist() == hashes(expected, seed)
        filled, odd = pools(widths, 2), np.frombuffer(b"x" + expected.tobytes(), np.uint8)[1:].reshape(expected.shape)
        others = np.setdiff1d(np.arange(9), PAGES)
        before = [lane[others].clone() for lane in filled]
        assert move(filled, PAGES, odd, seed, True).tolist() == hashes(expected, seed)
        assert all(torch.equal(a[PAGES], b[PAGES]) for a, b in zip(filled, lanes, strict=True))
        assert all(torch.equal(a[others], b) for a, b in zip(filled, before, strict=True))


@pytest.mark.parametrize("inward", [True, False])
@pytest.mark.parametrize("offset", [0, 16])
def test_large_moves_go_past_the_caches_where_they_can_and_are_the_same_bytes(offset: int, inward: bool) -> None:
    """Such stores want whole lines: what begins within one is written as any other."""
    noise, size = torch.Generator().manual_seed(3), 33 * 65536
    zeros = torch.zeros(size + 128, dtype=torch.uint8)
    other = torch.randint(0, 256, (size + 128,), generator=noise, dtype=torch.uint8)
    starts = [offset + -each.data_ptr() % 64 for each in (zeros, other)]
    written, read = (
        each[start : start + size].view(33, 65536) for each, start in zip((zeros, other), starts, strict=True)
    )  # fmt: skip
    lane, rows = (written, read[1:]) if inward else (read, written[1:])
    pages = np.arange(32, 0, -1)
    found = load("cpu").hashed_pages([lane], pages, rows.numpy(), 5, inward)
    assert found.tolist() == hashes(read[1:].numpy() if inward else read[1:].flip(0).numpy(), 5)
    assert torch.equal(lane[1:].flip(0), rows)


@pytest.mark.parametrize("column", ["ref", "cpu"])
def test_a_buffer_or_page_that_does_not_fit_is_refused(column: str) -> None:
    move, lanes = load("cpu", column).hashed_pages, pools((256,), 1)
    for pages, rows in (
        (np.array([9]), np.zeros((1, 256), np.uint8)),
        (np.array([-1]), None),
        (np.array([1]), np.zeros((1, 255), np.uint8)),
        (np.array([1]), np.zeros((2, 256), np.uint8)),
        (np.array([1]), np.zeros((1, 256), np.int8)),
        (np.array([1]), np.zeros((1, 512), np.uint8)[:, ::2]),
    ):
        with pytest.raises(ValueError, match="kernels: page"):
            move(lanes, pages, rows, 0)


def test_words_that_change_while_they_are_copied_are_hashed_as_they_were_written() -> None:
    """The second half of the source is the first half of the destination: to read it again would see other bytes."""
    area = torch.arange(3 * 1024, dtype=torch.int32).view(torch.uint8)[: 3 * 1024].clone()
    source = area[:2048].numpy().reshape(1, 2048)
    lane = area[1024:].view(1, 2048)
    found = load("cpu").hashed_pages([lane], np.array([0]), source, 9, True)
    assert found.tolist() == hashes(lane.numpy(), 9)
