"""Tensors between ranks: threads and gloo do the same, in order, without waiting where none is promised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

from serinus.core.errors import ConfigError, PeerGone
from serinus.parallel import Mesh
from serinus.parallel.comm import Comm, Meeting, SoloComm, ThreadComm, TorchComm, find, listen

KINDS = ("threads", "gloo")
T = TypeVar("T")


def _each(ranks: Sequence[Comm], work: Callable[[Comm], T]) -> list[T]:
    """`work` of every rank at once."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(work, ranks))


def _joined(meeting: Meeting, mesh: Mesh, timeout_s: float = 30.0) -> list[Comm]:
    def join(rank: int) -> Comm:
        return TorchComm(meeting if rank == 0 else find(meeting.address), mesh, rank, timeout_s=timeout_s)

    with ThreadPoolExecutor(mesh.size) as threads:
        return list(threads.map(join, range(mesh.size)))


@contextmanager
def _ranks(kind: str, mesh: Mesh) -> Iterator[Sequence[Comm]]:
    ranks: Sequence[Comm]
    ranks = ThreadComm.ranks_of(mesh, 30.0) if kind == "threads" else _joined(listen("127.0.0.1:0"), mesh)
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
def test_a_stage_sends_several_times_before_the_next_one_listens(kind: str) -> None:
    with _ranks(kind, Mesh(tp=2, pp=2)) as ranks:
        for rank in (0, 1):
            for step in range(4):
                ranks[rank].send(torch.full((step + 1, 3), float(10 * rank + step)))
        for rank in (2, 3):
            for step in range(4):
                x = ranks[rank].recv((step + 1, 3), torch.float32)
                assert x.tolist() == [[10.0 * (rank - 2) + step] * 3] * (step + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_of_all_ranks_is_what_each_hears(kind: str) -> None:
    with _ranks(kind, Mesh(tp=2, pp=2)) as ranks:
        assert _each(ranks, lambda comm: comm.smallest((comm.rank, 9 - comm.rank))) == [(0, 6)] * 4
        assert _each(ranks, lambda comm: comm.smallest((4 + comm.rank,))) == [(4,)] * 4
        assert _each(ranks, lambda comm: comm.smallest(())) == [()] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_for_a_rank_that_left_is_told(kind: str) -> None:
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


def test_nobody_listens_where_nobody_is_and_nobody_listens_twice() -> None:
    meeting = listen("127.0.0.1:0")
    with pytest.raises(ConfigError, match="cannot listen"):
        listen(meeting.address)
    with pytest.raises(ConfigError, match="expected host:port"):
        find("localhost")
    with pytest.raises(PeerGone, match=r"no leader at 127\.0\.0\.1:1 within 0\.1 s"):
        find("127.0.0.1:1", 0.1)


def test_one_rank_alone_has_nobody_to_send_to() -> None:
    solo = SoloComm()
    with pytest.raises(ValueError, match="expected a next stage"):
        solo.send(torch.ones(1))
    with pytest.raises(ValueError, match="expected a stage before"):
        solo.recv((1,), torch.float32)
    assert solo.smallest((3, 4)) == (3, 4)
