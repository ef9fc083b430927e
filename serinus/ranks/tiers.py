"""The tiers of an engine's ranks: every rank does what the leader's cache asks for, and all answer as one.

    RankMover, RankStorage   what the leader's cache uses: commands go down the line, answers are folded
    TierWorker               one rank's part: obeys with the rank's own pools, mover and files

A copy has ended when it has on all ranks, and is good when it is on all; a key is stored where every rank has its
shard of it, and a read is good as far as the rank that got least. Decides nothing, knows neither sockets nor requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from serinus.cache import PageMover, PageStorage
from serinus.core.errors import InvariantError
from serinus.core.line import CommandLine
from serinus.core.log import get_logger
from serinus.core.moves import Move, MoveDone, PageOrigin, StorageDone
from serinus.core.parts import Part

if TYPE_CHECKING:
    from serinus.ranks.body import RankBody
    from serinus.ranks.tier_parts import Tiers

_log = get_logger("engine")
_WAIT_S = 0.05
"""How long one look for answers may sleep while copies are waited for; an answer ends it."""


# ---- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPages:
    """Begin copies between device and host; see PageMover.submit. Answered by a MoveDone for each op."""

    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCopies:
    """The leader waits for these: wait for them too, and answer at once."""

    ops: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryPages:
    """Ask the storage; see PageStorage.query. Answered by a StorageDone, as the two below."""

    op: int
    keys: tuple[bytes, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPages:
    """Fill host pages from the storage."""

    op: int
    part: Part
    keys: tuple[bytes, ...]
    pages: NDArray[np.int32]
    origin: PageOrigin | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePages:
    """Store these host pages in the storage."""

    op: int
    part: Part
    keys: tuple[bytes, ...]
    pages: NDArray[np.int32]
    origin: PageOrigin | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovePages:
    """Delete pages, and those that continue them; see PageStorage.remove."""

    op: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelPages:
    """The answer to a storage operation is not needed any more; it still comes, sooner."""

    op: int


TIER_COMMANDS = (CopyPages, EndCopies, QueryPages, ReadPages, WritePages, RemovePages, CancelPages)
"""What a TierWorker obeys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesRecalled:
    """A rank's answer: another engine removed these pages from the storage; see PageStorage.recalled."""

    keys: tuple[bytes, ...]


# ---- a rank ---------------------------------------------------------------------------------------------------------


class TierWorker:
    """One rank's: orders become copies and file operations of its own; what ended is answered."""

    def __init__(self, mover: PageMover, storage: PageStorage | None) -> None:
        """Both are the rank's own, over its own host pools."""
        self._mover, self._storage = mover, storage
        self._copies: set[int] = set()
        self._operations = 0

    @property
    def busy(self) -> bool:
        """Whether something is under way that no answer has told of: the rank must go on looking."""
        return bool(self._copies) or self._operations > 0

    @property
    def holdings(self) -> Mapping[str, int]:
        """Operations under way here, by gauge."""
        return {"rank_tier_copies": len(self._copies), "rank_storage_operations": self._operations}

    def obey(self, command: object) -> Sequence[MoveDone]:
        """Begin what the command says; returns the answers that are there at once.

        Raises InvariantError: a storage command where there is no storage.
        """
        match command:
            case CopyPages(moves=moves):
                self._copies.update(move.op for move in moves)
                self._mover.submit(moves)
            case EndCopies(ops=ops):
                return self._ended(self._mover.wait(self._copies.intersection(ops)))
            case QueryPages(op=op, keys=keys, parts=parts):
                self._begin(command).query(op, keys, parts)
            case ReadPages(op=op, part=part, keys=keys, pages=pages, origin=origin):
                self._begin(command).read(op, part, keys, pages, origin)
            case WritePages(op=op, part=part, keys=keys, pages=pages, origin=origin):
                self._begin(command).write(op, part, keys, pages, origin)
            case RemovePages(op=op, keys=keys):
                self._begin(command).remove(op, keys)
            case CancelPages(op=op):
                self._shelf(command).cancel(op)
            case _:
                raise InvariantError(f"engine: {type(command).__name__} for the tiers, expected one of their commands")
        return ()

    def answers(self) -> list[MoveDone | StorageDone | PagesRecalled]:
        """What ended since the last call, and what other engines removed. Never blocks."""
        found: list[MoveDone | StorageDone | PagesRecalled] = [*self._ended(self._mover.poll())] if self._copies else []
        if self._storage is not None:
            stored = self._storage.poll()
            self._operations -= len(stored)
            recalled = self._storage.recalled()  # after the answers: what they were made with is known by now
            if recalled:
                found.append(PagesRecalled(keys=tuple(recalled)))
            found += stored
        return found

    def _ended(self, done: Sequence[MoveDone]) -> Sequence[MoveDone]:
        self._copies.difference_update(each.op for each in done)
        return done

    def _begin(self, command: object) -> PageStorage:
        self._operations += 1
        return self._shelf(command)

    def _shelf(self, command: object) -> PageStorage:
        if self._storage is None:
            raise InvariantError(f"engine: {type(command).__name__} for a rank without storage, expected none")
        return self._storage


