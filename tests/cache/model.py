"""What the cache must hold, said naively: content of every slot, residency by tier and part, usable prefixes, ranks.

Flat sets of page prefixes instead of a tree; nothing here is computed by the code under test, but `Snapshot`, which
reads the tree's lists and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.cache import PartGeometry
from serinus.core.parts import Part
from serinus.core.rng import splitmix64
from serinus.testing.fake_mover import POISON

Prefix = tuple[str, bytes]
"""A namespace and whole pages of int32 ids."""

Pool = tuple[str, Part]
"""A tier ("device" or "host") and a part."""

DEVICE_FULL, HOST_FULL = ("device", Part.FULL), ("host", Part.FULL)
POOLS: tuple[Pool, ...] = tuple((tier, part) for tier in ("device", "host") for part in Part)
_SALT = {part: 0x5A5A * part << 20 for part in Part}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A cache to be tested: its pools and policies."""

    page_size: int
    parts: Mapping[Part, PartGeometry]
    storage: bool = False
    policy: str = "lru"
    write_policy: str = "write_through"

    @property
    def tiered(self) -> bool:
        """Whether there is a host tier."""
        return self.parts[Part.FULL].host_pages > 0

    @property
    def windows(self) -> dict[Part, int]:
        """The parts with a window."""
        return {part: shape.window for part, shape in self.parts.items() if shape.window is not None}

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Every pool that exists."""
        return tuple((tier, part) for tier in ("device", "host")[: 1 + self.tiered] for part in self.parts)

    def pages(self, pool: Pool) -> int:
        """Pages of a pool, the padding page included."""
        part = self.parts[pool[1]]
        return part.pages if pool[0] == "device" else part.host_pages

    def first(self, part: Part, position: int) -> int:
        """Index of the first page of a part that computing `position` reads."""
        window = self.parts[part].window
        return 0 if window is None else max(0, position - window + 1) // self.page_size


# Content


@lru_cache(maxsize=200_000)
def _slots(engine: str, prefix: Prefix, page_bytes: int) -> tuple[int, NDArray[np.uint64]]:
    """State of the chain at the end of a prefix, and the content of its last page."""
    name, data = prefix
    if not data:
        state = 1
        for byte in f"{engine}\0{name}".encode():
            state = splitmix64(state ^ (byte << 8))
        return state, np.empty(0, np.uint64)
    cut = (len(data) - 1) // page_bytes * page_bytes
    state = _slots(engine, (name, data[:cut]), page_bytes)[0]
    out = []
    for token in np.frombuffer(data[cut:], np.int32).tolist():
        state = splitmix64(state ^ (token + 1))
        out.append(state % POISON)
    return state, np.array(out, np.uint64)


def page_content(engine: str, part: Part, prefix: Prefix, page_size: int) -> NDArray[np.uint64]:
    """What the last page of a prefix holds in one part: each slot a hash of all that shapes its bytes.

    That is the engine's namespace (model, dtype, layout), the request's, and every token up to the slot.
    """
    return _slots(engine, prefix, page_size * 4)[1] ^ np.uint64(_SALT[part])


def chain(engine: str, part: Part, name: str, tokens: list[int], page_size: int) -> NDArray[np.uint64]:
    """Content of every slot of a sequence, the ragged last page included."""
    data, step = np.array(tokens, np.int32).tobytes(), page_size * 4
    ends = [*range(step, len(data), step), len(data)] if data else []
    pages = [page_content(engine, part, (name, data[:end]), page_size) for end in ends]
    return np.concatenate(pages) if pages else np.empty(0, np.uint64)


def prefixes(name: str, tokens: list[int] | NDArray[np.int32], page_size: int) -> list[Prefix]:
    """The whole-page prefixes of a sequence, shortest first."""
    data, step = np.asarray(tokens, np.int32).tobytes(), page_size * 4
    return [(name, data[:end]) for end in range(step, len(data) + 1, step)]


# Residency


@dataclass(slots=True)
class Snapshot:
    """Which prefix is in which pool, and in which page: the lists of all nodes, made flat."""

    where: dict[Pool, dict[Prefix, int]] = field(default_factory=lambda: {pool: {} for pool in POOLS})
    loading: dict[Part, set[Prefix]] = field(default_factory=lambda: {part: set() for part in Part})
    """Device prefixes whose bytes a load still brings."""

    def usable(self, shape: Shape, path: list[Prefix], tiers: Iterable[str] = ("device",)) -> int:
        """Tokens of the longest prefix along `path` from which one can go on: each part covers all or its window."""
        covered = {part: [any(p in self.where[tier, part] for tier in tiers) for p in path] for part in shape.parts}
        best = 0
        for count in range(1, len(path) + 1):
            if not covered[Part.FULL][count - 1]:
                break
            position = count * shape.page_size
            if all(all(there[shape.first(part, position) : count]) for part, there in covered.items()):
                best = count
        return best * shape.page_size


def take_snapshot(cache: Any, page_size: int) -> Snapshot:
    """Read every node's lists."""
    found = Snapshot()
    step = page_size * 4
    pending: list[tuple[Any, str, bytes]] = [(root, name, b"") for name, root in cache.tree.roots.items()]
    while pending:
        node, name, above = pending.pop()
        data = above + bytes(node.tokens)
        pending.extend((child, name, data) for child in node.children.values())
        if node.parent is None:
            continue
        names = [(name, data[:end]) for end in range(len(above) + step, len(data) + 1, step)]
        for pool, pages in _lists(node):
            if len(pages):
                assert len(pages) == len(names), f"D1 {node} has {len(pages)} pages in {pool}, expected {len(names)}"
                known = found.where[pool]
                for prefix, page in zip(names, pages.tolist(), strict=True):
                    assert prefix not in known, f"S3 {prefix} stands twice in the tree"
                    known[prefix] = page
        for part in Part:
            if node.loading & (1 << part):
                found.loading[part].update(names)
    return found


