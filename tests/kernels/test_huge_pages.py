"""Huge pages are a wish: bytes stay what they are, whatever address and length are given."""

from __future__ import annotations

import numpy as np
import pytest

from serinus.kernels import collapse_to_huge_pages, prefer_huge_pages


@pytest.mark.parametrize("byte_count", [0, 1, 4096, (2 << 20) - 1, 5 << 20])
def test_memory_keeps_its_bytes(byte_count: int) -> None:
    data = np.arange(byte_count, dtype=np.uint8)
    before = data.tobytes()
    prefer_huge_pages(data.ctypes.data, byte_count)
    collapse_to_huge_pages(data.ctypes.data, byte_count)
    assert data.tobytes() == before
