"""Pulls and sums of pages on streams of a GPU, on a device that runs what is queued in any order that its streams and
events leave open."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.rng import Rng
from serinus.kernels import CudaFailed, CudaLibrary, PoolLane
from serinus.kernels.cuda_library import _ARGUMENTS, bound
from serinus.kernels.ref.pull_pages import page_sums, pull_pages
from serinus.kernels.triton.pull_pages import PagePull
from serinus.pd.backends.cuda_pulls import DevicePull, DevicePulls, Mark
from serinus.testing.fake_cuda import FakeCuda

MODEL, IDS, PULLS, OWN, READS = range(5)
PAGES, WIDTH = 24, 16


class Job(PagePull):
    """The kernel's work as the reference does it, when its stream comes to it."""

    def __init__(self, device: FakeCuda, own: Tensor, sources: Tensor | None) -> None:
        lanes = [[PoolLane.of(pool)] if pool is not None else [] for pool in (own, sources)]
        super().__init__(*lanes, (), torch.device("cpu"))
        self.queue, self.pools = device.queue, (own, sources)

    def launch(self, words_N: Tensor, page_count: int, stream: int | None = None) -> None:
        assert stream is not None

        def run() -> None:
            (own, sources), words = self.pools, words_N.numpy()
            seed, (pages, taken) = words[page_count], words[page_count + 1 : 3 * page_count + 1].reshape(2, -1)
            moves = ((), None) if sources is None else ([sources], taken)
            words[:page_count] += pull_pages([own], pages, int(seed), *moves)[:, 0].numpy()

        self.queue(stream, run)


@dataclass(slots=True)
class Gpu:
    device: FakeCuda
    pulls: DevicePulls
    sizes: list[int]
    """Words of each slot that was made."""
    own: Tensor
    other: Tensor

    @classmethod
    def made(cls, seed: int) -> Gpu:
        device, sizes = FakeCuda(Rng(seed)), list[int]()

        def allocate(word_count: int) -> tuple[Tensor, Tensor]:
            sizes.append(word_count)
            return torch.full((word_count,), -1), torch.full((word_count,), -1)

        generator = torch.Generator().manual_seed(seed)
        own, other = (torch.randint(256, (PAGES, WIDTH), generator=generator, dtype=torch.uint8) for _ in range(2))
        library: Any = device
        return cls(device, DevicePulls(library, allocate, lambda: MODEL, IDS, READS), sizes, own, other)

    def pull(
        self, pages: NDArray[np.int32], seed: int, sources: NDArray[np.int32], behind: Mark | None = None
    ) -> DevicePull:
        job = Job(self.device, self.own, self.other)
        return self.pulls.begin(job, PULLS, pages, seed, sources, behind=behind or self.pulls.mark())

    def sums(self, pages: NDArray[np.int32], seed: int, *, behind_model: bool) -> DevicePull:
        job = Job(self.device, self.own, None)
        return self.pulls.begin(job, OWN, pages, seed, behind=self.pulls.mark() if behind_model else None)


def ids(*pages: int) -> NDArray[np.int32]:
    return np.array(pages, np.int32)


def summed(pool: Tensor, pages: NDArray[np.int32], seed: int) -> bytes:
    return page_sums(pool.numpy()[pages], seed).tobytes()


