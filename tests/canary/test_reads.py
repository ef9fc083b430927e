"""What the canary digests is what attention reads: a decoder whose attention digests, against the reference's watch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serinus.canary import CanaryRank, CheckSettings
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.kernels import AttentionBatch, Kernels, load
from serinus.models import Model, load_model, load_spec
from serinus.models.small_checkpoints import make_checkpoint
from serinus.testing.direct import DirectEngine, DirectSeq

PAGE = 4
WINDOW = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Three layers, the middle one with a window; 8/2 heads of 64."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("model"), "gemma3_text", hidden=64, layers=3, heads=8, kv_heads=2, head_size=64,
        vocab=256, context=256, dtype="bfloat16", tokenizer=False, sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    return load_model(load_spec(folder), folder, torch.bfloat16, load("cpu"))


class Moth:
    """A hook: KV of one layer is damaged only while that layer is computed."""

    def __init__(self) -> None:
        self.engine: DirectEngine | None = None
        self.damage: tuple[int, int, int, int] | None = None
        """Layer of the model, half, slot, byte."""

    def before(self, batch: object) -> None:
        """It comes with a layer."""

    def before_layer(self, layer_index: int) -> None:
        if self.damage is not None and layer_index in (self.damage[0], self.damage[0] + 1):
            assert self.engine is not None
            flip(self.engine, *self.damage)

    def writes(self, layer_index: int) -> None:
        """Nothing that is stored is digested for it."""

    def reads(self, layer_index: int, attention: AttentionBatch) -> None:
        """Nothing is digested for it."""

    def after(self, batch: object) -> None:
        """Its last layer is behind it."""


def flip(engine: DirectEngine, layer: int, half: int, slot: int, byte: int) -> None:
    part = engine.model.spec.layer_parts[layer]
    pool = engine.pools[part].layers[engine.model.spec.layers_of(part).index(layer)][half]
    pool.view(len(pool), -1).view(torch.uint8)[slot][byte] ^= 0x41


def engine_of(model: Model, column: str, moth: Moth | None = None, **settings: Any) -> DirectEngine:
    """An engine whose canary has the watch of that column."""

    def canary(engine: DirectEngine) -> CanaryRank:
        spec = model.spec
        checks = CheckSettings(page_size=PAGE, window=spec.window, real_data="all", **settings)
        layers = {part: spec.layers_of(part) for part in spec.parts}
        return CanaryRank(checks, engine.pools, engine.tables, layers, load("cpu", column))

    engine = DirectEngine(model, load("cpu"), page_size=PAGE, page_count=200, canary=canary, hook=moth)
    if moth is not None:
        moth.engine = engine
    return engine


def start(engine: DirectEngine, length: int, seed: int) -> DirectSeq:
    rng = Rng(seed)
    return engine.start([rng.randrange(5, 250) for _ in range(length)], SamplingParams(temperature=0.0), tokens=40)


def slot_of(engine: DirectEngine, seq: DirectSeq, layer: int, position: int) -> int:
    slots = seq.slots if engine.model.spec.layer_parts[layer].name == "FULL" else seq.swa_slots
    assert slots is not None
    return int(slots[position])


def story(model: Model, column: str, settings: dict[str, Any]) -> tuple[list[Any], int]:
    """Mixed steps (decoding, chunks, a chunk of one token without a sample) with a byte flipped now and then:
    violations, and how many slots were checked."""
    engine, rng = engine_of(model, column, **settings), Rng(5)
    seqs = [start(engine, length, seed) for seed, length in enumerate((50, 9, 31))]
    for seq in seqs:
        engine.step([(seq, 100)])
    late = start(engine, 40, 9)
    for turn in range(10):
        work = [(seq, 1) for seq in seqs]
        if turn in (2, 3, 6):
            work.insert(turn % 3, (late, (11, 1, 3)[turn % 3]))
        if turn % 2:
            seq, layer = rng.choice(seqs), rng.randrange(3)
            at = rng.randrange(max(0, seq.done - WINDOW + 2), seq.done)
            flip(engine, layer, rng.randrange(2), slot_of(engine, seq, layer, at), rng.randrange(2 * 64 * 2))
        engine.step(work)
    assert engine.canary is not None
    return sorted(map(repr, engine.violations)), engine.canary.checked_slots()


@pytest.mark.parametrize("settings", [{}, {"stride": 3}, {"entries_max": 24}], ids=["full", "rotating", "pieces"])
def test_what_attention_digests_is_what_the_reference_finds(model: Model, settings: dict[str, Any]) -> None:
    found, checked = story(model, "cpu", settings)
    assert len(found) > 3
    assert (found, checked) == story(model, "ref", settings)


@pytest.mark.parametrize("count", [1, 3])
def test_damage_that_only_attention_met_is_found_at_every_layer_half_and_head(model: Model, count: int) -> None:
    moth = Moth()
    engine = engine_of(model, "cpu", moth)
    seqs = [start(engine, 30 + seed, seed) for seed in range(count)]
    for seq in seqs:
        engine.step([(seq, 100)])
    for layer in range(2):  # behind the last layer the moth has nowhere to leave
        for half in range(2):
            for head in range(2):
                slot = slot_of(engine, seqs[0], layer, seqs[0].done - 3 - head)
                moth.damage = (layer, half, slot, head * 128 + 37)
                engine.step([(seq, 1) for seq in seqs])
                assert [(v.tag.split("_")[1], v.slot) for v in engine.violations] == [("KV"[half], slot)]
                engine.violations.clear()
    moth.damage = None
    engine.step([(seq, 1) for seq in seqs])
    assert engine.violations == []


class Breaker(Moth):
    """A hook that lets attention of layer 1 meet a slot that is not there: it ends in the middle."""

    def before_layer(self, layer_index: int) -> None:
        if layer_index == 1 and self.damage is not None:
            assert self.engine is not None
            _, _, row, position = self.damage
            self.engine.tables[self.engine.model.spec.layer_parts[1]].table[row, position] = 1 << 20


def test_a_pass_that_broke_off_in_attention_accuses_no_sound_page(model: Model) -> None:
    moth = Breaker()
    engine = engine_of(model, "cpu", moth)
    seqs = [start(engine, 30, seed) for seed in range(3)]
    for seq in seqs:
        engine.step([(seq, 100)])
    moth.damage = (1, 0, seqs[1].row, seqs[1].done - 2)
    with pytest.raises(ValueError, match="holds a slot out of"):
        engine.step([(seq, 1) for seq in seqs])
    assert engine.canary is not None
    engine.canary.abandoned()
    assert engine.canary.found() == ()


def test_a_model_on_another_column_than_the_canary_digests_nothing_for_it(model: Model) -> None:
    assert load("cpu").digests_reads
    kernels: Kernels
    for kernels in (load("cpu", "ref"), load("cuda")):
        assert not kernels.digests_reads
