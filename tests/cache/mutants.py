"""Faults that the oracles of this room must see: one changed piece of the cache each, loaded beside the real one.

    python tests/cache/mutants.py [WORDS]    prints after how many seeds each turned red; exit code 1 if one survived

A mutant is named by its text alone, which stands exactly once in the whole room: files may be cut otherwise.
"""

# ruff: noqa: E501 (a table: the lines of others, as they stand)

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, FrameType, ModuleType

ROOM = Path(__file__).resolve().parents[2] / "serinus" / "cache"
SEEDS = 120
STEPS = 150
NAMED = 14
"""The first of the table are those that the design names."""
SECONDS_MAX = 20
"""A mutant that hangs is red too, after that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A fault: `old`, which stands exactly once in the room, becomes `new`."""

    name: str
    old: str
    new: str

    @property
    def file(self) -> Path:
        """Where it stands."""
        found = [
            (path, text.count(self.old)) for path in sorted(ROOM.glob("*.py")) if self.old in (text := path.read_text())
        ]
        assert [count for _, count in found] == [1], (
            f"mutant {self.name!r} stands in {found}, expected once in one file"
        )
        return found[0][0]


def _m(name: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, old=old, new=new)


MUTANTS: tuple[Mutant, ...] = (
    # The named ones of the design
    _m("duplicates are freed before the row is rewritten", "        self._pending = insertion\n        if bare is not None:",
       "        self._free_own(insertion.rid, Part.FULL, insertion.duplicates, 'early')\n        self._pending = None\n        if bare is not None:"),
    _m("a load gives its host pages back at submit", "        loaded, copy = self.loads.begin(rid, lease)\n        if copy is not None:\n            self._submit(copy.moves())",
       "        loaded, copy = self.loads.begin(rid, lease)\n        if copy is not None:\n            self._submit(copy.moves())\n            self._shelves.tree.set_busy(copy.span, -1)\n            copy.span.start = 1 << 60"),
    _m("host pages can be matched before the copy has ended", "        node.wanted = UNDER_WAY\n        self._table.begin(copy)\n",
       "        node.wanted = UNDER_WAY\n        self._table.begin(copy)\n        if len(copy.full):\n            self._shelves.attach(shelves.host, node, copy.full, copy.owner, 'early')\n            copy.full = copy.full[:0]\n"),
    _m("a backup that failed counts as one that did not", "        saved = self.backups.end(copy, ok=done.ok)", "        saved = self.backups.end(copy, ok=True)"),
    _m("a load that failed counts as one that did not", "            self.loads.end(copy, ok=done.ok)", "            self.loads.end(copy, ok=True)"),
    _m("the usable length ignores SWA", "        if on_device and (not device_gap or end >= device_gap + window - 1):", "        if on_device:"),
    _m("the usable length ignores SWA on the host", "        if not total_gap or end >= total_gap + window - 1:", "        if True:"),
    _m("an abort is forgotten while the storage is asked", "        if prefetch is not None and not prefetch.state.over:\n            prefetch.state = PrefetchState.CUT\n            self._abandon(prefetch)",
       "        if prefetch is not None and not prefetch.state.over and prefetch.state is not PrefetchState.QUERY:\n            prefetch.state = PrefetchState.CUT\n            self._abandon(prefetch)"),
    _m("an abort is forgotten while the storage reads", "        if prefetch is not None and not prefetch.state.over:\n            prefetch.state = PrefetchState.CUT\n            self._abandon(prefetch)",
       "        if prefetch is not None and not prefetch.state.over and prefetch.state is not PrefetchState.READ:\n            prefetch.state = PrefetchState.CUT\n            self._abandon(prefetch)"),
    _m("storage keys leave out the engine's namespace, the dtype with it", "for name in (self.namespace.encode(), ns):", "for name in (b'', ns):"),
    _m("storage keys leave out the request's namespace", "for name in (self.namespace.encode(), ns):", "for name in (self.namespace.encode(), b''):"),
    _m("a split touches the pages of the unused half", "        node.pages = node.pages[pages_above:]\n", "        node.pages = node.pages[pages_above - 1 :]\n"),
    _m("eviction does not wait for the write-back", "        ops = self._table.over(nodes)\n        if ops:\n            self._wait(ops)",
       "        for node in nodes:\n            self._tree._account(node, -1)\n            node.busy = 0\n            self._tree._account(node, 1)"),
    _m("a backed-up parent is required", "        dirty = [node for node in nodes if self._worth(node) and not node.busy and not self.clean(node)]",
       "        for node in nodes:\n            if self._worth(node) and node.parent is not None and node.parent.parent is not None and not len(node.parent.host):\n                raise AssertionError('the parent is not backed up')\n        dirty = [node for node in nodes if self._worth(node) and not node.busy and not self.clean(node)]"),
    # Publication and the life of a request
    _m("an uncommitted insertion goes unnoticed", "if self._pending is not None:", "if False:"),
    _m("the duplicates are the wrong half", "return _Placed(node, canonical, full[:known])", "return _Placed(node, canonical, full[len(full) - known :])"),
    _m("a ragged last page is published", "        count = len(tokens) // size\n        if len(pages.full) < count:", "        count = -(-len(tokens) // size)\n        if len(pages.full) < count:"),
    _m("the lease does not grow", "        lease.anchor = done.anchor\n", ""),
    _m("the old anchor stays pinned", "        bare = self._windows.pin(lease, old.end)\n        self._tree.unpin(old)\n", "        bare = self._windows.pin(lease, old.end)\n"),
    _m("a finished request keeps its lease", "            self.tiers.prefetches.forget(rid)\n        self.release(lease)", "            self.tiers.prefetches.forget(rid)"),
    _m("a finished request keeps its tail", '_with(insertion.duplicates, tail), "finish"', 'insertion.duplicates, "finish"'),
    _m("finish forgets the duplicates", '_with(insertion.duplicates, tail), "finish"', 'tail, "finish"'),
    _m("finish forgets the SWA tail", '_with(insertion.swa_duplicates, swa_tail), "finish"', 'insertion.swa_duplicates, "finish"'),
    _m("finish forgets the SWA duplicates", '_with(insertion.swa_duplicates, swa_tail), "finish"', 'swa_tail, "finish"'),
    _m("commit_row forgets the SWA duplicates", '        self._free_own(insertion.rid, Part.SWA, insertion.swa_duplicates, "free duplicates")\n', ""),
    _m("a lease is not released", "        self.tree.end_lease(lease)\n", ""),
    _m("a match ignores max_len", "limit = max(0, min(len(tokens), max_len))", "limit = len(tokens)"),
    _m("a match is not pinned", "        lease = self._tree.lease(anchor, priority)\n", "        lease = Lease(anchor, priority)\n"),
    _m("namespaces are mixed", "root = self.tree.root(ns)", 'root = self.tree.root("")'),
    _m("a partial match gives the other half", "            anchor = self.shelves.split(found.partial, found.end).upper\n            found.path.append(anchor)",
       "            anchor = self.shelves.split(found.partial, found.end).upper\n            found.path.append(found.partial)"),
    _m("an allocation evicts one page less", "self._evict_device(full - self.ledger.free_pages, Part.FULL)", "self._evict_device(full - self.ledger.free_pages - 1, Part.FULL)"),
    _m("an allocation evicts one SWA page too many", "self._evict_device(swa - self.free(Part.SWA), Part.SWA)", "self._evict_device(swa + 99 - self.free(Part.SWA), Part.SWA)"),
    _m("a flush does not care who is busy", "        if busy:", "        if False:"),
    _m("a flush does not wait for backups", "        self.tiers.wait_all()\n", ""),
    # Two parts
    _m("the window of a match begins one page late", "swa_first = self._windows.start(usable.device) // self._tree.page_size", "swa_first = -(-self._windows.start(usable.device) // self._tree.page_size)"),
    _m("SWA pins begin where the lease ends", "            lease.swa_from, lease.swa_edge = first, edge\n        if bare is None:", "            lease.swa_from, lease.swa_edge = lease.anchor.end, edge\n        if bare is None:"),
    _m("the window is one position too short", "max(0, position - window + 1)", "max(0, position - window + 2)"),
    _m("the window is a page too long", "max(0, position - window + 1)", "max(0, position - window - 15)"),
    _m("SWA pins never move on", "lease.swa_want = max(lease.swa_want, self.start(position))", "lease.swa_want = max(lease.swa_want, 0)"),
    _m("SWA pins let go one node early", "            if node.end > want:\n                first, edge", "            if node.start > want:\n                first, edge"),
    _m("SWA pins outlive the lease", "        if self._window is not None:\n            self._windows.release(lease)\n", ""),
    _m("pages behind the window are not freed", '            self._free_own(rid, Part.SWA, own_swa, "behind the window")\n', ""),
    _m("a filled tombstone keeps the request's page too", '            shelves.attach(shelves.swa, node, mine, merge.swa_owner, "publish")\n        merge.swa_canonical',
       '            shelves.attach(shelves.swa, node, mine, merge.swa_owner, "publish")\n            merge.swa_duplicates.append(mine)\n        merge.swa_canonical'),
    _m("a tombstone is never filled", '            shelves.attach(shelves.swa, node, mine, merge.swa_owner, "publish")\n        merge.swa_canonical', "            pass\n        merge.swa_canonical"),
    _m("SWA of a node is taken from its beginning", "merge.swa_canonical.append(node.swa[at - low :])", "merge.swa_canonical.append(node.swa[: high - at])"),
    _m("SWA duplicates are the tree's own", "            merge.swa_duplicates.append(mine)\n        else:", "            merge.swa_duplicates.append(node.swa[at - low :])\n        else:"),
    _m("a tombstone takes a leased window", "    return node.alive and not node.swa_pins and len(node.swa) > 0", "    return node.alive and len(node.swa) > 0"),
    _m("a split shares its SWA out wrongly", "upper.swa, node.swa = node.swa[:pages_above], node.swa[pages_above:]", "upper.swa, node.swa = node.swa[: len(node.swa) - pages_above], node.swa[len(node.swa) - pages_above :]"),
    _m("a split forgets the SWA pins of the first half", "upper.swa_pins, upper.busy, upper.storing, upper.loading = node.swa_pins,", "upper.swa_pins, upper.busy, upper.storing, upper.loading = 0,"),
    _m("a leaf that goes leaves its SWA behind", "        if len(leaf.swa):\n            victims.swa.append", "        if False:\n            victims.swa.append"),
    _m("a leaf that is demoted keeps its SWA", '        if shelves.swa is not None:\n            shelves.detach(shelves.swa, node, "evict")\n', ""),
    # Host tier
    _m("a host page is given up while a copy reads it", "    return node.alive and not node.busy and not node.storing", "    return node.alive"),
    _m("a duplicate is given up while a load reads it", "def _duplicate(node: Node) -> bool:", "def _duplicate(node: Node) -> bool:\n    if node.alive and len(node.host) > 0 and len(node.pages) > 0:\n        return True"),
    _m("a demoted node is dropped", "        kept = len(node.host) > 0", "        kept = False"),
    _m("host pages of a failed backup are lost", '                    shelf.ledger.move(pages[low:high], copy.owner, FREE_OWNER, "backup failed")', "                    pass"),
    _m("a backup over a split gives both halves the same pages", "low, high = (node.start - copy.span.start) // size, (node.end - copy.span.start) // size", "low, high = 0, (node.end - node.start) // size"),
    _m("a backup copies one part only", "if len(node.swa) and not len(node.host_swa) and shelves.host_swa is not None:", "if False:"),
    _m("clean is said of half a copy", "return len(node.host) > 0 and (len(node.swa) == 0 or len(node.host_swa) > 0)", "return len(node.host) > 0"),
    _m("write_through forgets what a request published", "            self._tiers.backups.used(done.nodes)\n", "            pass\n"),
    _m("the dirty queue gives up after one poll", "        self._low_water()\n        moves", "        self._low_water()\n        self._dirty.clear()\n        moves"),
    _m("a load plan does not keep its host pages", "        self._tree.set_plan(lease.plan, 1)\n", "        self._tree.set_plan(lease.plan, 1)\n        self._tree.set_plan(lease.plan, -1)\n"),
    _m("a plan outlives its lease", "        if lease.plan is not None:\n            self.tiers.loads.drop_plan(lease)\n        self.tree.touch", "        self.tree.touch"),
    _m("a load fills the wrong nodes", "target[at : at + len(pages)], None, \"load\"", "target[len(target) - at - len(pages) : len(target) - at], None, \"load\""),
    _m("a loaded page stays with its copy", "                        self._shelves.settle(shelf, node, copy.owner)", "                        pass"),
    _m("nobody is told of a load that failed", "            if node is top:\n                if lease.sound_end is None:", "            if False:\n                if lease.sound_end is None:"),
    _m("what hangs below a failed load stays", "            pending.extend(node.children.values())\n        for node in reversed(below):\n            for shelf", "        for node in reversed(below):\n            for shelf"),
    _m("a lease over a failed load still publishes", "if not count or lease.sound_end is not None:", "if not count:"),
    _m("completions that came early are lost", "            self._early += [done for done in came if done.op not in missing]\n", ""),
    _m("a host-only node loses its descendants' parent", "            self._host.drop_below(node)\n", ""),
    # Storage
    _m("prefetch pages are freed before the reader answered", "            if batch.good >= 0 and len(batch.pages):", "            if len(batch.pages):"),
    _m("storage keys are not chained", "digest_size=HASH_BYTES, key=key).digest()", "digest_size=HASH_BYTES).digest()"),
    _m("a prefetch trusts pages that never came", "pages.append(batch.pages[: max(0, batch.good)])", "pages.append(batch.pages)"),
    _m("a prefetch goes on behind a gap", "                if batch.good < len(batch.pages):\n                    break", "                pass"),
    _m("a graft hangs where the prefix is gone", "        if at < first or at >= end:", "        if at >= end:"),
    _m("a graft ignores what was computed meanwhile", "        at = found.end // size\n        if at < first", "        at = first\n        if at < first"),
    _m("a storage write does not keep its pages", "                    self._shelves.tree.set_storing(span, 1)\n", ""),
    _m("what is stored is a page further on", "self._storage.write(op, shelf.part, named, pages)", "self._storage.write(op, shelf.part, named[::-1], pages)"),
    # tree.py and shelves.py
    _m("only the first page of a node is compared", "if not startswith(child.tokens, at):", "if False:"),
    _m("agreement is not cut to whole pages", "return first - first % self.page_size", "return first"),
    _m("agreement is one page short", "return first - first % self.page_size", "return max(self.page_size, first - first % self.page_size - self.page_size)"),
    _m("a split leaves all pages in the second half", "        node.pages = node.pages[pages_above:]\n", ""),
    _m("a split leaves all tokens in the second half", "        node.tokens = node.tokens[cut:]\n", ""),
    _m("a split forgets the pin of the first half", "upper.pins = 1 if node.pins else 0", "upper.pins = 0"),
    _m("a split counts every lease on the first half", "upper.pins = 1 if node.pins else 0", "upper.pins = node.pins"),
    _m("a split gives the wrong pages the new name", "            moved = node\n        self.arena[upper.id]", "            moved = upper\n        self.arena[upper.id]"),
    _m("a split keeps the ledger in the dark", '        self.device.ledger.move(NO_PAGES if moved.loading & 1 << Part.FULL else moved.pages, source, target, "split")\n', ""),
    _m("a split forgets the holds of its halves", "            self._recount_split(split)\n", "            pass\n"),
    _m("publishing forgets the holds of its pages", "            if held:\n", "            if held < 0:\n"),
    _m("pins stop at the first node", "            if above.pins > 1:\n                return\n", "            if above is not None:\n                return\n"),
    _m("pins go up too far", "            if above.pins > 1:\n                return\n", ""),
    _m("unpinning goes up too far", "            if above.pins:\n                return\n", ""),
    _m("a trim takes the head", "        victims.pages.append(leaf.pages[keep:])", "        victims.pages.append(leaf.pages[: len(leaf.pages) - keep])"),
    _m("a trim keeps the tokens", "        leaf.tokens = leaf.tokens[: keep * self.key_bytes]\n", ""),
    _m("a trim ignores holds", "if leaf.held == 0 and leaf.swa_held == 0 and wanted < len(leaf.pages):", "if wanted < len(leaf.pages):"),
    _m("held pages count as freed", "victims.freed += len(leaf.pages) - leaf.held", "victims.freed += len(leaf.pages)"),
    _m("an orphaned parent is not queued", "        if not parent.pins and not parent.device_children:\n            self._loose_end(parent)\n\n    def _loose_end", "\n    def _loose_end"),
    _m("holds do not lower what is evictable", "        node.held, node.swa_held = held, swa_held\n        self._account(node, 1)", "        self._account(node, 1)\n        node.held, node.swa_held = held, swa_held"),
    _m("an empty namespace stays", "            self.roots.pop(node.key.decode(), None)\n", "            pass\n"),
    _m("eviction ignores pins", "return node.alive and not node.pins and not node.device_children and len(node.pages) > 0", "return node.alive and not node.device_children and len(node.pages) > 0"),
    _m("eviction ignores children", "return node.alive and not node.pins and not node.device_children and len(node.pages) > 0", "return node.alive and not node.pins and len(node.pages) > 0"),
    _m("ranks are never repaired", "if now == rank:", "if True:"),
    _m("hits are forgotten by the policy", "            node.hit_count += 1\n", "            pass\n"),
    _m("priorities are forgotten by the policy", "            node.priority = priority\n", "            pass\n"),
    # ledger.py and sweep.py
    _m("holds are ignored on reuse (move)", "        if target == FREE_OWNER:\n            self._push(pages if not self.held_count else pages[self.hold_P[index] == 0])", "        if target == FREE_OWNER:\n            self._push(pages)"),
    _m("holds are ignored on reuse (evict)", 'FREE_OWNER, "evict")\n        self._push(pages if not self.held_count else pages[self.hold_P[index] == 0])', 'FREE_OWNER, "evict")\n        self._push(pages)'),
    _m("a parked page never comes back", "        self._push(bare[self.owner_P[bare] == FREE_OWNER])\n", ""),
    _m("an unheld page comes back although it is owned", "self._push(bare[self.owner_P[bare] == FREE_OWNER])", "self._push(bare)"),
    _m("one unhold ends all holds", "        self.hold_P[index] -= 1\n", "        self.hold_P[index] = 0\n"),
    _m("pages are handed out and kept", "        self._free = left\n", ""),
    _m("a request's pages are not counted", "            self._pages_of[target >> STATE_BITS] += count\n", "            pass\n"),
    _m("the sweep has wrong predecessors", "before[1:] = pages[:-1]", "before[1:] = pages[1:]"),
    _m("the sweep counts positions from the node", "np.arange(start, start + len(pages) * self.page_size, self.page_size)", "np.arange(0, len(pages) * self.page_size, self.page_size)"),
)  # fmt: skip
"""All but the first, which is the scheduler's: `rewrite_rows=False`."""


