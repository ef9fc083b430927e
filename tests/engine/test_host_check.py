"""Pages on the host are verified before they are stored, and after they were read from the storage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serinus.core.moves import PageOrigin
from serinus.core.parts import Part
from serinus.core.stamps import CHAIN_ANCHOR, STAMP_BYTES, STAMP_FIELDS
from serinus.models.small_checkpoints import make_toy
from serinus.pool.storage import PageFiles
from serinus.testing.oracle import toy_continue
from tests.engine.test_canary import TIERED, Watched

PROMPTS = [list(range(first, first + 24)) for first in (20, 70)]
Damage = Callable[[np.ndarray, np.ndarray], None]


def kv_byte(data_PY: np.ndarray, pages: np.ndarray) -> None:
    data_PY[pages[2], 9] ^= 4


def stamp(data_PY: np.ndarray, pages: np.ndarray) -> None:
    data_PY[pages[2], -STAMP_FIELDS * 8 + 1] ^= 1  # the token of the last slot, lane TAIL_V


def exchanged(data_PY: np.ndarray, pages: np.ndarray) -> None:
    data_PY[pages[2:4]] = data_PY[pages[3:1:-1]].copy()


def replayed(data_PY: np.ndarray, pages: np.ndarray) -> None:
    data_PY[pages[2]] = data_PY[pages[1]]


class Stored(Watched):
    """An engine with files; `damage` meets the pages of its next storage write, after their copy and before they are
    stored."""

    def __init__(self, toy: Path, folder: Path, **settings: Any) -> None:
        files = {"hicache_storage_backend": "file", "hicache_storage_dir": str(folder)}
        waits = {"hicache_storage_prefetch_policy": "wait_complete", "kv_canary": "raise"}
        super().__init__(toy, **TIERED, **files, **waits, **settings)
        assert self.built.tiers is not None
        self.host = self.built.tiers.host[self.part]
        self.damage: Damage | None = None
        writes = self.built.cache.tiers.writes
        assert writes is not None
        self._write = writes._storage.write
        writes._storage.write = self._meet  # type: ignore[method-assign]

    def _meet(self, op: int, part: Part, keys: Any, pages: Any, origin: Any = None) -> None:
        if self.damage is not None and part is self.part:
            self.damage(self.host.data_PY, pages)
            self.damage = None
        self._write(op, part, keys, pages, origin)

    @property
    def shelf(self) -> PageFiles:
        assert self.built.tiers is not None
        assert self.built.tiers.storage is not None
        shelf = self.built.tiers.storage.shelf
        assert isinstance(shelf, PageFiles)
        return shelf

    def keys_of(self, prompt: list[int]) -> list[bytes]:
        keys = self.built.cache.pools.keys
        chained = keys.chain(keys.seed(b""), np.array(prompt, np.int32).tobytes())
        return [chained[at : at + 16] for at in range(0, len(chained), 16)]

    def has(self, prompt: list[int]) -> list[bool]:
        """Which pages of a prompt are stored."""
        return [self.shelf.path_of(self.part, key).exists() for key in self.keys_of(prompt)]

    def ask(self, rid: str, prompt: list[int]) -> list[int]:
        self.add(rid, prompt, 4)
        self.run()
        while self.built.cache.poll().in_flight:
            self.built.line.pump(0.01)
        self.built.line.pump()
        return self.tokens(rid)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), tokenizer=False)


@pytest.mark.parametrize("damage", [kv_byte, stamp, exchanged, replayed])
def test_a_page_that_was_damaged_on_the_host_is_not_stored_and_is_reported(
    toy: Path, tmp_path: Path, damage: Damage
) -> None:
    engine = Stored(toy, tmp_path)
    spec = engine.built.spec
    engine.damage = damage
    assert engine.ask("a", PROMPTS[0]) == toy_continue(spec, PROMPTS[0], 4)
    assert engine.damage is None, "nothing was about to be stored"
    assert engine.has(PROMPTS[0])[:4] == [True, True, False, False], "the pages before it, of that write"
    found = list(engine.lead.violations)
    assert [each.page for each in found] == [3, 4][: len(found)]
    assert {each.tag[:5] for each in found} == {"HOST_"}
    assert {each.owner[:5] for each in found} == {"host "}
    assert len(found) == engine.lead.incidents.total == (2 if damage is exchanged else 1)
    assert engine.lead.view()["violations"] == len(found), "`serinus canary show` ends with 1 where there are some"
    engine.ask("b", PROMPTS[1])
    assert engine.ask("c", PROMPTS[0]) == toy_continue(spec, PROMPTS[0], 4)
    assert all(engine.has(PROMPTS[0])), "the device's copy was sound: copied again, and stored"
    engine.built.close()
    again = Stored(toy, tmp_path)
    for prompt in PROMPTS:
        assert again.ask(f"r{prompt[0]}", prompt) == toy_continue(spec, prompt, 4)
    assert not list(again.lead.violations)
    assert again.built.cache.stats().prefetched_tokens > 0
    again.built.close()


@pytest.mark.parametrize("part", ["kv", "stamp"])
def test_a_file_with_a_sound_header_and_wrong_kv_is_a_miss_reported_and_removed(
    toy: Path, tmp_path: Path, part: str
) -> None:
    first = Stored(toy, tmp_path)
    spec = first.built.spec
    first.ask("a", PROMPTS[0])
    assert all(first.has(PROMPTS[0]))
    shelf, (_, before, key, *_) = first.shelf, first.keys_of(PROMPTS[0])
    data = np.empty(first.host.page_bytes, np.uint8)
    assert shelf.load(Part.FULL, key, data)
    data[3 if part == "kv" else -40] ^= 1
    shelf.path_of(Part.FULL, key).unlink()
    shelf._forget(shelf.path_of(Part.FULL, key).name)
    shelf.save(Part.FULL, key, data, before)
    first.built.close()
    second = Stored(toy, tmp_path)
    assert second.ask("a", PROMPTS[0]) == toy_continue(spec, PROMPTS[0], 4)
    assert [each.tag[:5] for each in second.lead.violations] == ["HOST_"]
    assert second.built.cache.stats().prefetched_tokens == 8
    assert all(second.has(PROMPTS[0])), "it was stored again, rightly, and what continues it"
    second.built.close()
    third = Stored(toy, tmp_path)
    assert third.ask("a", PROMPTS[0]) == toy_continue(spec, PROMPTS[0], 4)
    assert not list(third.lead.violations), "one report for each restart, and never mended"
    assert third.built.cache.stats().prefetched_tokens >= 20
    third.built.close()


ORIGINS = {
    "known": PageOrigin(before=b"", start=0, tokens=np.array(PROMPTS[0], np.int32), chain=CHAIN_ANCHOR),
    "of an unknown chain": PageOrigin(before=b"", start=0, tokens=np.array(PROMPTS[0], np.int32)),
    "unknown": None,
}
DIGEST = STAMP_FIELDS - 1


@pytest.mark.parametrize("kind", list(ORIGINS))
def test_each_field_of_each_stamp_of_a_host_page_is_held_against_what_is_known_of_the_page(
    toy: Path, tmp_path: Path, kind: str
) -> None:
    """A lane that differs from the others is always seen; where all agree, as on a page of another prompt, by what is
    known of the tokens."""
    engine, origin = Stored(toy, tmp_path), ORIGINS[kind]
    engine.ask("a", PROMPTS[0])
    cache, check = engine.built.cache, engine.rank.host_check
    match = cache.match_prefix("", np.array(PROMPTS[0], np.int32), 24)
    cache.release(match.lease)
    (span,) = cache.tiers.quarantine.copies.behind(engine.part, int(match.pages[0]), 24)[0].spans
    assert check is not None
    assert check(engine.part, span.pages, origin, 0).all()
    begin = engine.host.page_bytes - 4 * 2 * STAMP_BYTES
    words = engine.host.data_PY[int(span.pages[1]), begin:].view(np.int64).reshape(4, 4, STAMP_FIELDS)
    for field in range(STAMP_FIELDS):
        for lanes in ([0], [1], [2], [3], [0, 1, 2, 3]):
            words[lanes, 2, field] ^= 1 << 9
            is_seen = len(lanes) == 1 or field == DIGEST or origin is not None
            assert check(engine.part, span.pages, origin, 0).tolist()[1] is not is_seen, (field, lanes)
            words[lanes, 2, field] ^= 1 << 9
    engine.built.close()
