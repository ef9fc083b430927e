"""The tiny engine with several ranks: the real cache over RankMover and RankStorage, each rank with tiers of its own.

What the leader computes, every rank computes; copies and storage operations reach the ranks late, end there in any
order, fail on one alone, and their answers come late. All oracles look at every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.core.moves import Move, MoveDone, MoveKind, StorageDone
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.ranks.tiers import (
    CopyPages,
    QueryPages,
    RankMover,
    RankStorage,
    ReadPages,
    TierWorker,
    WritePages,
)
from serinus.testing.answering_line import AnsweringLine
from serinus.testing.fake_mover import POISON, FakeMover, FakeStorage, StoredPages
from tests.cache.base import Req
from tests.cache.model import Pool, Shape
from tests.cache.tiers import TieredWorld


class Rank:
    """One rank: content pools, a mover, a storage, and the two ends of its line."""

    def __init__(self, shape: Shape, stored: StoredPages, *, early: bool) -> None:
        size = shape.page_size
        self.pool = {part: np.zeros((shape.pages(("device", part)), size), np.uint64) for part in shape.parts}
        host = {part: shape.pages(("host", part)) for part in shape.parts} if shape.tiered else {}
        self.mover = FakeMover(page_size=size, device=self.pool, host_pages=host, early=early)
        self.storage = FakeStorage(stored, host=self.mover.host, use=self.mover.use) if shape.storage else None
        self.hand = TierWorker(self.mover, self.storage)
        self.orders: deque[Any] = deque()
        """Ordered, and not obeyed yet: those of the line."""
        self.answers: deque[MoveDone | StorageDone] = deque()
        """Given, and not at the leader yet."""

    def obey(self) -> None:
        """Everything that was ordered."""
        while self.orders:
            self.answers.extend(self.hand.obey(self.orders.popleft()))

    def look(self) -> None:
        """What ended is on its way to the leader."""
        self.answers.extend(self.hand.answers())


class RankedLine(AnsweringLine):
    """The test decides when orders and answers arrive."""

    def __init__(self, ranks: list[Rank], rng: Rng) -> None:
        super().__init__(ranks, late=True)
        for rank, orders in zip(ranks, self.waiting, strict=True):
            rank.orders = orders
        self._rng = rng
        self.unanswered: dict[int, set[int]] = {}
        """Copy or storage operation -> ranks of which no answer has come."""
        self.copies: dict[int, tuple[Move, ...]] = {}
        """What each copy moves."""

    def command(self, command: Any, rank: int | None = None) -> None:
        if isinstance(command, CopyPages):
            for move in command.moves:
                self.copies[move.op] = (*self.copies.get(move.op, ()), move)
                if move.kind is MoveKind.LOAD:
                    for each in self.ranks:
                        each.pool[move.part][move.target] = np.uint64(POISON | move.op)
        begun = {command.op} if isinstance(command, (QueryPages, ReadPages, WritePages)) else set()
        for op in {move.op for move in command.moves} if isinstance(command, CopyPages) else begun:
            self.unanswered[op] = set(range(self.size))
        super().command(command, rank)

    def pump(self, wait_s: float = 0.0) -> None:
        if wait_s and not self.answers:
            self._hasten()
        super().pump()

    def arrive(self, rank: int) -> None:
        """The oldest answer of a rank comes to the leader."""
        if self.ranks[rank].answers:
            answer = self.ranks[rank].answers.popleft()
            self.answers.append((rank, answer))
            self.unanswered[answer.op].discard(rank)

    def _hasten(self) -> None:
        """The leader waits for copies: one random rank works on."""
        at = self._rng.randrange(self.size)
        rank = self.ranks[at]
        rank.obey()
        if rank.mover.pending:
            rank.mover.finish(self._rng.choice(list(rank.mover.pending)))
        rank.look()
        self.arrive(at)

    def on_its_way(self, ops: list[int]) -> dict[int, None]:
        """Those that some rank has not answered, as far as the leader can know."""
        return {op: None for op in ops if self.unanswered[op]}


class Everywhere:
    """The content of a part on all ranks: what is computed is computed by all; it reads as the rank looked at."""

    def __init__(self, ranks: list[Rank], part: Part) -> None:
        self._ranks, self._part = ranks, part
        self.seen = 0

    def __getitem__(self, at: Any) -> Any:
        return self._ranks[self.seen].pool[self._part][at]

    def __setitem__(self, at: Any, value: Any) -> None:
        for rank in self._ranks:
            rank.pool[self._part][at] = value


class Failed(MutableMapping[int, tuple[Move, ...]]):
    """The loads that failed on any rank."""

    def __init__(self, ranks: list[Rank]) -> None:
        self._all = [rank.mover.failed_pages for rank in ranks]

    def __getitem__(self, op: int) -> tuple[Move, ...]:
        return next(failed[op] for failed in self._all if op in failed)

    def __setitem__(self, op: int, moves: tuple[Move, ...]) -> None:
        raise AssertionError("testing: loads fail on ranks")

    def __delitem__(self, op: int) -> None:
        for failed in self._all:
            failed.pop(op, None)

    def __iter__(self) -> Iterator[int]:
        return iter({op: None for failed in self._all for op in failed})

    def __len__(self) -> int:
        return len(list(iter(self)))


class UseEverywhere:
    """Which pages operations in flight touch, on any rank."""

    def __init__(self, ranks: list[Rank]) -> None:
        self._uses = [rank.mover.use for rank in ranks]

    @property
    def readers(self) -> set[tuple[str, Part, int]]:
        return {page for use in self._uses for page in use.readers}

    @property
    def writers(self) -> set[tuple[str, Part, int]]:
        return {page for use in self._uses for page in use.writers}

    def of(self, tier: str, part: Part) -> set[int]:
        return {page for use in self._uses for page in use.of(tier, part)}


@dataclass(slots=True)
class Copy:
    """A copy that has not ended everywhere."""

    moves: tuple[Move, ...]


class Movers:
    """The copies of all ranks, as the world sees and ends them: FakeMover's face."""

    def __init__(self, ranks: list[Rank], line: RankedLine, mover: RankMover, rng: Rng) -> None:
        self._ranks, self._line, self._mover, self._rng = ranks, line, mover, rng
        self.failed_pages = Failed(ranks)
        self.use = UseEverywhere(ranks)
        self.seen = 0

    @property
    def pools(self) -> Any:
        return self._ranks[self.seen].mover.pools

    @property
    def pending(self) -> dict[int, Any]:
        """Those that some rank has not answered."""
        return {op: Copy(self._line.copies[op]) for op in self._line.on_its_way(list(self._mover._folds.open))}

    @property
    def unpolled(self) -> bool:
        """Whether the leader has answers that the cache has not polled."""
        return any(not self._line.unanswered[op] for op in self._mover._folds.open) or bool(self._mover._ended)

    def gate(self) -> None:
        """A forward pass on every rank: it comes after all that was ordered."""
        for rank in self._ranks:
            rank.obey()
            rank.mover.gate()

    def fail(self, op: int) -> None:
        """It fails on one rank, where that has not ended it."""
        at = self._rng.choice(sorted(self._line.unanswered[op]))
        rank = self._ranks[at]
        rank.obey()
        if op in rank.mover.pending:
            rank.mover.fail(op)

    def finish(self, op: int) -> None:
        """It goes on: on one rank or on all, as far as its end there, or its answer."""
        waiting = sorted(self._line.unanswered.get(op, ()))
        if not waiting:
            return
        for at in waiting if self._rng.random() < 0.8 else [self._rng.choice(waiting)]:
            rank = self._ranks[at]
            rank.obey()
            if op in rank.mover.pending:
                rank.mover.finish(op)
            rank.look()
            if self._rng.random() < 0.9:
                self._line.arrive(at)