def attach_tiers(body: RankBody, tiers: Tiers | None) -> None:
    """Let a rank obey its leader's cache with these tiers, its own; nothing where there are none."""
    if tiers is None:
        return
    worker = TierWorker(tiers.mover, tiers.storage)
    for command in TIER_COMMANDS:
        body.on(command, worker.obey)
    body.attend(worker)


# ---- the leader -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Fold:
    """An operation under way, as far as the ranks have answered."""

    index: int
    """Place in the order of submission."""
    what: str
    answers: dict[int, Any] = field(default_factory=dict)
    """By rank: MoveDone or StorageDone."""


class _Folds:
    """Operations of one kind, each answered once by every rank."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._begun = 0
        self.open: dict[int, _Fold] = {}

    def begin(self, op: int, what: str) -> None:
        if op in self.open:
            raise InvariantError(f"engine: {what} {op} is commanded twice, expected each number once")
        self._begun += 1
        self.open[op] = _Fold(index=self._begun, what=what)

    def take(self, rank: int, op: int, answer: Any) -> _Fold | None:
        """File an answer; the operation, where that was the last one."""
        fold = self.open.get(op)
        if fold is None or not 0 <= rank < len(self._names) or rank in fold.answers:
            raise InvariantError(
                f"engine: rank {rank} answers operation {op}"
                f" {'again' if fold is not None else 'that is not under way'}, expected one answer of each of"
                f" {len(self._names)} ranks"
            )
        fold.answers[rank] = answer
        if len(fold.answers) < len(self._names):
            return None
        return self.open.pop(op)

    def errors(self, fold: _Fold) -> str:
        """What went wrong, rank by rank."""
        said = ((self._names[rank], fold.answers[rank].error) for rank in sorted(fold.answers))
        return "; ".join(f"{name}: {error}" for name, error in said if error)


class RankMover:
    """The PageMover of the leader's cache."""

    def __init__(self, line: CommandLine, names: Sequence[str]) -> None:
        """`names`: of all ranks, in order, as errors say them."""
        line.subscribe(MoveDone, self.take)
        self._line = line
        self._folds = _Folds(names)
        self._ended: list[tuple[int, MoveDone]] = []

    def submit(self, moves: Sequence[Move]) -> None:
        """Begin copies on every rank."""
        for op in dict.fromkeys(move.op for move in moves):
            self._folds.begin(op, "copy")
        self._line.command(CopyPages(moves=tuple(moves)))

    def take(self, rank: int, done: MoveDone) -> None:
        """A rank's copy ended. Raises InvariantError: no such copy is under way there."""
        fold = self._folds.take(rank, done.op, done)
        if fold is None:
            return
        answers: list[MoveDone] = list(fold.answers.values())
        folded = MoveDone(
            op=done.op,
            ok=all(answer.ok for answer in answers),
            error=self._folds.errors(fold),
            seconds=max(answer.seconds for answer in answers),
            byte_count=sum(answer.byte_count for answer in answers),
        )
        if not folded.ok:
            _log.warning("engine: copy %d failed: %s", folded.op, folded.error)
        self._ended.append((fold.index, folded))

    def poll(self) -> list[MoveDone]:
        """The copies that ended on all ranks since the last poll or wait, in the order of submission."""
        if self._folds.open:
            self._line.pump()
        ended, self._ended = sorted(self._ended, key=lambda entry: entry[0]), []
        return [done for _, done in ended]

    def wait(self, ops: Collection[int]) -> list[MoveDone]:
        """Block until these have ended on all ranks; returns everything that `poll` would return then."""
        missing = tuple(op for op in ops if op in self._folds.open)
        if missing:
            self._line.command(EndCopies(ops=missing))
        while any(op in self._folds.open for op in missing):
            self._line.pump(_WAIT_S)
        return self.poll()


