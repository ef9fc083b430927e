"""Condemned pages in any order of events: never found, published, loaded, copied, stored or handed out by mistake."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serinus.cache import CheckedCopies, Condemned, PageState, Tier
from serinus.cache.kept_copies import HostCopies
from serinus.cache.keys import HASH_BYTES, PageKeys
from serinus.cache.node import FULL
from serinus.cache.publish import Publisher
from serinus.cache.quarantine import PageQuarantine
from serinus.core.errors import SerinusError
from serinus.core.parts import Part
from tests.cache.shop import SIZE, Guest, Shop, span

PROMPTS = [span(0, 24), np.concatenate((span(0, 12), span(50, 62))), span(100, 120)]
NAMES = PageKeys("", SIZE)
_STATE = 7


class Storm:
    """Requests come, go and are condemned; `wrong` are device pages whose KV nothing may find any more."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.shop = Shop(full=49, host=49, storage=True)
        self.guests: list[Guest] = []
        self.count = 0
        self.wrong: set[int] = set()

    def seat(self) -> None:
        if len(self.guests) < 3:
            self.count += 1
            self.guests.append(self.shop.seat(f"r{self.count}", self.rng.choice(PROMPTS)))
            fresh = set(self.guests[-1].row.tolist()) - set(self.guests[-1].match.pages.tolist())
            banned = self.shop.cache.tiers.quarantine.banned[Part.FULL].keys()
            assert not fresh & banned, "a condemned page was handed out"
            self.wrong -= fresh
            assert not self.wrong & set(self.guests[-1].match.pages.tolist()), "a condemned page was matched"

    def publish(self) -> None:
        if self.guests:
            guest = self.rng.choice(self.guests)
            self.shop.publish(guest, self.rng.randrange(guest.computed, len(guest.tokens) + 1))

    def leave(self) -> None:
        if self.guests:
            self.shop.leave(self.guests.pop(self.rng.randrange(len(self.guests))))

    def condemn(self) -> None:
        """A cached page, or one of a request's own."""
        states = self.shop.cache.ledger.owner_P & _STATE
        pages = np.flatnonzero((states == PageState.TREE) | (states == PageState.REQUEST)).astype(np.int32)
        if len(pages):
            page = pages[[self.rng.randrange(len(pages))]]
            checked = self.checked(int(page[0])) if self.rng.random() < 0.5 else None
            wrong = [node.host[FULL][found[FULL] :] for node, found in (checked or {}).items()]
            gone = self.shop.cache.condemn(Part.FULL, page, checked=checked)
            assert page[0] in gone.pages.get(Part.FULL, page), "it was condemned, and is named again"
            self.wrong |= {int(page[0]), *gone.pages.get(Part.FULL, page).tolist()}
            if checked:
                self.found_again(gone, checked, np.concatenate(wrong))
            if gone.prefix and checked is None and self.rng.random() < 0.5:
                self.store()
                self.store()
                key = NAMES.chain(NAMES.seed(b""), gone.prefix)[-HASH_BYTES:]
                assert (Part.FULL, key) not in self.shop.storage.stored, "what was condemned is stored still"

    def recall(self) -> None:
        """Another engine removed a page that is known here; it knew of nothing behind it."""
        prompt, storage = self.rng.choice(PROMPTS), self.shop.storage
        first, end = self.rng.randrange(len(prompt) // SIZE), self.shop.cache.probe("", prompt).total // SIZE
        keys = NAMES.chain(NAMES.seed(b""), prompt.tobytes())
        behind = [(Part.FULL, keys[at * HASH_BYTES : (at + 1) * HASH_BYTES]) for at in range(first, end)]
        if behind and behind[0] in storage.stored:
            storage.stored.discard(behind[0])
            storage.recalls.append(behind[0][1])
            self.shop.cache.poll()
            assert self.shop.lengths(prompt)[1] == first * SIZE, "what was recalled is found"
            self.store()
            self.store()
            assert storage.stored.isdisjoint(behind), "what continues a recalled page is stored still"

    def checked(self, page: int) -> CheckedCopies:
        """Of what the host has of a page and of all behind it, some is sound; those pages hold what they did."""
        found = self.shop.cache.tiers.quarantine.copies.behind(Part.FULL, page, self.rng.choice([4, 8, 99]))
        return {each.node: {FULL: self.rng.randrange(len(each.spans[0].pages) + 1)} for each in found}

    def found_again(self, gone: Condemned, checked: CheckedCopies, wrong: NDArray[np.int32]) -> None:
        """What was sound is matched on the host, as far as it reaches without a gap; nothing else is."""
        states = self.shop.cache.ledgers[Tier.HOST, Part.FULL].owner_P[wrong] & _STATE
        assert (states == PageState.FREE).all(), "a copy that was found wrong is not given up"
        tokens = np.frombuffer(gone.prefix, np.int32)
        first = next(iter(checked.values()))[FULL]
        probe = self.shop.cache.probe("", tokens)
        assert probe.device < len(tokens), "the condemned page is still on the device"
        assert (probe.total == len(tokens)) == (first > 0), "a sound copy is found, a wrong one is not"
        assert (gone.kept > 0) == (first > 0)

    def move(self) -> None:
        self.shop.settle()

    def store(self) -> None:
        for kind in ("write", "remove", "query", "read"):
            self.shop.storage.answer(kind)
        self.shop.cache.poll()

    def evict(self) -> None:
        self.shop.cache.evict(self.rng.choice([2, 99]), self.rng.choice([Tier.DEVICE, Tier.HOST]))

    def prefetch(self) -> None:
        self.count += 1
        self.shop.cache.prefetch(f"p{self.count}", "", self.rng.choice(PROMPTS))

    def check(self) -> None:
        cache = self.shop.cache
        self.shop.check(*self.guests)
        free = np.flatnonzero((cache.ledger.owner_P & _STATE) == PageState.FREE)
        self.wrong -= set(free.tolist())  # overwritten before they are read
        for node in cache.tree.nodes():
            assert not self.wrong & set(node.device[FULL].tolist()), f"{node} is found, and was condemned"
        banned = cache.tiers.quarantine.banned[Part.FULL]
        assert all(int(cache.ledger.owner_P[page]) & _STATE != PageState.FREE for page in banned)

    def end(self) -> None:
        """All leave; nothing is lost."""
        while self.guests:
            self.leave()
        self.move()
        self.store()
        self.move()
        self.store()
        self.check()
        keys = self.shop.cache.tiers.quarantine.keys
        assert not keys, "what was condemned is removed from the storage"
        cache = self.shop.cache
        cache.reset()
        counts = cache.ledger.counts()
        assert (counts.free + counts.retired, counts.quarantined) == (48, 0)
        assert cache.ledgers[Tier.HOST, Part.FULL].free_pages == 48


RULES: tuple[tuple[int, Callable[[Storm], None]], ...] = (
    (5, Storm.seat), (5, Storm.publish), (3, Storm.leave), (3, Storm.condemn), (3, Storm.move), (3, Storm.store),
    (1, Storm.evict), (1, Storm.prefetch), (1, Storm.recall),
)  # fmt: skip


def run(seed: int, steps: int = 60) -> None:
    storm = Storm(seed)
    for _ in range(steps):
        storm.rng.choices([rule for _, rule in RULES], [weight for weight, _ in RULES])[0](storm)
        storm.check()
    storm.end()


def test_condemned_pages_are_gone_in_any_order_of_events() -> None:
    for seed in range(60):
        run(seed)


def _no_cut(self: PageQuarantine, top: Any, gone: Any, checked: Any) -> list[Any]:
    gone.setdefault(Part.FULL, []).append(top.device[FULL])
    return []


def _take_all(self: HostCopies, top: Any, checked: Any) -> list[Any]:
    return _TAKE(self, top, {node: {FULL: len(node.host[FULL])} for node in checked or ()})


def _cut_alone(self: PageQuarantine, keys: Any) -> int:
    known = set(self.keys)
    tokens = _CUT_KEYS(self, keys)
    self.keys &= known
    return tokens


def _keep_wrong(self: HostCopies, pool: Any, node: Any, found: Any) -> Any:
    return self._pools.unlink(pool, node)


_TAKE = HostCopies.take
_CUT_KEYS = PageQuarantine.cut_keys

MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "condemned pages are not cut from the tree": (PageQuarantine, "_condemn_below", _no_cut),
    "a condemned request still publishes": (PageQuarantine, "sound_count", lambda self, part, pages: len(pages)),
    "condemned pages are free when they are given back": (
        PageQuarantine, "_is_banned", lambda self, part, pages: np.zeros(len(pages), bool),
    ),
    "nothing is removed from the storage": (PageQuarantine, "_condemn_below", lambda self, top, gone, checked: (
        gone.setdefault(Part.FULL, []).append(top.device[FULL]), self.cut(top, tell=False))[1]),
    "a request with a lease on it publishes behind it": (PageQuarantine, "_mark_users", lambda self, top, tell: None),
    "what continues a recalled page is trusted": (PageQuarantine, "cut_keys", _cut_alone),
    "a copy that was found wrong is kept": (HostCopies, "_part_of", _keep_wrong),
    "copies are kept behind a wrong one": (HostCopies, "take", _take_all),
    "files behind a wrong copy are trusted": (HostCopies, "unsound_keys", lambda self, top, checked: set()),
    "the whole row is published whatever is condemned": (
        Publisher, "_sound_count", lambda self, spans, count: count,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_each_of_these_weaknesses_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, wrong = MUTANTS[name]
    monkeypatch.setattr(owner, method, wrong)
    for seed in range(60):
        try:
            run(seed)
        except (AssertionError, SerinusError, LookupError):
            return
    pytest.fail(f"{name}: 60 seeds saw nothing")
