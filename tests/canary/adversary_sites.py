"""What the adversary does, where: raw arrays, files and functions that copy, chosen by chance alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.core.rng import Rng

__all__ = ["SITES", "Act", "Site", "Targets"]

Bytes = NDArray[np.uint8]
_BURST = 64
_OF_TIERS = ("tiers", "tp2", "pp2")
_MOVERS = ("copy_in", "copy_stamps_in", "copy_out", "copy_stamps_out", "hashed_pages", "read_pages", "write_pages")
_FLIP = """
import mmap, os, sys, time
path, places = sys.argv[1], [int(word) for word in sys.argv[2:]]
fd = os.open(path, os.O_RDWR)
memory = mmap.mmap(fd, os.fstat(fd).st_size)
for place in places:
    memory[place // 8] ^= 1 << place % 8
    time.sleep(0.001)
"""


@dataclass(slots=True)
class Targets:
    """What an adversary can reach."""

    kv: list[Bytes] = field(default_factory=list)
    stamps: list[Bytes] = field(default_factory=list)
    host: list[Bytes] = field(default_factory=list)
    pages: list[list[Bytes]] = field(default_factory=list)
    """By pool: its memory as [pages, bytes] of each lane."""
    pools: list[Any] = field(default_factory=list)
    """Objects with functions that copy."""
    copies: int = 0
    """A fault of such a function spoils so many copies; 0: all, until it ends."""
    tables: list[NDArray[np.int32]] = field(default_factory=list)
    files: Callable[[], list[str]] = list
    segments: list[Path] = field(default_factory=list)
    used: dict[tuple[int, int], Callable[[], NDArray[np.int64]]] = field(default_factory=dict)
    """By address and length of an array of kv, stamps, host or pages: its rows that are of pages in use, as the page
    map shows them."""

    def rows_of(self, area: Bytes) -> NDArray[np.int64]:
        """Rows of pages in use that are not all zero (what was never written is read by no request); where there are
        none, of other pages."""
        filled = np.flatnonzero(area.any(axis=1))
        used = np.intersect1d(filled, self.used[area.ctypes.data, len(area)]())
        return used if len(used) else filled


@dataclass(slots=True)
class Act:
    """One fault that is ready."""

    strike: Callable[[], object]
    end: Callable[[], object] = lambda: None
    """Once its requests are answered: stop what goes on."""
    step: int = -1
    """Of the engine, when it struck."""
    files: tuple[Path, ...] = ()
    """Those that are damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place, and what is done there."""

    draw: Callable[[Targets, Rng], Act | None]
    """None: there is nothing of it now."""
    worlds: tuple[str, ...] = ("tiers", "pair", "tp2", "pp2")
    moments: tuple[str, ...] = ("asleep", "running")
    depth: int = 0
    """Where what is cached is to be when the fault comes: 0 = on the device, 1 = on the host, 2 = in files."""
    aims: bool = False
    """It is drawn anew when it strikes, of what is in use then."""


SITES: dict[str, Site] = {}


def site(name: str, **more: Any) -> Callable[[Callable[[Targets, Rng], Act | None]], None]:
    """Adds a function that prepares a fault."""

    def add(draw: Callable[[Targets, Rng], Act | None]) -> None:
        SITES[name] = Site(draw=draw, **more)

    return add


def _flip(row: Bytes, at: int, mask: int) -> None:
    row[at] ^= mask


def _bit(targets: Targets, areas: Sequence[Bytes], rng: Rng) -> Act | None:
    if not areas:
        return None
    area = rng.choice(areas)
    rows = targets.rows_of(area)
    if not len(rows):
        return None
    row = area[rows[rng.randrange(len(rows))]]
    return Act(partial(_flip, row, rng.randrange(len(row)), 1 << rng.randrange(8)))


@site("kv bit", aims=True)
def _kv(targets: Targets, rng: Rng) -> Act | None:
    return _bit(targets, targets.kv, rng)


@site("stamp bit", aims=True)
def _stamps(targets: Targets, rng: Rng) -> Act | None:
    return _bit(targets, targets.stamps, rng)


@site("host bit", worlds=_OF_TIERS, depth=1)
def _host(targets: Targets, rng: Rng) -> Act | None:
    return _bit(targets, targets.host, rng)


@site("kv 64 bytes", aims=True)
def _burst(targets: Targets, rng: Rng) -> Act | None:
    area = rng.choice(targets.kv)
    rows, flat = targets.rows_of(area), area.reshape(-1)
    if not len(rows):
        return None
    at = int(rows[rng.randrange(len(rows))]) * area.shape[1] + rng.randrange(area.shape[1])
    noise = np.frombuffer(rng.randbytes(_BURST), np.uint8)

    def strike() -> None:
        span = flat[at : at + _BURST]
        span ^= noise[: len(span)]

    return Act(strike)


@site("table entry", moments=("running",))
def _tables(targets: Targets, rng: Rng) -> Act | None:
    """A bit of an entry: it names another slot, no slot at all, or something far outside of the pool."""
    table = rng.choice(targets.tables)

    def strike() -> None:
        used = np.argwhere(table.copy())
        if not len(used):
            return
        row, at = used[rng.randrange(len(used))]
        bit = rng.randrange(9) if rng.random() < 0.7 else rng.randrange(32)
        table.view(np.uint32)[row, at] ^= np.uint32(1 << bit)
        if rng.random() < 0.1:
            table[row, at] = 0

    return Act(strike)


def _two_pages(targets: Targets, rng: Rng, strike: Callable[[Bytes, int, int, Bytes], None]) -> Act | None:
    """`strike` is given, of each lane of a pool, its pages, two of them by number, and the first as it is now."""
    lanes = rng.choice(targets.pages)
    used = targets.rows_of(lanes[0])
    if len(used) < 2:
        return None
    one, other = rng.sample(used.tolist(), 2)
    kept = [lane[one].copy() for lane in lanes]

    def all_lanes() -> None:
        for lane, then in zip(lanes, kept, strict=True):
            strike(lane, one, other, then)

    return Act(all_lanes)


@site("pages swapped", aims=True)
def _exchange(targets: Targets, rng: Rng) -> Act | None:
    def strike(lane: Bytes, one: int, other: int, then: Bytes) -> None:
        lane[[one, other]] = lane[[other, one]]

    return _two_pages(targets, rng, strike)


@site("page shifted", aims=True)
def _shift(targets: Targets, rng: Rng) -> Act | None:
    """A page, stamps and all, lies over another one too."""

    def strike(lane: Bytes, one: int, other: int, then: Bytes) -> None:
        lane[other] = lane[one]

    return _two_pages(targets, rng, strike)


@site("page replayed", moments=("running",))
def _replay(targets: Targets, rng: Rng) -> Act | None:
    """A page is as it was when the fault was drawn."""

    def strike(lane: Bytes, one: int, other: int, then: Bytes) -> None:
        lane[one] = then

    return _two_pages(targets, rng, strike)


@site("host swapped", worlds=_OF_TIERS, depth=1)
def _host_exchange(targets: Targets, rng: Rng) -> Act | None:
    area = rng.choice(targets.host)
    used = targets.rows_of(area).tolist()
    if len(used) < 2:
        return None
    one, other = rng.sample(used, 2)

    def strike() -> None:
        area[[one, other]] = area[[other, one]]

    return Act(strike)


@site("file bit", worlds=_OF_TIERS, depth=2)
def _file(targets: Targets, rng: Rng) -> Act | None:
    files = targets.files()
    if not files:
        return None
    path = Path(rng.choice(files))
    place, mask = rng.random(), 1 << rng.randrange(8)

    def strike() -> None:
        try:
            data = bytearray(path.read_bytes())
            data[int(place * len(data))] ^= mask
            path.write_bytes(data)
        except (FileNotFoundError, IndexError):  # it is gone, or empty, by now
            return

    return Act(strike, files=(path,))


@site("files swapped", worlds=_OF_TIERS, depth=2)
def _files(targets: Targets, rng: Rng) -> Act | None:
    files = targets.files()
    if len(files) < 2:
        return None
    one, other = map(Path, rng.sample(files, 2))

    def strike() -> None:
        try:
            here, there = one.read_bytes(), other.read_bytes()
            one.write_bytes(there)
            other.write_bytes(here)
        except FileNotFoundError:
            return

    return Act(strike, files=(one, other))


@site("segment bit", worlds=("pair",), moments=("running",))
def _segment(targets: Targets, rng: Rng) -> Act | None:
    """Another process flips a bit of shared memory each millisecond, for a while."""
    if not targets.segments:
        return None
    link = rng.choice(targets.segments)
    size = link.stat().st_size
    used = np.flatnonzero(np.array(np.memmap(link, np.uint8, "r", shape=(size,))))
    if not len(used):
        return None
    bits = [str(int(used[rng.randrange(len(used))]) * 8 + rng.randrange(8)) for _ in range(40)]
    path = f"/proc/{os.getpid()}/fd/{link.name}"
    return Act(lambda: subprocess.run([sys.executable, "-S", "-c", _FLIP, path, *bits], check=False))


class _Mover:
    """Stands before the functions of a pool that copy pages, for as long as a fault lasts."""

    def __init__(self, pool: Any, lanes: list[Bytes], wrong: Callable[[_Move], tuple[Any, bool]], copies: int) -> None:
        """`wrong`: copies, and says whether it spoilt anything; `copies`: see Targets."""
        self._pool, self._lanes, self._wrong, self._left = pool, lanes, wrong, copies

    def begin(self) -> None:
        for name in _MOVERS:
            setattr(self._pool, name, partial(self._moved, getattr(type(self._pool), name), name))

    def _moved(self, original: Callable[..., Any], name: str, pages: Any, *rest: Any, **more: Any) -> Any:
        inward = name in ("copy_in", "copy_stamps_in", "write_pages") or bool([*rest, False, False][2] is True)
        call = partial(original, self._pool)
        move = _Move(lambda now: call(now, *rest, **more), np.asarray(pages), inward, self._lanes)
        found, is_spoilt = self._wrong(move)
        self._left -= is_spoilt
        if is_spoilt and self._left == 0:
            self.end()
        return found

    def end(self) -> None:
        for name in _MOVERS:
            self._pool.__dict__.pop(name, None)


@dataclass(frozen=True, slots=True)
class _Move:
    """One call of such a function."""

    run: Callable[[NDArray[np.integer]], Any]
    pages: NDArray[np.integer]
    inward: bool
    """It fills pages of the pool."""
    lanes: list[Bytes]

    def bytes_of(self, pages: NDArray[np.integer]) -> list[Bytes]:
        return [lane[pages] for lane in self.lanes]

    def put(self, pages: NDArray[np.integer], data: list[Bytes]) -> None:
        for lane, each in zip(self.lanes, data, strict=True):
            lane[pages] = each


def _moving(
    targets: Targets, rng: Rng, wrong: Callable[[_Move], tuple[Any, bool]], end: Callable[[], None] = lambda: None
) -> Act:
    at = rng.randrange(len(targets.pools))
    mover = _Mover(targets.pools[at], targets.pages[at], wrong, targets.copies)

    def ended() -> None:
        mover.end()
        end()

    return Act(mover.begin, ended)


@site("mover: wrong page", moments=("running",), depth=1)
def _mover_wrong(targets: Targets, rng: Rng) -> Act | None:
    """One page in four is taken for the one beside it, wherever it is copied."""
    lost = rng.randrange(4)

    def wrong(move: _Move) -> tuple[Any, bool]:
        pages = move.pages.copy()
        beside = pages ^ 1
        is_one = (beside > 0) & (beside < len(move.lanes[0]))
        mistaken = (pages % 4 == lost) & is_one & ~np.isin(beside, pages)
        pages[mistaken] = beside[mistaken]
        return move.run(pages), bool(mistaken.any())

    return _moving(targets, rng, wrong)


@site("mover: not", moments=("running",), depth=1)
def _mover_not(targets: Targets, rng: Rng) -> Act | None:
    """One page in four does not come, where pages come into a pool, and is said to have come."""
    lost = rng.randrange(4)

    def wrong(move: _Move) -> tuple[Any, bool]:
        pages = move.pages[move.pages % 4 == lost]
        before = move.bytes_of(pages)
        found = move.run(move.pages)
        if move.inward:
            move.put(pages, before)
        return found, move.inward and bool(len(pages))

    return _moving(targets, rng, wrong)


@site("mover: late", moments=("running",), depth=1)
def _mover_late(targets: Targets, rng: Rng) -> Act | None:
    """What comes into a pool comes some milliseconds after it was said to have come."""
    return _later(targets, rng, first=False)


@site("mover: twice", moments=("running",), depth=1)
def _mover_twice(targets: Targets, rng: Rng) -> Act | None:
    """What comes into a pool comes again some milliseconds later."""
    return _later(targets, rng, first=True)


def _later(targets: Targets, rng: Rng, *, first: bool) -> Act:
    wait_s = rng.uniform(0.001, 0.03)
    timers: list[threading.Timer] = []

    def wrong(move: _Move) -> tuple[Any, bool]:
        before = move.bytes_of(move.pages)
        found = move.run(move.pages)
        if move.inward:
            after = move.bytes_of(move.pages)
            if not first:
                move.put(move.pages, before)
            timers.append(threading.Timer(wait_s, move.put, (move.pages, after)))
            timers[-1].start()
        return found, move.inward

    def end() -> None:
        for timer in timers:
            timer.join()

    return _moving(targets, rng, wrong, end)
