"""The real cache over the real mover and real files: bytes of every page follow its prefix, wherever they come from."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from serinus.cache import CacheGeometry, PartGeometry, PrefetchState, PrefixCache, Tier
from serinus.core.clock import WallClock
from serinus.core.parts import PageSpan, Part
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
        windows = {SWA: WINDOW}
        shapes = {part: PartGeometry(pages=pages, host_pages=host, window=windows.get(part)) for part in parts}
        geometry = CacheGeometry(page_size=SIZE, parts=shapes)
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
        length, rows = match.length, {span.part: span for span in match.spans}
        if match.load is not None:
            loaded = cache.load_back(rid, match.lease, match.load)
            if loaded is not None:
                length = loaded.length
                rows = {span.part: span for span in loaded.spans}
                rows[FULL] = PageSpan(part=FULL, first=0, pages=np.concatenate((match.pages, loaded.pages)))
        first = rows[FULL].end
        need = -(-len(ids) // SIZE) - first
        own = cache.allocate(rid, *[need] * len(rows))
        assert own is not None, "no room"
        self.compare(tokens, rows)
        for span, pages in zip(list(rows.values()), own, strict=True):
            data = np.stack([self.content(span.part, tokens, first + i) for i in range(need)])
            self.device[span.part].write_pages(pages, data)
            whole = np.concatenate((span.pages, pages))
            rows[span.part] = PageSpan(part=span.part, first=span.first, pages=whole)
        cache.finish(rid, match.lease, ids, tuple(rows.values()))
        cache.sanity_check()
        return length

    def compare(self, tokens: list[int], rows: dict[Part, PageSpan]) -> None:
        """A forward pass begins: behind the gate every page holds its own prefix."""
        self.gate.before(None)
        for layer in range(len(self.layers)):
            self.gate.before_layer(layer)
        self.gate.after(None)
        for part, span in rows.items():
            for i, data in enumerate(self.device[part].read_pages(span.pages), span.first):
                assert np.array_equal(data, self.content(part, tokens, i)), f"{part.name} page {i}"

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
@pytest.mark.parametrize(
    "policy",
    [
        "write_back",
        pytest.param("write_through", marks=pytest.mark.proof),
        pytest.param("write_through_selective", marks=pytest.mark.proof),
    ],
)
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