def _lists(node: Any) -> list[tuple[Pool, NDArray[np.int32]]]:
    """What a node lists, by pool: the one place of this room that knows how nodes keep their pages."""
    tiers = (("device", node.device), ("host", node.host))
    return [((tier, Part(part)), pages) for tier, parts in tiers for part, pages in enumerate(parts)]


@dataclass(slots=True)
class Change:
    """What one operation did: prefixes (and pages) that came to a pool, and that went."""

    gained: dict[Pool, dict[Prefix, int]]
    lost: dict[Pool, dict[Prefix, int]]

    def only(self, *allowed: tuple[str, Pool]) -> None:
        """Nothing but these happened: ("gained" or "lost", pool)."""
        for way, changes in (("gained", self.gained), ("lost", self.lost)):
            for pool, prefixes_ in changes.items():
                assert not prefixes_ or (way, pool) in allowed, f"residency: {pool} {way} {words(prefixes_)}"


def compare(before: Snapshot, after: Snapshot) -> Change:
    """A prefix whose page changed counts as lost and gained."""

    def minus(a: dict[Prefix, int], b: dict[Prefix, int]) -> dict[Prefix, int]:
        return {prefix: page for prefix, page in a.items() if b.get(prefix) != page}

    return Change(
        gained={pool: minus(after.where[pool], before.where[pool]) for pool in POOLS},
        lost={pool: minus(before.where[pool], after.where[pool]) for pool in POOLS},
    )


def words(found: Iterable[Prefix]) -> str:
    """The first prefixes as readable text."""
    return ", ".join(f"{name!r}:{np.frombuffer(data, np.int32).tolist()}" for name, data in list(found)[:4])


# Order


@dataclass(slots=True, kw_only=True)
class Use:
    """What the model knows of one device-resident prefix."""

    born: int
    last: int
    hits: int = 0
    priority: int = -(1 << 62)

    def rank(self, policy: str) -> tuple[int, int]:
        """The lowest goes first."""
        return {
            "lru": (self.last, 0),
            "lfu": (self.hits, self.last),
            "fifo": (self.born, 0),
            "priority": (self.priority, self.last),
        }[policy]


class Order:
    """Which prefixes the eviction must take next where nothing blurs it: one tier, no holds."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.uses: dict[Prefix, Use] = {}
        self.now = 0

    def touch(self, path: list[Prefix], *, priority: int) -> None:
        """Something used this path now, or made it."""
        self.now += 1
        for prefix in path:
            use = self.uses.setdefault(prefix, Use(born=self.now, last=self.now))
            use.last = self.now
            use.priority = max(use.priority, priority)

    def hit(self, path: list[Prefix]) -> None:
        """A request was placed on this path."""
        for prefix in path:
            self.uses[prefix].hits += 1

    def victims(self, enough: int, pinned: set[Prefix]) -> Iterator[Prefix]:
        """The next `enough` prefixes to go, in order; they are forgotten here."""
        step = self.shape.page_size * 4
        for _ in range(enough):
            parents = {(name, data[:-step]) for name, data in self.uses}
            leaves = [p for p in self.uses if p not in parents and p not in pinned]
            if not leaves:
                return
            victim = min(leaves, key=lambda p: self.uses[p].rank(self.shape.policy))
            del self.uses[victim]
            yield victim

    def keep(self, resident: Iterable[Prefix]) -> None:
        """Forget what is gone."""
        there = set(resident)
        self.uses = {prefix: use for prefix, use in self.uses.items() if prefix in there}


def dump(cache: Any) -> str:
    """Everything that a cache decided, as text: nodes with pages, pins and uses, and the owner of every page."""
    lines = []
    pending = [(0, name, root) for name, root in cache.tree.roots.items()]
    while pending:
        depth, name, node = pending.pop()
        lists = [pages.tolist() for _, pages in _lists(node)]
        lines.append(
            f"{depth} {name} {node.start}:{node.end} {lists} pins {node.pins} {node.window_pins} busy {node.busy}"
            f" uses {node.last_use} {node.hit_count} {node.priority} {node.window_use} loading {node.loading}"
        )
        pending.extend((depth + 1, name, child) for child in node.children.values())
    for (tier, part), ledger in cache.ledgers.items():
        lines.append(f"{tier} {part} {(ledger.owner_P & 7).tolist()} {ledger.hold_P.tolist()} {ledger.free_pages}")
    return "\n".join(lines)