class Storages:
    """The storage operations of all ranks: FakeStorage's face."""

    def __init__(self, ranks: list[Rank], line: RankedLine, storage: RankStorage, rng: Rng) -> None:
        self._ranks, self._line, self._storage, self._rng = ranks, line, storage, rng

    @property
    def pending(self) -> dict[int, None]:
        return self._line.on_its_way(list(self._storage._folds.open))

    @property
    def unpolled(self) -> bool:
        return len(self._storage._folds.open) > len(self.pending) or bool(self._storage._ended)

    def finish(self, op: int, good_max: int | None = None) -> None:
        """It goes on; on one rank alone no more than `good_max` pages are good."""
        waiting = sorted(self._line.unanswered.get(op, ()))
        if not waiting:
            return
        poor = self._rng.choice(waiting)
        for at in waiting if self._rng.random() < 0.8 else [poor]:
            rank = self._ranks[at]
            rank.obey()
            assert rank.storage is not None
            if op in rank.storage.pending:
                rank.storage.finish(op, good_max if at == poor else None)
            rank.look()
            if self._rng.random() < 0.9:
                self._line.arrive(at)


class RankedWorld(TieredWorld):
    """The tiny engine on several ranks."""

    def __init__(
        self,
        cache_room: ModuleType,
        shape: Shape,
        *,
        ranks: int,
        rng: Rng,
        mover_of: type[RankMover] = RankMover,
        storage_of: type[RankStorage] = RankStorage,
        **settings: Any,
    ) -> None:
        """`mover_of`, `storage_of`: the ports under test, or mutants of them."""
        self.mover_of, self.storage_of = mover_of, storage_of
        self.names = [f"rank {rank}" for rank in range(ranks)]
        self.rng = rng
        self.stores: list[StoredPages] = [{} for _ in self.names]
        """What each rank has stored."""
        super().__init__(cache_room, shape, **settings)

    def boot(self) -> None:
        """See Base: every rank is a new process."""
        super().boot()
        shape = self.shape
        self.ranks = [Rank(shape, stored, early=self.early) for stored in self.stores]
        self.line = RankedLine(self.ranks, self.rng)
        mover = self.mover_of(self.line, self.names)
        storage = self.storage_of(self.line, self.names) if shape.storage else None
        self.pool = {part: Everywhere(self.ranks, part) for part in shape.parts}
        self.mover = Movers(self.ranks, self.line, mover, self.rng)
        self.storage = None if storage is None else Storages(self.ranks, self.line, storage, self.rng)
        self.cache = self.new_cache(mover if shape.tiered else None, storage)

    def _each(self) -> Iterator[Rank]:
        """Look at every rank in turn."""
        for at, rank in enumerate(self.ranks):
            self._look_at(at)
            yield rank
        self._look_at(0)

    def _look_at(self, rank: int) -> None:
        self.mover.seen = rank
        for pool in self.pool.values():
            pool.seen = rank

    def read(self, req: Req, part: Part, row: NDArray[np.int32], first: int, low: int) -> None:
        """K1 on every rank."""
        for _ in self._each():
            super().read(req, part, row, first, low)

    def check_content(self, pool: Pool) -> None:
        """K1 on every rank: what the tree lists is there on all."""
        for _ in self._each():
            super().check_content(pool)

    def is_bad(self, part: Part, page: int, op: int) -> bool:
        """Whether the page is poisoned on any rank."""
        return any(bool((rank.pool[part][page] == POISON | op).any()) for rank in self.ranks)

    def check_stored(self) -> None:
        """Check the store of every rank."""
        for stored in self.stores:
            self.stored = stored
            super().check_stored()

    def check_all_stored(self) -> None:
        """Check the store of every rank."""
        for stored in self.stores:
            self.stored = stored
            super().check_all_stored()

    def lose(self, which: int) -> None:
        """One rank has lost a page, the others have it."""
        lossy = self.rng.randrange(len(self.ranks))
        keys = sorted(self.stores[lossy])
        storage = self.ranks[lossy].storage
        if keys and storage is not None:
            self.failures += 1
            storage.lose([keys[which % len(keys)]])