class _Loader(SourceFileLoader):
    """Compiles one file of the room from changed text."""

    def __init__(self, fullname: str, path: str, mutant: Mutant) -> None:
        super().__init__(fullname, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.path).read_text()
        return compile(text.replace(self._mutant.old, self._mutant.new), f"{self.path} (mutant)", "exec")


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._file = mutant.file

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != f"serinus.cache.{self._file.stem}":
            return None
        file = str(self._file)
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


def _hangs(signum: int, frame: FrameType | None) -> None:
    raise AssertionError(f"still running after {SECONDS_MAX} s")


def seeds_until_red(room: ModuleType, *, rewrite_rows: bool = True) -> tuple[int, str]:
    """How many seeds it takes until an oracle fails, and what it says; (0, "") if none does within SEEDS."""
    from serinus.core.errors import SerinusError
    from tests.cache.drive import drive

    before = signal.signal(signal.SIGALRM, _hangs)
    try:
        for seed in range(SEEDS):
            signal.alarm(SECONDS_MAX)
            try:
                drive(room, seed, STEPS, rewrite_rows=rewrite_rows)
            except (
                AssertionError,
                SerinusError,
                LookupError,
                ValueError,
                TypeError,
                AttributeError,
                NameError,
            ) as error:
                return seed + 1, f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return 0, ""


def main() -> int:
    """Print the table; how many survived."""
    sys.path.insert(0, str(ROOM.parents[1]))
    words = " ".join(sys.argv[1:])
    survived = 0
    for mutant in MUTANTS:
        if words not in mutant.name:
            continue
        with loaded(mutant) as room:
            seeds, what = seeds_until_red(room)
        survived += not seeds
        print(f"{seeds or 'SURVIVED':>8}  {mutant.name}: {what[:110]}", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
