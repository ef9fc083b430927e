"""Faults that the oracles of this room must see, each planted at a public seam: a method that the rooms of the cache
call across a border answers wrongly, or does nothing.

    python -m tests.cache.mutants [WORDS]    prints after how many seeds each turned red; exit code 1 if one survived
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

import serinus.cache
from serinus.cache import PageLedger, PrefetchState, PrefixCache, Tier, coverage, loading, matching, prefix
from serinus.cache.backup import Backups
from serinus.cache.copies import CopyTable
from serinus.cache.effects import Split
from serinus.cache.eviction import Queues
from serinus.cache.host import HostTier
from serinus.cache.keys import HASH_BYTES, PageKeys
from serinus.cache.loading import Loads
from serinus.cache.node import FULL, WHOLE, Lease
from serinus.cache.page_pools import PagePools
from serinus.cache.prefetch import Prefetches
from serinus.cache.publish import Publisher
from serinus.cache.quarantine import PageQuarantine
from serinus.cache.room import DeviceRoom
from serinus.cache.sweep import SweepIndex
from serinus.cache.tiers import TierController
from serinus.cache.tree import RadixTree
from serinus.cache.window import PartWindow, Windows
from serinus.core.errors import SerinusError
from serinus.core.moves import MoveKind
from serinus.testing.fake_mover import FakeMover, FakeStorage
from tests.cache.drive import drive

SEEDS = 600
STEPS = 150
NAMED = 14
"""The first of the table are those that the design names."""
SECONDS_MAX = 20
"""A mutant that hangs is red too, after that long."""

Wrong = Callable[..., Any]
"""Takes the real method, then its arguments."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: methods (or functions of a module) that are wrong while it is planted."""

    name: str
    patches: tuple[tuple[Any, str, Wrong], ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The fault is in the cache until this ends."""
        with ExitStack() as stack:
            for owner, name, wrong in self.patches:
                stack.enter_context(_replaced(owner, name, wrong))
            yield


@contextmanager
def _replaced(owner: Any, name: str, wrong: Wrong) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrong(real, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, real)


def _m(name: str, *patches: Any) -> Mutant:
    """One patch as three arguments, or several as tuples of three."""
    return Mutant(name, patches if isinstance(patches[0], tuple) else (patches,))


def _nothing(real: Wrong, *args: Any, **kwargs: Any) -> None:
    """The method does nothing."""


# What is more than a line


def _insert_commits(real: Wrong, self: Publisher, *args: Any) -> Any:
    insertion = real(self, *args)
    Publisher.commit.__get__(self)(insertion, True)
    return insertion


def _commit_once(real: Wrong, self: Publisher, insertion: Any, early: bool = False) -> None:
    if early:
        real(self, insertion)


def _load_back_lets_go(real: Wrong, self: PrefixCache, *args: Any) -> Any:
    loaded = real(self, *args)
    for copy in self.tiers.table.all():
        if copy.kind is MoveKind.LOAD and copy.span.start < 1 << 60:
            self.tree.set_busy(copy.span, -1)
            copy.span.start = 1 << 60
    return loaded


def _poll_attaches(real: Wrong, self: PrefixCache, **kwargs: Any) -> Any:
    news = real(self, **kwargs)
    for copy in self.tiers.table.all():
        if copy.kind is MoveKind.BACKUP and len(copy.span.nodes()) == 1:
            for move in copy.moves:
                self.pools.attach(self.pools.host[move.part], copy.span.anchor, move.target, copy.owner, "early")
            copy.moves.clear()
    return news


def _blind_on_device(real: Wrong, found: Any, rules: Any) -> Any:
    return coverage.Coverage(real(found, rules[:1]).device, real(found, rules).total)


def _blind_on_host(real: Wrong, found: Any, rules: Any) -> Any:
    return coverage.Coverage(real(found, rules).device, real(found, rules[:1]).total)


def _abort_forgotten_in(state: PrefetchState) -> Wrong:
    def forget(real: Wrong, self: Prefetches, rid: str) -> None:
        if self.state(rid) is not state:
            real(self, rid)

    return forget


def _evict_without_waiting(real: Wrong, self: CopyTable, nodes: list[Any]) -> list[int]:
    for node in nodes:
        node.busy = 0
    return []


def _start_needs_parent(real: Wrong, self: Backups, nodes: list[Any]) -> Any:
    for node in nodes:
        assert node.parent.parent is None or len(node.parent.host[FULL]), "the parent is not backed up"
    return real(self, nodes)


def _after_split(change: Callable[[Split], None]) -> Wrong:
    def split(real: Wrong, self: Any, node: Any, position: int) -> Split:
        done: Split = real(self, node, position)
        change(done)
        return done

    return split


def _overlap(split: Split) -> None:
    whole = np.concatenate((split.upper.device[FULL][-1:], split.lower.device[FULL]))
    split.lower.device = (whole, *split.lower.device[1:])


def _all_below(split: Split) -> None:
    split.lower.device = tuple(map(np.concatenate, zip(split.upper.device, split.lower.device, strict=True)))


def _windows_swapped(split: Split) -> None:
    upper, lower = split.upper, split.lower
    pairs = list(zip(map(np.concatenate, zip(upper.device, lower.device, strict=True)), lower.device, strict=True))[1:]
    upper.device = (upper.device[FULL], *(whole[len(below) :] for whole, below in pairs))
    lower.device = (lower.device[FULL], *(whole[: len(below)] for whole, below in pairs))


def _set(what: str, value: Callable[[Split], Any]) -> Callable[[Split], None]:
    return lambda split: setattr(split.upper, what, value(split))


def _verbs(method: str, *verbs: str) -> Wrong:
    """Calls with these verbs do nothing."""

    def quiet(real: Wrong, *args: Any) -> Any:
        return None if args[-1] in verbs else real(*args)

    return quiet


def _other_parts(verb: str) -> Wrong:
    """Nothing happens to device pages of parts beside FULL."""

    def quiet(real: Wrong, self: PagePools, pool: Any, *args: Any) -> Any:
        if pool.part != FULL and pool.tier is Tier.DEVICE and args[-1] == verb:
            return 0
        return real(self, pool, *args)

    return quiet


def _reversed_load(real: Wrong, self: PagePools, pool: Any, node: Any, pages: Any, owner: Any, verb: str) -> None:
    real(self, pool, node, pages[::-1] if verb == "load" else pages, owner, verb)


def _queue_forgets(name: str, may_go: Callable[[Any], bool]) -> Wrong:
    def init(real: Wrong, self: Queues, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        getattr(self, name).may_go = may_go

    return init


def _window_queues_forget(real: Wrong, self: Queues, *args: Any, **kwargs: Any) -> None:
    real(self, *args, **kwargs)
    for part, queue in self.window.items():
        queue.may_go = lambda node, part=part: node.alive and len(node.device[part]) > 0


def _ragged(real: Wrong, self: PrefixCache, lease: Any, tokens: Any, spans: Any) -> Any:
    padded = np.concatenate((tokens, np.zeros(-len(tokens) % self.page_size, np.int32)))
    return real(self, lease, padded, spans)


def _insert_keeps_anchor(real: Wrong, self: PrefixCache, lease: Any, *args: Any) -> Any:
    old = lease.anchor
    insertion = real(self, lease, *args)
    self.tree.pin(old)
    self.tree.unpin(lease.anchor)
    lease.anchor = old
    return insertion


def _insert_pins_anchor(real: Wrong, self: PrefixCache, lease: Any, *args: Any) -> Any:
    self.tree.pin(lease.anchor)
    return real(self, lease, *args)


def _swapped_halves(real: Wrong, self: PagePools, node: Any, position: int) -> Split:
    done: Split = real(self, node, position)
    return Split(done.lower, done.upper, done.moved, done.old_id)


def _short_descent(real: Wrong, self: RadixTree, *args: Any) -> Any:
    found = real(self, *args)
    if found.partial is not None and found.end - found.node.end > self.page_size:
        found.end -= self.page_size
    return found


def _heads_alone(real: Wrong, self: PagePools, victims: Any) -> None:
    victims.taken = [(name, (pages[FULL], *(each[:0] for each in pages[1:]))) for name, pages in victims.taken]
    real(self, victims)


def _unchained(real: Wrong, self: PageKeys, before: bytes, data: Any) -> bytes:
    count = max(1, len(real(self, before, data)) // HASH_BYTES)
    stride = len(data) // count
    return b"".join(real(self, b"", data[at : at + stride]) for at in range(0, len(data), stride or 1))


def _held_uncounted(real: Wrong, self: RadixTree, node: Any, held: Any) -> None:
    node.held = held


def _whole_not_lacking(real: Wrong, nodes: Any, end: int, rules: Any) -> Any:
    found = real(nodes, end, rules)
    return [[] if part != FULL and window == WHOLE else each for (part, window), each in zip(rules, found, strict=True)]


def _not_for_storage(real: Wrong, self: PageLedger, name: str, pages: Any) -> Any:
    return pages[:0] if name == "storage" else real(self, name, pages)


MUTANTS: tuple[Mutant, ...] = (
    # The named ones of the design
    _m("duplicates are freed before the row is rewritten",
       (Publisher, "insert", _insert_commits), (Publisher, "commit", _commit_once)),
    _m("a load gives its host pages back at submit", PrefixCache, "load_back", _load_back_lets_go),
    _m("host pages can be matched before the copy has ended", PrefixCache, "poll", _poll_attaches),
    _m("a backup that failed counts as one that did not", Backups, "end", lambda real, *a, ok: real(*a, ok=True)),
    _m("a load that failed counts as one that did not", Loads, "end", lambda real, *a, ok: real(*a, ok=True)),
    _m("the usable length ignores windows", (matching, "cover", _blind_on_device), (prefix, "cover", _blind_on_device)),
    _m("the usable length ignores windows on the host",
       (matching, "cover", _blind_on_host), (prefix, "cover", _blind_on_host)),
    _m("an abort is forgotten while the storage is asked",
       Prefetches, "forget", _abort_forgotten_in(PrefetchState.QUERY)),
    _m("an abort is forgotten while the storage reads", Prefetches, "forget", _abort_forgotten_in(PrefetchState.READ)),
    _m("storage keys leave out the engine's namespace, the dtype with it",
       PageKeys, "__init__", lambda real, self, namespace, size: real(self, "", size)),
    _m("storage keys leave out the request's namespace", PageKeys, "seed", lambda real, self, ns: real(self, b"")),
    _m("a split touches the pages of the unused half", RadixTree, "split", _after_split(_overlap)),
    _m("eviction does not wait for the write-back", CopyTable, "over", _evict_without_waiting),
    _m("a backed-up parent is required", Backups, "start", _start_needs_parent),
    # Publication and the life of a request
    _m("an uncommitted insertion goes unnoticed", PrefixCache, "_check_committed", _nothing),
    _m("duplicates are not freed", Publisher, "free_own", _verbs("free_own", "free duplicates")),
    _m("a finished request keeps its tail", Publisher, "free_own", _verbs("free_own", "finish")),
    _m("a ragged last page is published", PrefixCache, "insert", _ragged),
    _m("the lease does not grow", PrefixCache, "insert", _insert_keeps_anchor),
    _m("the old anchor stays pinned", PrefixCache, "insert", _insert_pins_anchor),
    _m("a lease is not released", RadixTree, "end_lease", _nothing),
    _m("a match is not pinned", RadixTree, "lease", lambda real, self, *args: Lease(*args)),
    _m("a match ignores max_len", PrefixCache, "match_prefix",
       lambda real, self, ns, tokens, max_len, **more: real(self, ns, tokens, len(tokens), **more)),
    _m("namespaces are mixed", RadixTree, "root", lambda real, self, ns: real(self, "")),
    _m("a partial match gives the other half", PagePools, "split", _swapped_halves),
    _m("an allocation evicts one page less", DeviceRoom, "evict",
       lambda real, self, pool, enough: real(self, pool, enough - 1)),
    _m("a flush does not care what is busy", PrefixCache, "busy", lambda real, self: ""),
    _m("a flush does not wait for backups", TierController, "wait_all", _nothing),
    # Parts
    _m("the window is one position too short", PartWindow, "start",
       lambda real, self, position: min(position, real(self, position) + 1)),
    _m("the window is a page too long", PartWindow, "start", lambda real, *a: max(0, real(*a) - 16)),
    _m("window pins never move on", Windows, "advance", _nothing),
    _m("window pins outlive the lease", Windows, "release", _nothing),
    _m("pages behind the window are not freed", Publisher, "free_own", _verbs("free_own", "behind the window")),
    _m("a tombstone is never filled", PagePools, "attach", _other_parts("publish")),
    _m("a tombstone takes a leased window", Queues, "__init__", _window_queues_forget),
    _m("a split shares its other parts out wrongly", RadixTree, "split", _after_split(_windows_swapped)),
    _m("a split forgets the window pins of the first half", RadixTree, "split",
       _after_split(_set("window_pins", lambda split: [0] * len(split.lower.window_pins)))),
    _m("a leaf that goes leaves its other parts behind", PagePools, "apply", _heads_alone),
    _m("a leaf that is demoted keeps its other parts", PagePools, "detach", _other_parts("evict")),
    _m("a part that covers whole prefixes is not loaded back", loading, "lacking", _whole_not_lacking),
    # Host tier
    _m("pages are given up while a copy needs them", RadixTree, "set_busy", _nothing),
    _m("a load plan does not keep its host pages", RadixTree, "set_plan", _nothing),
    _m("a plan outlives its lease", Loads, "drop_plan", _nothing),
    _m("host pages of a failed backup are lost", PageLedger, "move", _verbs("move", "backup failed")),
    _m("a backup copies one part only", HostTier, "take",
       lambda real, self, pool, *a, **k: None if pool.part != FULL else real(self, pool, *a, **k)),
    _m("clean is said of half a copy", Backups, "clean", lambda real, self, node: len(node.host[FULL]) > 0),
    _m("write_through forgets what a request published", Backups, "used", _nothing),
    _m("the dirty queue is never drained", Backups, "drain", _nothing),
    _m("a load fills the wrong pages", PagePools, "attach", _reversed_load),
    _m("a loaded page stays with its copy", PagePools, "settle", _nothing),
    _m("no request is told of a load that failed", PageQuarantine, "cut", lambda real, *a, tell: real(*a, tell=False)),
    _m("completions that came with another's are lost", FakeMover, "wait",
       lambda real, self, ops: [done for done in real(self, ops) if done.op in ops]),
    _m("a node that goes leaves its descendants on the host", HostTier, "drop_below", _nothing),
    # Storage
    _m("storage keys are not chained", PageKeys, "chain", _unchained),
    _m("what is stored is a page further on", FakeStorage, "write",
       lambda real, self, op, part, keys, pages: real(self, op, part, keys[::-1], pages)),
    _m("a storage write does not hold its pages",
       (PageLedger, "hold", _not_for_storage), (PageLedger, "unhold", _not_for_storage)),
    # The tree and the ledgers
    _m("agreement is one page short", RadixTree, "descend", _short_descent),
    _m("a split leaves all pages in the second half", RadixTree, "split", _after_split(_all_below)),
    _m("a split forgets the pin of the first half", RadixTree, "split", _after_split(_set("pins", lambda split: 0))),
    _m("a split counts every lease on the first half", RadixTree, "split",
       _after_split(_set("pins", lambda split: split.lower.pins))),
    _m("a split keeps the ledger in the dark", PageLedger, "move", _verbs("move", "split")),
    _m("a split forgets the holds of the first half", PagePools, "split",
       _after_split(_set("held", lambda split: (0,) * len(split.lower.held)))),
    _m("publishing forgets the holds of its pages", PagePools, "recount", _nothing),
    _m("holds do not lower what is evictable", RadixTree, "set_held", _held_uncounted),
    _m("an orphaned parent is not queued", RadixTree, "inherit", _nothing),
    _m("eviction ignores pins", Queues, "__init__",
       _queue_forgets("device", lambda node: node.alive and not node.device_children and len(node.device[FULL]) > 0)),
    _m("eviction ignores children", Queues, "__init__",
       _queue_forgets("device", lambda node: node.alive and not node.pins and len(node.device[FULL]) > 0)),
    _m("a duplicate is given up while a load reads it", Queues, "__init__",
       _queue_forgets("duplicates", lambda n: n.alive and len(n.host[FULL]) > 0 and len(n.device[FULL]) > 0)),
    _m("hits are forgotten by the policy", PrefixCache, "used", lambda real, self, lease, hit_tokens: None),
    _m("priorities are forgotten by the policy", RadixTree, "touch",
       lambda real, self, node, *, priority=0: real(self, node)),
    _m("holds are ignored", PageLedger, "hold", lambda real, self, name, pages: pages[:0]),
    _m("a page that is no longer held never comes back", PageLedger, "unhold",
       lambda real, self, name, pages: pages[:0]),
    _m("the sweep has wrong predecessors", SweepIndex, "note",
       lambda real, self, pages, start, previous: real(self, pages, start, 0)),
    _m("the sweep counts positions from the node", SweepIndex, "note",
       lambda real, self, pages, start, previous: real(self, pages, 0, previous)),
)  # fmt: skip
"""All but the first of all, which is the scheduler's: `rewrite_rows=False`."""


def _hangs(signum: int, frame: FrameType | None) -> None:
    raise AssertionError(f"still running after {SECONDS_MAX} s")


LATE = {
    "clean is said of half a copy": 390,
    "storage keys leave out the request's namespace": 65,
    "a node that goes leaves its descendants on the host": 75,
    "a backup copies one part only": 55,
    "a part that covers whole prefixes is not loaded back": 40,
    "priorities are forgotten by the policy": 40,
    "a duplicate is given up while a load reads it": 35,
    "hits are forgotten by the policy": 30,
    "a load fills the wrong pages": 20,
    "an abort is forgotten while the storage reads": 15,
}
"""Faults that take long to be found, and a seed behind which they soon are: tests begin there."""


def seeds_until_red(first: int = 0, *, rewrite_rows: bool = True) -> tuple[int, str]:
    """How many seeds it takes until an oracle fails, and what it says; (0, "") if none of SEEDS does. `first`: where to
    begin; those before it come last."""
    before = signal.signal(signal.SIGALRM, _hangs)
    try:
        for count, seed in enumerate([*range(first, SEEDS), *range(first)], start=1):
            signal.alarm(SECONDS_MAX)
            try:
                drive(serinus.cache, seed, STEPS, rewrite_rows=rewrite_rows)
            except (AssertionError, SerinusError, LookupError, ValueError, TypeError, AttributeError) as error:
                return count, f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return 0, ""


def main() -> int:
    """Print the table; 1 if a mutant survived."""
    words = " ".join(sys.argv[1:])
    survived = 0
    for mutant in MUTANTS:
        if words not in mutant.name:
            continue
        with mutant.planted():
            seeds, what = seeds_until_red()
        survived += not seeds
        print(f"{seeds or 'SURVIVED':>8}  {mutant.name}: {what[:110]}", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
