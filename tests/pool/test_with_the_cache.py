"""The real cache over the real mover and real files: bytes of every page follow its prefix, wherever they come from."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from serinus.cache import CacheGeometry, PartPages, PrefetchState, PrefixCache, Tier
from serinus.core.clock import WallClock
from serinus.core.parts import Part
from serinus.kernels import load
from serinus.pool import DevicePool, HostPool, LayerGate, Mover, PoolSpec
from serinus.pool.storage import FileStorage

FULL, SWA = Part.FULL, Part.SWA
SIZE, WINDOW = 4, 9
LAYERS = {"full": (FULL, FULL), "both": (SWA, FULL, SWA), "sliding": (SWA, SWA)}
CLOCK = WallClock()


class Engine:
    """What an engine has below its scheduler, with requests that compute by writing what must be there."""

    def __init__(
        self, shape: str, folder: Path | None, *, policy: str = "write_through", pages: int = 25, host: int = 41
    ) -> None:
        layers = LAYERS[shape]
        parts = (FULL,) if shape == "full" else (FULL, SWA)
        base = PoolSpec(
            layer_count=1, kv_head_count=2, head_size=8, page_size=SIZE, page_count=pages, dtype=torch.float32
        )
        specs = {part: dataclasses.replace(base, layer_count=layers.count(part)) for part in parts}
        self.device = {part: DevicePool(spec, load("cpu")) for part, spec in specs.items()}
        self.host = {part: HostPool(spec, host) for part, spec in specs.items()}
        self.mover = Mover(self.device, self.host, layers, CLOCK)
        self.gate = LayerGate(self.mover)
        self.layers = layers
        self.storage = None
        if folder is not None:
            self.storage = FileStorage(folder, host=self.host, namespace=f"{shape} v1", byte_max=None, clock=CLOCK)
        swa = SWA in parts
        geometry = CacheGeometry(
            page_size=SIZE,
            full_pages=pages,
            swa_pages=pages if swa else 0,
            window=WINDOW if swa else None,
            host_full_pages=host,
            host_swa_pages=host if swa else 0,
        )
        self.cache = PrefixCache(
            geometry, write_policy=policy, mover=self.mover, storage=self.storage, namespace=f"{shape} v1"
        )
        self.parts = parts
        self.rng = np.random.default_rng(0)

    def content(self, part: Part, tokens: list[int], index: int) -> np.ndarray:
        """The bytes of page `index` of a sequence: they tell its part and everything up to its end."""
        seed = [int(part), *tokens[: (index + 1) * SIZE]]
        return np.frombuffer(np.random.default_rng(seed).bytes(self.device[part].page_bytes), np.uint8)

    def settle(self) -> None:
        """Until no copy and no file operation is under way."""
        end = CLOCK.now() + 60
        while self.cache.poll().in_flight:
            assert CLOCK.now() < end, "copies that never end"

    def serve(self, tokens: list[int], *, rid: str = "r", fetch: bool = False) -> int:
        """One request from match to finish; every page it was given is compared. Returns tokens found."""
        cache, ids = self.cache, np.array(tokens, np.int32)
        if fetch and cache.prefetch(rid, "", ids):
            while cache.prefetch_state(rid) in (PrefetchState.QUERY, PrefetchState.READ):
                self.settle()
        match = cache.match_prefix("", ids, len(ids) - 1)
        length, full, swa_first, swa = match.length, match.pages, match.swa_first, match.swa_pages
        if match.load is not None:
            loaded = cache.load_back(rid, match.lease, match.load)
            if loaded is not None:
                length = loaded.length
                full = np.concatenate((full[: loaded.first], loaded.pages))
                swa_first, swa = loaded.swa_first, loaded.swa_pages
        need = -(-len(ids) // SIZE) - len(full)
        own = cache.allocate(rid, need, need if SWA in self.parts else 0)
        assert own is not None, "no room"
        self.compare(tokens, full, swa_first, swa)
        rows = {FULL: np.concatenate((full, own.full)), SWA: np.concatenate((swa, own.swa))}
        for part in self.parts:
            first = len(full)
            data = np.stack([self.content(part, tokens, first + i) for i in range(need)])
            self.device[part].write_pages(own.full if part is FULL else own.swa, data)
        cache.finish(rid, match.lease, ids, PartPages(full=rows[FULL], swa=rows[SWA]), swa_first)
        cache.sanity_check()
        return length

    def compare(self, tokens: list[int], full: np.ndarray, swa_first: int, swa: np.ndarray) -> None:
        """A forward pass begins: behind the gate every page holds its own prefix."""
        self.gate.before(None)
        for layer in range(len(self.layers)):
            self.gate.before_layer(layer)
        self.gate.after(None)
        for i, data in enumerate(self.device[FULL].read_pages(full)):
            assert np.array_equal(data, self.content(FULL, tokens, i)), f"FULL page {i}"
        if SWA in self.parts:
            for i, data in enumerate(self.device[SWA].read_pages(swa)):
                assert np.array_equal(data, self.content(SWA, tokens, swa_first + i)), f"SWA page {swa_first + i}"

    def leave(self, tier: Tier) -> None:
        for part in self.parts:
            self.cache.evict(1 << 20, tier, part)
        self.cache.sanity_check()

    def close(self) -> None:
        self.settle()
        assert not self.cache.busy()
        self.mover.close()
        if self.storage is not None:
            self.storage.close()


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(length)]


@pytest.mark.parametrize("shape", list(LAYERS))
def test_a_prompt_is_found_on_the_device_on_the_host_in_files_and_after_a_restart(shape: str, tmp_path: Path) -> None:
    engine = Engine(shape, tmp_path)
    tokens = text(1, 50)
    assert engine.serve(tokens) == 0
    engine.settle()
    assert engine.serve(tokens) == 48
    engine.settle()
    engine.leave(Tier.DEVICE)
    assert engine.cache.probe("", np.array(tokens, np.int32)).device == 0
    assert engine.serve(tokens) == 48
    engine.settle()
    engine.leave(Tier.DEVICE)
    engine.leave(Tier.HOST)
    assert engine.cache.probe("", np.array(tokens, np.int32)).total == 0
    assert engine.serve(tokens, fetch=True) == 48
    engine.close()
    again = Engine(shape, tmp_path)
    assert again.serve(tokens, fetch=True) == 48
    again.settle()
    stats = again.cache.stats()
    assert stats.prefetched_tokens == stats.loaded_tokens == 48
    again.close()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("shape", list(LAYERS))
def test_requests_on_tiny_pools_never_see_a_byte_of_another_prefix(shape: str, policy: str, tmp_path: Path) -> None:
    rng = random.Random(f"{shape} {policy}")
    engine = Engine(shape, tmp_path, policy=policy, pages=21, host=31)
    trunks = [text(100 + i, 4 * rng.randrange(2, 9)) for i in range(8)]
    found = 0
    for index in range(80):
        tokens = rng.choice(trunks) + text(1000 + rng.randrange(12), rng.randrange(1, 20))
        found += engine.serve(tokens, rid=f"r{index}", fetch=rng.random() < 0.6)
        if rng.random() < 0.3:
            engine.settle()
        else:
            engine.cache.poll()
    engine.settle()
    stats = engine.cache.stats()
    assert found > 250
    assert stats.loaded_tokens > 0
    assert stats.prefetched_tokens > 0
    assert stats.evicted_pages > 0
    assert engine.cache.reset() > 0
    engine.cache.sanity_check()
    engine.close()
