"""The tiers of several ranks: a page that one rank lacks is missing; an operation ends when it has ended everywhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import serinus.cache
from serinus.cache import PartGeometry, PrefetchState
from serinus.core.errors import InvariantError
from serinus.core.moves import Move, MoveDone, MoveKind, StorageDone
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.ranks.tiers import (
    CancelPages,
    CopyPages,
    EndCopies,
    QueryPages,
    RankMover,
    RankStorage,
    ReadPages,
    TierWorker,
    WritePages,
)
from serinus.testing.answering_line import AnsweringLine
from serinus.testing.fake_mover import FakeMover
from tests.cache.drive import drive
from tests.cache.model import Shape
from tests.cache.ranked import RankedWorld
from tests.cache.tiers import COUNTERS

NAMES = ("TP0 PP0", "TP1 PP0", "TP0 PP1")
KEYS = (b"a" * 16, b"b" * 16, b"c" * 16)


class Wire(AnsweringLine):
    """A line that the test reads, and answers on; a pump brings one answer."""

    def __init__(self) -> None:
        super().__init__([object()] * len(NAMES), late=True, answers_max=1)  # type: ignore[list-item]

    @property
    def orders(self) -> list[object]:
        """What all ranks were told."""
        assert all(waiting == self.waiting[0] for waiting in self.waiting), "a command for one rank alone"
        return list(self.waiting[0])


def move(op: int, kind: MoveKind = MoveKind.BACKUP) -> Move:
    return Move(op=op, kind=kind, part=Part.FULL, source=np.array([op], np.int32), target=np.array([op], np.int32))


def test_a_copy_has_ended_when_every_rank_said_so_and_failed_where_one_did() -> None:
    wire = Wire()
    mover = RankMover(wire, NAMES)
    mover.submit([move(1), move(2)])
    (order,) = wire.orders
    assert isinstance(order, CopyPages)
    assert [m.op for m in order.moves] == [1, 2]
    for rank in range(3):
        wire.answer(rank, MoveDone(op=2, ok=rank != 1, error="no" * (rank == 1), seconds=float(rank), byte_count=8))
    for rank in (2, 0):
        wire.answer(rank, MoveDone(op=1, ok=True, seconds=1.0, byte_count=4))
    assert list(mover._folds.open) == [1]
    assert mover.poll() == [MoveDone(op=2, ok=False, error="TP1 PP0: no", seconds=2.0, byte_count=24)]
    wire.answers += [(1, MoveDone(op=1, ok=True, seconds=1.0, byte_count=4))]
    assert mover.wait([1]) == [MoveDone(op=1, ok=True, seconds=1.0, byte_count=12)]
    assert not mover._folds.open
    assert mover.poll() == []


def test_a_rank_answers_at_once_what_its_leader_waits_for() -> None:
    wire = Wire()
    leader = RankMover(wire, NAMES)
    leader.submit([move(1), move(2)])
    wire.answers += [(rank, MoveDone(op=1, ok=True)) for rank in range(3)]
    assert [done.op for done in leader.wait([1])] == [1]
    assert wire.orders[1:] == [EndCopies(ops=(1,))]

    content = {Part.FULL: np.zeros((4, 2), np.uint64)}
    copies = FakeMover(page_size=2, device=content, host_pages={Part.FULL: 4})
    hand = TierWorker(copies, None)
    assert not hand.obey(wire.orders[0])
    assert hand.busy
    assert hand.answers() == []
    assert [done.op for done in hand.obey(wire.orders[1])] == [1]
    assert not hand.obey(wire.orders[1]), "answered twice"
    copies.finish(2)
    assert [done.op for done in hand.answers()] == [2]
    assert not hand.busy


def test_copies_that_ended_are_told_in_the_order_of_submission() -> None:
    wire = Wire()
    mover = RankMover(wire, NAMES)
    mover.submit([move(1)])
    mover.submit([move(2)])
    for op in (2, 1):
        for rank in range(3):
            wire.answer(rank, MoveDone(op=op, ok=True))
    assert [done.op for done in mover.poll()] == [1, 2]


def test_a_page_is_stored_where_every_rank_has_it_and_good_as_far_as_the_poorest() -> None:
    wire = Wire()
    storage = RankStorage(wire, NAMES)
    storage.query(1, KEYS, [Part.FULL, Part.SWA])
    storage.read(2, Part.FULL, KEYS, np.array([4, 5, 6], np.int32))
    storage.write(3, Part.SWA, KEYS, np.array([4, 5, 6], np.int32))
    assert [type(order) for order in wire.orders] == [QueryPages, ReadPages, WritePages]
    both = {0: ([1, 1, 1], [1, 0, 1]), 1: ([1, 1, 0], [1, 1, 1]), 2: ([1, 1, 1], [1, 1, 1])}
    for rank, (full, swa) in both.items():
        present = (np.array(full, np.bool_), np.array(swa, np.bool_))
        wire.answer(rank, StorageDone(op=1, present=present))
        wire.answer(rank, StorageDone(op=2, good=3 - rank, error="torn" * (rank == 2), byte_count=10))
    asked, read = storage.poll()
    assert [p.tolist() for p in asked.present] == [[True, True, False], [True, False, True]]
    assert (read.op, read.good, read.error, read.byte_count) == (2, 1, "TP0 PP1: torn", 30)
    storage.cancel(3)
    storage.cancel(2)  # over: no rank is told
    assert wire.orders[3:] == [CancelPages(op=3)]
    assert list(storage._folds.open) == [3]


def test_an_answer_to_no_operation_under_way_stops_the_engine() -> None:
    wire = Wire()
    mover, storage = RankMover(wire, NAMES), RankStorage(wire, NAMES)
    mover.submit([move(1)])
    wire.answer(0, MoveDone(op=1, ok=True))
    for rank, op in ((0, 1), (1, 9), (3, 1)):
        with pytest.raises(InvariantError, match=f"rank {rank} answers operation {op}"):
            wire.answer(rank, MoveDone(op=op, ok=True))
    with pytest.raises(InvariantError, match="commanded twice"):
        mover.submit([move(1)])
    storage.query(5, KEYS, [Part.FULL])
    wire.answer(0, StorageDone(op=5, present=(np.ones(3, np.bool_),)))
    wire.answer(1, StorageDone(op=5, present=(np.ones(2, np.bool_),)))
    with pytest.raises(InvariantError, match="keys, expected one"):
        wire.answer(2, StorageDone(op=5, present=(np.ones(3, np.bool_),)))


def test_a_rank_without_storage_is_asked_for_none() -> None:
    hand = TierWorker(RankMover(Wire(), NAMES), None)
    with pytest.raises(InvariantError, match="QueryPages"):
        hand.obey(QueryPages(op=1, keys=KEYS, parts=(Part.FULL,)))
    with pytest.raises(InvariantError, match="int for the tiers"):
        hand.obey(3)


# ---- the cache over ranks -------------------------------------------------------------------------------------------


def world(seed: int, steps: int = 150, **ports: Any) -> RankedWorld:
    """A seeded world of 2 to 4 ranks, driven and drained."""
    made = partial(RankedWorld, ranks=2 + seed % 3, rng=Rng(seed).split("ranks"), **ports)
    found = drive(serinus.cache, seed, steps, make=made)
    assert isinstance(found, RankedWorld)
    return found


@pytest.mark.slow
def test_whatever_ranks_do_late_or_badly_a_hit_is_one_on_all_of_them() -> None:
    total: Counter[str] = Counter()
    for seed in range(100, 112):
        done = world(seed)
        total["rules"] += done.steps
        total += done.counted()
    assert total["rules"] >= 1_800, total
    short = {name for name in COUNTERS if not total[name]} - {"dropped_tokens"}
    assert not short, f"the driver never reaches {short}"


PROMPT = [0, 1, 2, 1, 0, 2, 2, 1, 0, 0, 1, 1, 2, 2, 0, 1]
SMALL = Shape(page_size=2, parts={Part.FULL: PartGeometry(pages=20, host_pages=20)}, storage=True)


def restarted_without(rank: int, page: int, *, between: bool, **ports: Any) -> RankedWorld:
    """All of a prompt is stored; a rank loses a page of it; after a restart a request asks for it.

    `between`: it is lost after the rank has said that it has it.
    """
    made = RankedWorld(serinus.cache, SMALL, ranks=3, rng=Rng(1), **ports)
    made.arrive("", PROMPT)
    made.admit(0)
    made.chunk(0, len(PROMPT))
    made.end(0, retract=False)
    made.settle()
    assert [len(stored) for stored in made.stores] == [8, 8, 8]
    made.crash()
    made.arrive("", [*PROMPT, 1, 2])
    if not between:
        lost_page(made, rank, page)
    made.prefetch(0)
    while made.cache.prefetch_state(made.waiting[0].rid) is PrefetchState.QUERY:
        made.end_storage(0)
        made.poll()
    if between:
        lost_page(made, rank, page)
    made.settle()
    made.check()
    return made


def lost_page(made: RankedWorld, rank: int, page: int) -> None:
    """Page `page` of the prompt is stored by this rank no more."""
    chain = made.cache.pools.keys
    keys = chain.chain(chain.seed(b""), np.array(PROMPT, np.int32).tobytes())
    storage = made.ranks[rank].storage
    assert storage is not None
    made.failures += 1
    storage.lose([(keys[page * 16 : page * 16 + 16], Part.FULL)])
    assert len(made.stores[rank]) == 7


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize(("rank", "page"), [(0, 0), (1, 3), (2, 7)])
def test_what_one_rank_has_lost_is_computed_again_and_what_comes_before_it_is_not(
    rank: int, page: int, between: bool
) -> None:
    made = restarted_without(rank, page, between=between)
    assert made.cache.stats().prefetched_tokens == 2 * page
    made.drain()


class AnyIsGood(RankMover):
    """A copy that went well on one rank went well."""

    def take(self, rank: int, done: MoveDone) -> None:
        super().take(rank, replace(done, ok=done.ok or rank > 0))


class FirstIsAll(RankMover):
    """A copy has ended when the first rank says so."""

    def take(self, rank: int, done: MoveDone) -> None:
        if done.op in self._folds.open:
            for each in range(self._line.size):
                super().take(each, done)


class RichestIsAll(RankStorage):
    """What one rank read, all read."""

    def take(self, rank: int, done: StorageDone) -> None:
        fold = self._folds.open[done.op]
        good = max([done.good, *(answer.good for answer in fold.answers.values())])
        for each, answer in fold.answers.items():
            fold.answers[each] = replace(answer, good=good)
        super().take(rank, replace(done, good=good))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [AnyIsGood, FirstIsAll])
def test_copies_that_not_all_ranks_made_are_found_out(mutant: type[RankMover]) -> None:
    for seed in range(30, 60):
        try:
            world(seed, mover_of=mutant)
        except (AssertionError, InvariantError):
            return
    raise AssertionError(f"{mutant.__name__} went unnoticed")


def test_reads_that_not_all_ranks_made_are_found_out() -> None:
    with pytest.raises(AssertionError, match="K1"):
        restarted_without(1, 3, between=True, storage_of=RichestIsAll)