@pytest.mark.parametrize("seed", range(60))
def test_jobs_have_their_sums_and_pages_whatever_the_device_does_first(seed: int) -> None:
    """Steps of the model write pages 0 to 7, pulls the next 8 after a step has cleared them; the last 8 stay."""
    gpu = Gpu.made(seed)
    rng, device, under_way = random.Random(seed), gpu.device, list[tuple[DevicePull, bytes]]()

    def write(pages: NDArray[np.int32], value: int) -> None:
        gpu.own[torch.from_numpy(pages).long()] = value

    for turn in range(40):
        count = rng.randint(0, 4)
        low, middle, high = (first + np.array(rng.sample(range(8), count), np.int32) for first in (0, 8, 16))
        kind = rng.randrange(6)
        if kind == 0:
            device.queue(MODEL, lambda pages=low, value=turn: write(pages, value))
        elif kind == 1:
            device.run()  # no earlier pull is under way
            device.queue(MODEL, lambda pages=middle: write(pages, 0))
            pull = gpu.pull(middle, turn, high)
            assert pull.sums() == summed(gpu.other, high, turn) == summed(gpu.own, middle, turn)
            assert pull.done()
            assert pull.seconds > 0
        elif kind == 2:
            under_way.append((gpu.pull(middle, turn, low), summed(gpu.other, low, turn)))
        elif kind == 3:
            under_way.append((gpu.sums(high, turn, behind_model=False), summed(gpu.own, high, turn)))
        elif kind == 4:
            assert gpu.sums(low, turn, behind_model=True).sums() == summed(gpu.own, low, turn)
            assert not device.streams[MODEL], "sums behind the model's steps came before one of them"
        elif under_way:
            pull, expected = under_way.pop(rng.randrange(len(under_way)))
            if rng.random() < 0.7:
                assert pull.sums() == pull.sums() == expected
            del pull  # some before they were done
        for _ in range(rng.randrange(20)):
            device.step()
    assert all(pull.sums() == expected for pull, expected in under_way)
    assert len(gpu.sizes) < 40, "slots are used again"


def test_a_slot_is_used_again_when_its_sums_were_read_and_not_while_the_device_may_use_it() -> None:
    gpu = Gpu.made(1)
    pulls = list[DevicePull]()
    for turn in range(20):
        pulls.append(gpu.pull(ids(1, 2), turn, ids(3, 4)))
        assert pulls[-1].sums() == summed(gpu.other, ids(3, 4), turn)
    assert gpu.sizes == [4096]
    assert [pull.sums() for pull in pulls] == [summed(gpu.other, ids(3, 4), turn) for turn in range(20)]
    gpu.pull(ids(1), 1, ids(3))  # its sums are not read
    second = gpu.pull(ids(1), 2, ids(3))
    assert gpu.sizes == [4096] * 2
    assert not second.done()
    gpu.device.run()
    assert second.done()
    third = gpu.pull(ids(1), 3, ids(3))
    assert gpu.sizes == [4096] * 2, "that of the first, which has run"
    assert (second.sums(), third.sums()) == (summed(gpu.other, ids(3), 2), summed(gpu.other, ids(3), 3))


def test_a_pull_waits_for_what_was_queued_when_its_pages_were_granted_and_not_for_later_steps() -> None:
    gpu, may_end = Gpu.made(7), list[int]()
    streams = gpu.device.streams
    streams[MODEL].append(lambda: bool(may_end))
    granted = gpu.pulls.mark()
    streams[MODEL].append(lambda: bool(may_end[1:]))
    pull = gpu.pull(ids(1), 1, ids(3), granted)
    del granted
    for _ in range(100):
        gpu.device.step()
    assert not pull.done()
    may_end.append(1)
    assert pull.sums() == summed(gpu.other, ids(3), 1)
    assert len(streams[MODEL]) == 1, "the later step has not ended"
    idle = Gpu.made(8)
    passed = idle.pulls.mark()
    idle.device.streams[MODEL].append(lambda: False)
    assert passed.has_passed()
    assert idle.pull(ids(1), 1, ids(3), passed).sums() == summed(idle.other, ids(3), 1)


def test_a_pull_waits_for_the_step_before_it_and_neither_its_ids_nor_sums_beside_it_do() -> None:
    gpu, may_end = Gpu.made(5), list[int]()
    streams = gpu.device.streams
    streams[MODEL].append(lambda: bool(may_end))
    beside, pull = gpu.sums(ids(9), 2, behind_model=False), gpu.pull(ids(1), 1, ids(3))
    streams[MODEL].append(lambda: bool(may_end[1:]))
    for _ in range(100):
        gpu.device.step()
    assert beside.done()
    assert (pull.done(), len(streams[IDS]), len(streams[OWN])) == (False, 0, 0)
    assert pull._slot is not None
    assert pull._slot.there_N[:4].tolist() == [0, 1, 1, 3], "no sum yet, seed, page, source page"
    may_end.append(1)
    assert pull.sums() == summed(gpu.other, ids(3), 1)
    assert len(streams[MODEL]) == 1, "a step that came later has not ended"
    may_end.append(2)
    gpu.device.run()


