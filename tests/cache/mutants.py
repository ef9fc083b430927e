"""Faults that the oracles of world.py must see: one changed line of the cache each, loaded beside the real one.

python tests/cache/mutants.py        prints after how many seeds each turned red
"""

# ruff: noqa: E501 (a table: the lines of others, as they stand)

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

ROOM = Path(__file__).resolve().parents[2] / "serinus" / "cache"
SEEDS = 100
STEPS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A fault: in `file`, `old` (which stands there exactly once) becomes `new`."""

    name: str
    file: str
    old: str
    new: str


def _m(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, file=file, old=old, new=new)


MUTANTS: tuple[Mutant, ...] = (
    # prefix.py: the publishing rule and the life of a request
    _m("duplicates freed before the row is rewritten", "prefix.py", "        self._pending = insertion\n        return",
       "        self._free_own(insertion.rid, insertion.duplicates, 'early')\n        self._pending = None\n        return"),
    _m("an uncommitted insertion goes unnoticed", "prefix.py", "if self._pending is not None:", "if False:"),
    _m("the duplicates are the wrong half", "prefix.py", "own[:known]", "own[len(own) - known :]"),
    _m("a ragged last page is published", "prefix.py", "count = len(tokens) // size", "count = -(-len(tokens) // size)"),
    _m("the lease does not grow", "prefix.py", "        lease.anchor = node\n", ""),
    _m("the old anchor stays pinned", "prefix.py", "        self.tree.unpin(lease.anchor)\n        lease.anchor = node",
       "        lease.anchor = node"),
    _m("a finished request keeps its lease", "prefix.py", "        self.release(lease)\n\n    def release", "\n    def release"),
    _m("a finished request keeps its tail", "prefix.py", "np.concatenate((insertion.duplicates, tail)) if insertion.changed else tail",
       "insertion.duplicates"),
    _m("finish forgets the duplicates", "prefix.py", "np.concatenate((insertion.duplicates, tail)) if insertion.changed else tail",
       "tail"),
    _m("a lease is not released", "prefix.py", "        self.tree.unpin(lease.anchor)\n\n    # Holds", "\n    # Holds"),
    _m("a match ignores max_len", "prefix.py", "limit = max(0, min(len(tokens), max_len))", "limit = len(tokens)"),
    _m("a match is not pinned", "prefix.py", "        self.tree.pin(anchor)\n        self.tree.touch(anchor, hit=True)",
       "        self.tree.touch(anchor, hit=True)"),
    _m("namespaces are mixed", "prefix.py", "root = self.tree.root(ns)", 'root = self.tree.root("")'),
    _m("a partial match gives the other half", "prefix.py", "found.path.append(anchor.pages)",
       "found.path.append(found.partial.pages)"),
    _m("a refused allocation evicts first", "prefix.py", "            if short > self.tree.evictable_pages:\n                return None\n",
       "            if short > self.tree.evictable_pages:\n                self._apply(self.tree.evict(short))\n                return None\n"),
    _m("an allocation evicts one page less", "prefix.py", "self.tree.evict(short)", "self.tree.evict(short - 1)"),
    _m("evicted pages stay in the ledger", "prefix.py", "            self.ledger.evict(pages, victims.node_ids, victims.lengths)\n", ""),
    _m("a split keeps the ledger in the dark", "prefix.py",
       '        self.ledger.move(split.pages, tree_owner(split.old_id), tree_owner(split.new_id), "split")\n', ""),
    _m("a split forgets the holds of its halves", "prefix.py", "            node.held -= upper_held\n", ""),
    _m("publishing forgets the holds of its pages", "prefix.py", "            if held:\n", "            if held < 0:\n"),
    _m("a flush does not care who is busy", "prefix.py", "        if busy:", "        if False:"),
    # tree.py: structure, pins, eviction
    _m("only the first page of a node is compared", "tree.py", "if not startswith(child.tokens, at):", "if False:"),
    _m("agreement is not cut to whole pages", "tree.py", "return first - first % self.page_size", "return first"),
    _m("agreement is one page short", "tree.py", "return first - first % self.page_size",
       "return max(self.page_size, first - first % self.page_size - self.page_size)"),
    _m("a split leaves all pages in the second half", "tree.py", "        node.pages = node.pages[pages_above:]\n", ""),
    _m("a split leaves all tokens in the second half", "tree.py", "        node.tokens = node.tokens[cut:]\n", ""),
    _m("a split forgets the pin of the first half", "tree.py", "upper.pins = 1 if node.pins else 0", "upper.pins = 0"),
    _m("a split counts every lease on the first half", "tree.py", "upper.pins = 1 if node.pins else 0", "upper.pins = node.pins"),
    _m("a split gives the wrong pages the new name", "tree.py", "moved, new_id, old_id = node.pages, node.id, upper.id",
       "moved, new_id, old_id = upper.pages, node.id, upper.id"),
    _m("pins stop at the first node", "tree.py", "            if above.pins > 1:\n                return\n",
       "            if above is not None:\n                return\n"),
    _m("pins go up too far", "tree.py", "            if above.pins > 1:\n                return\n", ""),
    _m("unpinning goes up too far", "tree.py", "            if above.pins:\n                return\n", ""),
    _m("an unpinned leaf is not queued", "tree.py", "            self.queue.push(node)\n", "            pass\n"),
    _m("a trim takes the head", "tree.py", "tail: Pages = leaf.pages[keep:]", "tail: Pages = leaf.pages[:count]"),
    _m("a trim keeps the tokens", "tree.py", "        leaf.tokens = leaf.tokens[: keep * self.key_bytes]\n", ""),
    _m("a trim ignores holds", "tree.py", "if leaf.held == 0 and wanted < len(leaf.pages):", "if wanted < len(leaf.pages):"),
    _m("held pages count as freed", "tree.py", "victims.lengths[-1] - leaf.held", "victims.lengths[-1]"),
    _m("an orphaned parent is not queued", "tree.py", "        if not parent.children and not parent.pins:\n            self._childless(parent)\n", ""),
    _m("holds do not lower what is evictable", "tree.py", "            self.evictable_pages -= change\n", "            pass\n"),
    _m("an empty namespace stays", "tree.py", "            del self.roots[node.key.decode()]\n", "            pass\n"),
    # eviction.py
    _m("eviction ignores pins", "eviction.py", "if node.pins or node.children", "if node.children"),
    _m("eviction ignores children", "eviction.py", "if node.pins or node.children", "if node.pins"),
    _m("ranks are never repaired", "eviction.py", "if now == rank:", "if True:"),
    _m("a dropped entry is remembered", "eviction.py",
       "                heappop(heap)\n                node.queued = False\n", "                heappop(heap)\n"),
    # ledger.py
    _m("holds are ignored on reuse (move)", "ledger.py",
       "        if target == FREE_OWNER:\n            self._push(pages if not self.held_count else pages[self.hold_P[index] == 0])",
       "        if target == FREE_OWNER:\n            self._push(pages)"),
    _m("holds are ignored on reuse (evict)", "ledger.py",
       'FREE_OWNER, "evict")\n        self._push(pages if not self.held_count else pages[self.hold_P[index] == 0])',
       'FREE_OWNER, "evict")\n        self._push(pages)'),
    _m("a parked page never comes back", "ledger.py", "        self._push(bare[self.owner_P[bare] == FREE_OWNER])\n", ""),
    _m("an unheld page comes back although it is owned", "ledger.py", "self._push(bare[self.owner_P[bare] == FREE_OWNER])",
       "self._push(bare)"),
    _m("one unhold ends all holds", "ledger.py", "        self.hold_P[index] -= 1\n", "        self.hold_P[index] = 0\n"),
    _m("pages are handed out and kept", "ledger.py", "        self._free = left\n", ""),
    _m("a request's pages are not counted", "ledger.py", "            self._pages_of[target >> STATE_BITS] += count\n", "            pass\n"),
    # sweep.py
    _m("the sweep has wrong predecessors", "sweep.py", "before[1:] = pages[:-1]", "before[1:] = pages[1:]"),
    _m("the sweep counts positions from the node", "sweep.py", "np.arange(start, start + len(pages) * self.page_size, self.page_size)",
       "np.arange(0, len(pages) * self.page_size, self.page_size)"),
)  # fmt: skip


class _Loader(SourceFileLoader):
    """Compiles one file of the room from changed text."""

    def __init__(self, fullname: str, path: str, mutant: Mutant) -> None:
        super().__init__(fullname, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.path).read_text()
        count = text.count(self._mutant.old)
        assert count == 1, f"mutant {self._mutant.name!r}: its text stands {count} times in {self.path}, expected once"
        return compile(text.replace(self._mutant.old, self._mutant.new), f"{self.path} (mutant)", "exec")


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != f"serinus.cache.{self._mutant.file.removesuffix('.py')}":
            return None
        file = str(ROOM / self._mutant.file)
        return spec_from_file_location(fullname, file, loader=_Loader(fullname, file, self._mutant))


@contextmanager
def loaded(mutant: Mutant) -> Iterator[ModuleType]:
    """The room `serinus.cache` with this fault, beside the real one, which is back in its place afterwards."""
    import serinus

    real = {name: module for name, module in sys.modules.items() if name.split(".")[:2] == ["serinus", "cache"]}
    room = serinus.__dict__.get("cache")
    finder = _Finder(mutant)
    for name in real:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module("serinus.cache")
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.split(".")[:2] == ["serinus", "cache"]]:
            del sys.modules[name]
        sys.modules.update(real)
        if room is not None:
            serinus.__dict__["cache"] = room


def seeds_until_red(room: ModuleType, *, rewrite_rows: bool = True) -> tuple[int, str]:
    """How many seeds it takes until an oracle fails, and what it says; (0, "") if none does within SEEDS."""
    from serinus.core.errors import SerinusError
    from tests.cache.drive import drive

    for seed in range(SEEDS):
        try:
            drive(room, seed, STEPS, rewrite_rows=rewrite_rows)
        except (AssertionError, SerinusError, LookupError, ValueError) as error:
            return seed + 1, f"{type(error).__name__}: {error}"
    return 0, ""


def main() -> None:
    """Print the table."""
    sys.path.insert(0, str(ROOM.parents[1]))
    for mutant in MUTANTS:
        with loaded(mutant) as room:
            seeds, what = seeds_until_red(room)
        print(f"{seeds or 'SURVIVED':>8}  {mutant.name}: {what[:110]}", flush=True)


if __name__ == "__main__":
    main()
