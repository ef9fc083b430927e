"""A host pool for the storage tests."""

from __future__ import annotations

import pytest

from serinus.pool import HostPool
from tests.pool.storing import KEYS
from tests.pool.writers import SPEC, bytes_of


@pytest.fixture
def host() -> HostPool:
    """Host pages 1 .. 6 hold the bytes of KEYS, 11 .. 16 are where reads go."""
    pool = HostPool(SPEC, 20)
    for i, key in enumerate(KEYS):
        pool.data_PY[i + 1] = bytes_of(key)
    return pool
