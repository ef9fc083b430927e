"""Push over the real Mooncake engine: what was written is what was sent, and after a fence nothing comes any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from serinus.pd.backends import MooncakeBackend
from tests.extras.conftest import Far
from tests.extras.far import memory, region

PAGES, STRIP = 64, 4096


@pytest.fixture
def near() -> Iterator[MooncakeBackend]:
    backend = MooncakeBackend()
    yield backend
    backend.close()


def test_pages_are_written_into_ours_and_no_other_byte_changes(near: MooncakeBackend, far: Callable[..., Far]) -> None:
    ours = memory(PAGES, STRIP, None)
    endpoint = near.register([region(ours)])
    peer = far("mooncake", PAGES, STRIP, 10)
    assert peer.ask("connect", endpoint.hex()) == "ok"
    assert peer.ask("write", 5, 21) == "begun"
    assert peer.ask("wait") == "done"
    expected = np.zeros_like(ours)
    expected[:, 5:21] = ((10 + np.arange(5, 21)) % 251).astype(np.uint8)[None, :, None]
    assert np.array_equal(ours, expected)


@pytest.mark.parametrize("attempt", range(3))
def test_after_a_fence_nothing_comes_of_a_write_that_was_under_way(
    near: MooncakeBackend, far: Callable[..., Far], attempt: int
) -> None:
    pages, strip = 33, 4 << 20
    ours = memory(pages, strip, None)
    endpoint = near.register([region(ours)])
    peer = far("mooncake", pages, strip, 10)
    assert peer.ask("connect", endpoint.hex()) == "ok"
    assert peer.ask("write", 1, pages) == "begun"
    while not ours[0, 2 + attempt, 0]:
        pass
    peer.stop()
    fenced = near.fence("far")
    written = int(np.count_nonzero(ours))
    assert 0 < written < ours.size - ours[:, 0].size, "the write was under way"
    assert fenced.all_peers
    ours[:] = 0
    peer.go_on()
    assert peer.ask("wait") == "lost"
    assert not ours.any(), "late bytes"
    assert peer.ask("connect", fenced.endpoint.hex()) == "ok"
    assert peer.ask("write", 1, 3) == "begun"
    assert peer.ask("wait") == "done"
    assert ours[1, 2, -1] == 12


def test_unregistering_would_be_no_fence(near: MooncakeBackend, far: Callable[..., Far]) -> None:
    """Why the fence destroys the engine: a write under way goes on into memory that is not registered any more."""
    pages, strip = 33, 4 << 20
    ours = memory(pages, strip, None)
    endpoint = near.register([region(ours)])
    peer = far("mooncake", pages, strip, 10)
    assert peer.ask("connect", endpoint.hex()) == "ok"
    assert peer.ask("write", 1, pages) == "begun"
    while not ours[0, 2, 0]:
        pass
    peer.stop()
    assert near._engine.unregister_memory(ours.ctypes.data) == 0
    ours[:] = 0
    peer.go_on()
    assert peer.ask("wait") in ("done", "lost")
    assert ours.any()
    near.fence("far")