def test_a_slot_that_is_too_small_makes_room_for_one_that_is_not() -> None:
    gpu, pages = Gpu.made(2), np.full(2000, 5, np.int32)
    gpu.sums(ids(1), 1, behind_model=False).sums()
    for turn in range(3):
        assert gpu.sums(pages, turn, behind_model=False).sums() == summed(gpu.own, pages, turn)
    assert (gpu.sizes, gpu.device.destroyed) == ([4096, 8192], 4)


def test_what_is_dropped_with_its_queue_keeps_its_memory_until_it_has_run() -> None:
    gpu = Gpu.made(3)
    pull, device, own, other = gpu.pull(ids(1, 2), 1, ids(3, 4)), gpu.device, gpu.own, gpu.other
    del gpu, pull
    assert device.destroyed == 4, "its slot is gone"
    assert not any(device.streams), "and it has run before"
    assert torch.equal(own[1:3], other[3:5])


@pytest.mark.parametrize(
    ("pages", "sources", "words"),
    [
        (ids(1, PAGES), ids(1, 2), "pages 1 .. 24, expected 0 .. 23"),
        (ids(1, 2), ids(-1, 2), "source pages -1 .. 2, expected 0 .. 23"),
        (ids(1, 2), ids(1), "1 source pages, expected 2"),
    ],
)
def test_nothing_is_queued_for_pages_that_are_not_there(
    pages: NDArray[np.int32], sources: NDArray[np.int32], words: str
) -> None:
    gpu = Gpu.made(4)
    granted = gpu.pulls.mark()
    gpu.device.queue(MODEL, int)
    with pytest.raises(ValueError, match=words):
        gpu.pull(pages, 1, sources, granted)
    assert list(map(len, gpu.device.streams)) == [1, 0, 0, 0, 0]
    assert not gpu.sizes


def test_a_slot_of_a_job_that_was_queued_in_part_is_never_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu.made(9)
    with monkeypatch.context() as broken:
        broken.setattr(FakeCuda, "fetch", None)
        with pytest.raises(TypeError):
            gpu.pull(ids(1), 1, ids(3))
    gpu.device.run()
    assert gpu.pull(ids(2), 2, ids(4)).sums() == summed(gpu.other, ids(4), 2)
    assert gpu.sizes == [4096, 4096]


def test_what_the_driver_refuses_is_said_in_its_words_and_addresses_arrive_whole() -> None:
    calls: list[tuple[Any, ...]] = []

    class Library:
        """libcuda, as ctypes calls it."""

    def told(name: str, *arguments: Any) -> int:
        calls.append((name, *arguments))
        return {"cuStreamQuery": 600, "cuEventRecord": 700}.get(name, 0)

    def text(_: int, where: Any) -> int:
        where[0] = b"an illegal address"
        return 0

    library: Any = Library()
    for name, types in _ARGUMENTS.items():
        made = ctypes.CFUNCTYPE(ctypes.c_int, *types)(lambda *arguments, name=name: told(name, *arguments))
        setattr(library, name, made)
    library.cuGetErrorString = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))(text)
    far = (1 << 47) + 8
    with CudaLibrary(far, bound(library, library)) as cuda:
        assert not cuda.is_idle(0)
        cuda.send(far, far + 8, 24, far + 16)
        with pytest.raises(CudaFailed, match=r"cuEventRecord: an illegal address \(700\)"):
            cuda.record(1, far)
    assert [call[0] for call in calls] == [
        "cuStreamGetCtx", "cuCtxPushCurrent_v2", "cuStreamQuery", "cuMemcpyHtoDAsync_v2", "cuEventRecord",
        "cuCtxPopCurrent_v2",
    ]  # fmt: skip
    assert calls[3][1:] == (far, far + 8, 24, far + 16)
