"""Tensors between ranks: threads and gloo do the same, in order, without waiting where none is promised."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from serinus.core.clock import WallClock
from serinus.core.errors import ConfigError, PeerGone, StepAbandoned
from serinus.parallel import Mesh
from serinus.parallel.comm import Comm, Meeting, SoloComm, TorchComm, find, listen
from serinus.parallel.near import NearFile, NearStage
from serinus.parallel.thread_comm import ThreadComm

KINDS = ("threads", "gloo", "gloo over IPv6", "memory")
T = TypeVar("T")


def _each(ranks: Sequence[Comm], work: Callable[[Comm], T]) -> list[T]:
    """`work` of every rank at once."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(work, ranks))


def _joined(meeting: Meeting, mesh: Mesh, *, near: bool) -> list[Comm]:
    def join(rank: int) -> Comm:
        return TorchComm(meeting if rank == 0 else find(meeting.address), mesh, rank, timeout_s=30.0, near=near)

    with ThreadPoolExecutor(mesh.size) as threads:
        return list(threads.map(join, range(mesh.size)))


@contextmanager
def _ranks(kind: str, mesh: Mesh) -> Iterator[Sequence[Comm]]:
    ranks: Sequence[Comm]
    if kind == "threads":
        ranks = ThreadComm.ranks_of(mesh, 30.0)
    else:
        ranks = _joined(listen("[::1]:0" if "IPv6" in kind else "127.0.0.1:0"), mesh, near=kind == "memory")
    yield ranks
    for comm in ranks:
        comm.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (2, 2)])
