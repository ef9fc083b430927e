"""Pull over the real NIXL: what was read is what was there, and an operation is over when it is said to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from serinus.core.errors import TransferFailed
from serinus.core.parts import Part
from serinus.pd.backends import NixlBackend, OpResult, OpState
from tests.extras.conftest import Far
from tests.extras.far import memory, region

PAGES, STRIP = 64, 4096


@pytest.fixture
def near() -> Iterator[NixlBackend]:
    backend = NixlBackend("near")
    yield backend
    backend.close()


def ended(backend: NixlBackend, op: int) -> OpResult:
    while (result := backend.poll(op)).state is OpState.PENDING:
        pass
    return result


def test_pages_are_read_out_of_another_process_into_ours_and_no_other_byte_changes(
    near: NixlBackend, far: Callable[..., Far]
) -> None:
    ours = memory(PAGES, STRIP, None)
    near.register([region(ours)])
    near.connect("far", far("nixl", PAGES, STRIP, 10).endpoint)
    pages, sources = np.array([5, 6, 7, 20, 3], np.int32), np.array([11, 12, 40, 41, 1], np.int32)
    assert ended(near, near.read("far", Part.FULL, pages, sources)).state is OpState.DONE
    expected = np.zeros_like(ours)
    expected[:, pages] = ((10 + sources) % 251).astype(np.uint8)[None, :, None]
    assert np.array_equal(ours, expected)


def test_a_dead_peer_fails_its_reads_and_no_others(near: NixlBackend, far: Callable[..., Far]) -> None:
    ours = memory(PAGES, STRIP, None)
    near.register([region(ours)])
    dead, alive = far("nixl", PAGES, STRIP, 10), far("nixl", PAGES, STRIP, 90)
    near.connect("dead", dead.endpoint)
    near.connect("alive", alive.endpoint)
    some = np.arange(1, 9, dtype=np.int32)
    assert ended(near, near.read("dead", Part.FULL, some, some)).state is OpState.DONE
    dead.kill()
    try:
        result = ended(near, near.read("dead", Part.FULL, some, some))
    except TransferFailed:
        result = OpResult(state=OpState.FAILED)
    assert result.state is OpState.FAILED
    assert ended(near, near.read("alive", Part.FULL, some, some)).state is OpState.DONE
    assert np.array_equal(ours[0, 1:9, 0], (90 + some) % 251)
    near.disconnect("dead")
    with pytest.raises(TransferFailed, match="not connected"):
        near.read("dead", Part.FULL, some, some)


def test_a_peer_that_starts_again_is_another_one(near: NixlBackend, far: Callable[..., Far]) -> None:
    ours = memory(PAGES, STRIP, None)
    near.register([region(ours)])
    first = far("nixl", PAGES, STRIP, 10)
    near.connect("far", first.endpoint)
    some = np.arange(1, 9, dtype=np.int32)
    assert ended(near, near.read("far", Part.FULL, some, some)).state is OpState.DONE
    first.kill()
    near.connect("far", far("nixl", PAGES, STRIP, 70).endpoint)
    assert ended(near, near.read("far", Part.FULL, some, some)).state is OpState.DONE
    assert np.array_equal(ours[1, 1:9, STRIP - 1], (70 + some) % 251)


def test_pages_of_another_shape_are_refused(near: NixlBackend, far: Callable[..., Far]) -> None:
    near.register([region(memory(PAGES, STRIP, None))])
    near.connect("far", far("nixl", PAGES, 2 * STRIP, 10).endpoint)
    some = np.arange(1, 9, dtype=np.int32)
    with pytest.raises(TransferFailed, match="expected equal ones"):
        near.read("far", Part.FULL, some, some)
    with pytest.raises(TransferFailed, match="no endpoint"):
        near.connect("odd", b"nonsense")