class RankStorage:
    """The PageStorage of the leader's cache."""

    def __init__(self, line: CommandLine, names: Sequence[str]) -> None:
        """`names`: of all ranks, in order, as errors say them."""
        line.subscribe(StorageDone, self.take)
        line.subscribe(PagesRecalled, self._take_recalled)
        self._line = line
        self._folds = _Folds(names)
        self._ended: list[StorageDone] = []
        self._recalled: dict[bytes, None] = {}

    def query(self, op: int, keys: Sequence[bytes], parts: Sequence[Part]) -> None:
        """Ask every rank which keys are stored."""
        self._folds.begin(op, "query")
        self._line.command(QueryPages(op=op, keys=tuple(keys), parts=tuple(parts)))

    def read(
        self, op: int, part: Part, keys: Sequence[bytes], pages: NDArray[np.int32], origin: PageOrigin | None = None
    ) -> None:
        """Fill the same host pages of every rank."""
        self._folds.begin(op, "read")
        self._line.command(ReadPages(op=op, part=part, keys=tuple(keys), pages=pages.copy(), origin=origin))

    def write(
        self, op: int, part: Part, keys: Sequence[bytes], pages: NDArray[np.int32], origin: PageOrigin | None = None
    ) -> None:
        """Store the same host pages of every rank."""
        self._folds.begin(op, "write")
        self._line.command(WritePages(op=op, part=part, keys=tuple(keys), pages=pages.copy(), origin=origin))

    def remove(self, op: int, keys: Sequence[bytes]) -> None:
        """Delete every rank's share of these pages, and of those that continue them."""
        self._folds.begin(op, "removal")
        self._line.command(RemovePages(op=op, keys=tuple(keys)))

    def recalled(self) -> Sequence[bytes]:
        """Keys of pages of which another engine removed a share, since the last call."""
        found, self._recalled = tuple(self._recalled), {}
        return found

    def cancel(self, op: int) -> None:
        """Every rank may stop; all still answer."""
        if op in self._folds.open:
            self._line.command(CancelPages(op=op))

    def take(self, rank: int, done: StorageDone) -> None:
        """A rank's operation ended. Raises InvariantError: no such operation is under way, or its shape differs."""
        fold = self._folds.take(rank, done.op, done)
        if fold is None:
            return
        answers: list[StorageDone] = list(fold.answers.values())
        shapes = {tuple(len(part) for part in answer.present) for answer in answers}
        if len(shapes) > 1:
            raise InvariantError(f"engine: storage {fold.what} {done.op} is answered about {shapes} keys, expected one")
        self._ended.append(
            StorageDone(
                op=done.op,
                present=tuple(
                    np.logical_and.reduce(columns)
                    for columns in zip(*(answer.present for answer in answers), strict=True)
                ),
                good=(max if fold.what == "removal" else min)(answer.good for answer in answers),
                bad=tuple(sorted({index for answer in answers for index in answer.bad})),
                error=self._folds.errors(fold),
                seconds=max(answer.seconds for answer in answers),
                byte_count=sum(answer.byte_count for answer in answers),
            )
        )

    def _take_recalled(self, rank: int, recalled: PagesRecalled) -> None:
        self._recalled.update(dict.fromkeys(recalled.keys))

    def poll(self) -> list[StorageDone]:
        """The operations that ended on all ranks since the last poll."""
        if self._folds.open:
            self._line.pump()
        ended, self._ended = self._ended, []
        return ended


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPorts:
    """What the leader's cache is built with."""

    mover: PageMover | None = None
    storage: PageStorage | None = None


def lead_tiers(line: CommandLine, names: Sequence[str], tiers: Tiers | None) -> TierPorts:
    """What the leader's cache is built with.

    Args:
        line: to all ranks.
        names: of the ranks, in order, as errors say them.
        tiers: the leader's own; all ranks have the like. None = there are no tiers.
    """
    if tiers is None:
        return TierPorts()
    storage = None if tiers.storage is None else RankStorage(line, names)
    return TierPorts(mover=RankMover(line, names), storage=storage)