def test_the_ranks_of_a_stage_add_gather_and_agree(kind: str, tp: int, pp: int) -> None:
    mesh = Mesh(tp=tp, pp=pp)

    def work(comm: Comm) -> tuple[list[float], list[float] | None, list[int]]:
        x = torch.full((2, 2), 10.0**comm.rank)
        gathered = comm.gather_last(torch.tensor([[comm.rank, 7]]))
        shared = comm.broadcast(torch.tensor([comm.rank]))
        return comm.all_reduce(x)[0].tolist(), None if gathered is None else gathered[0].tolist(), shared.tolist()

    with _ranks(kind, mesh) as ranks:
        found = _each(ranks, work)
    for rank, (total, gathered, shared) in enumerate(found):
        stage = range(mesh.pp_rank(rank) * tp, (mesh.pp_rank(rank) + 1) * tp)
        assert total == [sum(10.0**i for i in stage)] * 2
        assert gathered == ([value for i in stage for value in (i, 7)] if mesh.tp_rank(rank) == 0 else None)
        assert shared == [stage[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_integer_sums_wrap_and_bf16_sums_are_the_same_bits_everywhere(kind: str) -> None:
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(3)).bfloat16()

    def work(comm: Comm) -> tuple[int, torch.Tensor]:
        word = comm.all_reduce(torch.tensor([(1 << 62) + comm.rank]))
        return int(word), comm.all_reduce(values[comm.rank].clone())

    with _ranks(kind, Mesh(tp=3)) as ranks:
        (one, first), (two, second), (three, third) = _each(ranks, work)
    assert one == two == three == 3 * (1 << 62) + 3 - (1 << 64)
    assert torch.equal(first, second)
    assert torch.equal(second, third)
    assert float((first.float() - values.float().sum(0)).abs().max()) < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_larger_than_a_slot_add_up_and_come_together(kind: str) -> None:
    """Slots of shared memory are 1 MiB: several rounds, the last of them short."""
    rows = torch.arange(300_001, dtype=torch.float32)

    def work(comm: Comm) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        x = torch.stack([rows, rows + comm.rank])
        return comm.all_reduce(x.clone()), comm.gather_last(x), comm.broadcast(x)

    with _ranks(kind, Mesh(tp=2)) as ranks:
        (one, gathered, first), (two, none, second) = _each(ranks, work)
    assert torch.equal(one, torch.stack([2 * rows, 2 * rows + 1]))
    assert torch.equal(one, two)
    assert gathered is not None
    assert torch.equal(gathered, torch.stack([torch.cat([rows, rows]), torch.cat([rows, rows + 1])]))
    assert none is None
    assert torch.equal(first, second)


@pytest.mark.slow
def test_a_rank_that_is_killed_fails_the_ranks_that_wait_for_it() -> None:
    """In shared memory nothing tells of it but the lock that the kernel let go of."""
    script = (
        "import sys\nfrom serinus.parallel import Mesh\nfrom serinus.parallel.comm import TorchComm, find\n"
        "comms = [TorchComm(find(a), Mesh(tp=2), 1, near=n) for a, n in zip(sys.argv[1:], (True, False))]\n"
        "print('joined', flush=True)\nsys.stdin.read()\n"
    )
    meetings = [listen("127.0.0.1:0") for _ in range(2)]
    command = [sys.executable, "-c", script, *(meeting.address for meeting in meetings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        ranks = [TorchComm(m, Mesh(tp=2), 0, near=n) for m, n in zip(meetings, (True, False), strict=True)]
        assert child.stdout is not None
        assert child.stdout.readline() == b"joined\n"
        maps = Path("/proc/self/maps").read_text().splitlines()
        assert {line.split()[-1] for line in maps if "serinus-ranks" in line} == {"(deleted)"}
        child.kill()
        for comm in ranks:
            with pytest.raises(PeerGone, match="parallel: "):
                comm.all_reduce(torch.ones(4))
            comm.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_sends_several_times_before_the_next_one_listens(kind: str) -> None:
    with _ranks(kind, Mesh(tp=2, pp=2)) as ranks:
        for rank in (0, 1):
            for step in range(4):
                ranks[rank].send(torch.full((step + 1, 3), float(10 * rank + step)))
        for rank in (2, 3):
            for step in range(4):
                x = ranks[rank].recv((step + 1, 3), torch.float32)
                assert x.tolist() == [[10.0 * (rank - 2) + step] * 3] * (step + 1)


def test_what_was_sent_long_ago_is_not_kept() -> None:
    kept = []
    with _ranks("gloo", Mesh(pp=2)) as ranks:
        for step in range(32):
            x = torch.full((3,), float(step))
            kept.append(weakref.ref(x))
            ranks[0].send(x)
            del x
            assert ranks[1].recv((3,), torch.float32).tolist() == [float(step)] * 3
        assert sum(each() is not None for each in kept) <= 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_rank_has_sent_comes_though_it_leaves(kind: str) -> None:
    """Told to stop with several plans under way, a stage is done long before the next one has asked for its part."""
    with _ranks(kind, Mesh(pp=2)) as ranks, ThreadPoolExecutor(1) as thread:
        ranks[0].send(torch.ones(3))
        ranks[0].send(torch.full((100_000,), 2.0))
        leaving = thread.submit(ranks[0].close)
        assert ranks[1].recv((3,), torch.float32).tolist() == [1.0] * 3
        assert float(ranks[1].recv((100_000,), torch.float32).sum()) == 200_000.0
        leaving.result(20.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_of_all_ranks_is_what_each_hears(kind: str) -> None:
    with _ranks(kind, Mesh(tp=2, pp=2)) as ranks:
        assert _each(ranks, lambda comm: comm.smallest((comm.rank, 9 - comm.rank))) == [(0, 6)] * 4
        assert _each(ranks, lambda comm: comm.smallest((4 + comm.rank,))) == [(4,)] * 4
        assert _each(ranks, lambda comm: comm.smallest(())) == [()] * 4


def test_ranks_tell_each_other_lists_of_unequal_lengths() -> None:
    """A GPU that shares its memory tells its handle, one that does not an empty list."""
    with _ranks("gloo", Mesh(tp=2, pp=2)) as ranks:
        told = _each(ranks, lambda comm: comm.told(range(comm.rank)))
        assert told == [[[], [0], [0, 1], [0, 1, 2]]] * 4


class _Meanwhile(WallClock):
    """Something happens when the time is asked for the first time."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._acts = [act]

    def now(self) -> float:
        while self._acts:
            self._acts.pop()()
        return super().now()


def test_a_rank_that_leaves_after_a_round_does_not_fail_ranks_that_read_that_round_later() -> None:
    """As at the end of an engine: one rank has its last step and the word to stop, the other was off the core."""
    file = NearFile.make(2)
    assert file is not None
    other_file = NearFile.find(file.path.name, 1, 2)
    file.path.unlink()
    assert other_file is not None
    other = NearStage(other_file, 1, 2, WallClock(), 30.0, None)

    def last_round() -> None:
        other.all_reduce(torch.ones(3))
        other.close()

    late = NearStage(file, 0, 2, _Meanwhile(last_round), 30.0, None)
    assert late.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    with pytest.raises(PeerGone, match="slice 1 of this stage left"):
        late.all_reduce(torch.ones(3))
    late.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_waits_for_one_that_left_is_told(kind: str) -> None:
    with _ranks(kind, Mesh(tp=2, pp=2)) as ranks, ThreadPoolExecutor(2) as threads:
        waiting = [
            threads.submit(ranks[0].all_reduce, torch.ones(4)),
            threads.submit(ranks[3].recv, (4,), torch.float32),
        ]
        ranks[1].close()
        for one in waiting:
            with pytest.raises(PeerGone, match="parallel: "):
                one.result(20.0)
        with pytest.raises(PeerGone):
            ranks[1].all_reduce(torch.ones(4))


def test_waiting_is_counted() -> None:
    with _ranks("gloo", Mesh(pp=2)) as ranks, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ranks[1].recv, (1,), torch.float32)
        _each([SoloComm()], lambda comm: comm.smallest(()))
        ranks[0].send(torch.ones(1))
        waiting.result(20.0)
        assert ranks[1].waited_s > 0.0 == ranks[0].waited_s


def test_ranks_that_did_not_come_are_named() -> None:
    meeting = listen("127.0.0.1:0")
    with pytest.raises(PeerGone, match=r"TP1 PP0, TP0 PP1, TP1 PP1 did not come to 127.0.0.1:\d+ within 0.2 s"):
        TorchComm(meeting, Mesh(tp=2, pp=2), 0, timeout_s=0.2)


def test_a_wait_for_ranks_ends_when_one_is_known_to_be_lost() -> None:
    def lost() -> None:
        raise PeerGone("TP1 PP0 was killed")

    with pytest.raises(PeerGone, match="was killed"):
        TorchComm(listen("127.0.0.1:0"), Mesh(tp=2), 0, timeout_s=60.0, check=lost)


def test_an_address_is_listened_on_once_and_only_on_this_machine() -> None:
    meeting = listen("127.0.0.1:0")
    with pytest.raises(ConfigError, match="cannot listen"):
        listen(meeting.address)
    with pytest.raises(ConfigError, match="expected host:port"):
        find("localhost")
    with pytest.raises(ConfigError, match="in brackets"):
        find("::1:5000")
    with pytest.raises(PeerGone, match=r"no leader at 127\.0\.0\.1:1 within 0\.1 s"):
        find("127.0.0.1:1", 0.1)


def test_one_rank_alone_has_no_stage_to_send_to() -> None:
    solo = SoloComm()
    with pytest.raises(ValueError, match="expected a next stage"):
        solo.send(torch.ones(1))
    with pytest.raises(ValueError, match="expected a stage before"):
        solo.recv((1,), torch.float32)
    assert solo.smallest((3, 4)) == (3, 4)


@pytest.mark.parametrize("kind", ["threads", "memory"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (1, 2), (2, 3)])
def test_ranks_leave_a_step_together_when_one_of_them_abandons_it(kind: str, tp: int, pp: int) -> None:
    """Each rank in turn, at each moment of a step, also twice in a row; the step after it is whole."""
    mesh = Mesh(tp=tp, pp=pp)
    moments = ("first", "before", "between", "after", "last")
    plan = [(victim, moment) for victim in range(mesh.size) for moment in moments]

    def step(comm: Comm, number: int, fails: tuple[int, str]) -> list[float]:
        def at(moment: str) -> None:
            if fails == (comm.rank, moment):
                raise MemoryError

        stage, x = mesh.pp_rank(comm.rank), torch.full((2, 2), 1.0 + comm.rank)
        at("first")
        if stage:
            x += comm.recv((2, 2), torch.float32)
        at("before")
        x = comm.all_reduce(x)
        at("between")
        x = comm.all_reduce(x)
        at("after")
        if stage < pp - 1:
            comm.send(x)
            at("last")
        return [number, *x[0].tolist()]

    def work(comm: Comm) -> list[list[float] | str]:
        found: list[list[float] | str] = []
        for number, fails in enumerate([(-1, ""), *plan, *plan[::2], (-1, "")], 1):
            comm.begin(number)
            try:
                found.append(step(comm, number, fails))
            except (MemoryError, StepAbandoned) as error:
                found.append(type(error).__name__)
                comm.abandon((2, 2), torch.float32)
        return found

    with _ranks(kind, mesh) as ranks:
        assert all(comm.can_abandon for comm in ranks)
        found = _each(ranks, work)
    for rank, steps in enumerate(found):
        whole = steps[0][1:]
        assert steps[-1] == [len(steps), *whole], "what is abandoned leaves nothing behind"
        for number, (victim, moment) in enumerate([*plan, *plan[::2]], 2):
            came = steps[number - 1]
            if rank == victim and (moment != "last" or mesh.pp_rank(rank) < pp - 1):
                assert came == "MemoryError"
            elif came != "StepAbandoned":
                assert came == [number, *whole], "a step is whole or abandoned"
            elif moment == "last":
                raise AssertionError(f"rank {rank} abandoned step {number}, which was computed")
        assert "StepAbandoned" in steps or (mesh.pp_rank(rank) == 0 and tp == 1), "the first stage needs no other"
