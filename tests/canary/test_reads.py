"""What the canary digests is what attention reads: a decoder whose attention digests, against the reference's watch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from serinus.canary import CanaryRank, CheckSettings
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.kernels import AttentionBatch, load
from serinus.models import Model, NullHook, load_model, load_spec
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


class Moth(NullHook):
    """A hook: KV of one layer is damaged only while that layer is computed."""

    at_once = False
    """Whether all layers are told at once what they digest: in fp32, where it still acts between them."""

    def can_replay(self, room: int) -> bool:
        return self.at_once

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


def on_ref(model: Model) -> Model:
    """The same on the reference's kernels, which serve every device that has none of its own."""
    folder = model.spec.path
    return load_model(load_spec(folder), folder, torch.bfloat16, load("cpu", "ref"))


def engine_of(model: Model, column: str, moth: Moth | None = None, **settings: Any) -> DirectEngine:
    """An engine whose canary has the watch of that column."""

    def canary(engine: DirectEngine) -> CanaryRank:
        spec = model.spec
        checks = CheckSettings(page_size=PAGE, window=spec.window, **{"real_data": "all", **settings})
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
        if turn in (2, 3, 6, 7):
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


def fp32(model: Model) -> Model:
    folder = model.spec.path
    return load_model(load_spec(folder), folder, torch.float32, load("cpu"))


@pytest.mark.parametrize("column", ["cpu", "ref", "fp32", "fp32 at once"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("query", [1, 5, 20], ids=["decode", "few", "chunk"])
def test_damage_that_only_attention_met_is_found_at_every_layer_half_and_head(
    model: Model, column: str, count: int, query: int
) -> None:
    """It comes when its layer begins and is gone when the next one does: nothing but attention could have seen it."""
    moth = Moth()
    moth.at_once = column == "fp32 at once"
    model = fp32(model) if "fp32" in column else on_ref(model) if column == "ref" else model
    engine = engine_of(model, "cpu", moth)
    for layer in range(2):  # behind the last layer the moth has nowhere to leave
        for half in range(2):
            for head in range(2):
                seqs = [start(engine, 60, seed) for seed in range(count)]
                for seq in seqs:
                    engine.step([(seq, 30 if query > 1 else 60)])
                slot = slot_of(engine, seqs[0], layer, seqs[0].done - 3 - head)
                moth.damage = (layer, half, slot, (head * 64 + 18) * model.dtype.itemsize + 1)
                engine.step([(seq, query) for seq in seqs])
                assert [(v.tag.split("_")[1], v.slot) for v in engine.violations] == [("KV"[half], slot)]
                engine.violations.clear()
                moth.damage = None
                engine.step([(seq, query) for seq in seqs])
                assert engine.violations == []
                for seq in seqs:
                    engine.finish(seq)


@pytest.mark.parametrize("query", [1, 5, 20], ids=["decode", "few", "chunk"])
def test_damage_in_the_first_bytes_is_met_too_where_only_they_are_digested(model: Model, query: int) -> None:
    moth = Moth()
    engine = engine_of(model, "cpu", moth, real_data="partial")
    seq = start(engine, 60, 1)
    engine.step([(seq, 30 if query > 1 else 60)])
    moth.damage = (1, 1, slot_of(engine, seq, 1, seq.done - 5), 13)
    engine.step([(seq, query)])
    assert [(v.tag, v.slot) for v in engine.violations] == [("TAIL_V_SWA", moth.damage[2])]


def test_what_attention_of_the_last_sliding_layer_does_not_read_is_no_false_alarm(tmp_path: Path) -> None:
    """Of a chunk that ends a prompt the last layer computes the last token alone. The window of that begins later."""
    folder = make_checkpoint(
        tmp_path, "mistral", hidden=64, layers=2, heads=4, kv_heads=2, head_size=64, vocab=256, context=128,
        dtype="bfloat16", tokenizer=False, sliding_window=WINDOW,
    )  # fmt: skip
    for column in ("cpu", "ref"):
        model = load_model(load_spec(folder), folder, torch.bfloat16, load("cpu", column))
        engine = engine_of(model, "cpu")
        seq = start(engine, 60, 1)
        engine.step([(seq, 30)])
        engine.step([(seq, 25)])
        engine.step([(seq, 5)])
        engine.step([(seq, 1)])
        assert engine.violations == []


class WildRow(Moth):
    """A hook that lets attention of layer 1 meet an entry that names no slot; `undone`: it is right again after it."""

    undone = False

    def before_layer(self, layer_index: int) -> None:
        if layer_index not in (1, 2) or self.damage is None:
            return
        assert self.engine is not None
        _, _, row, position = self.damage
        table = self.engine.tables[self.engine.model.spec.layer_parts[1]].table
        if layer_index == 1:
            self.was = int(table[row, position])
            table[row, position] = 1 << 20
        elif self.undone:
            table[row, position] = self.was


@pytest.mark.parametrize("undone", [False, True])
@pytest.mark.parametrize("query", [1, 30])
def test_an_entry_that_names_no_slot_while_attention_reads_it_is_a_violation(
    model: Model, undone: bool, query: int
) -> None:
    moth = WildRow()
    moth.undone = undone
    engine = engine_of(model, "cpu", moth)
    seqs = [start(engine, 60, seed) for seed in range(3)]
    for seq in seqs:
        engine.step([(seq, 30)])
    moth.damage = (1, 0, seqs[1].row, seqs[1].done - 2)
    engine.step([(seq, query) for seq in seqs])
    assert {violation.rid for violation in engine.violations} == {f"row{seqs[1].row}"}


class Breaker(Moth):
    """A hook that breaks a pass off, when attention of two layers has digested what it read."""

    def before_layer(self, layer_index: int) -> None:
        if layer_index == 2 and self.damage is not None:
            raise ValueError("a pass that broke off")


@pytest.mark.parametrize("at_once", [False, True])
def test_a_pass_that_broke_off_accuses_no_sound_page(model: Model, at_once: bool) -> None:
    moth = Breaker()
    moth.at_once = at_once
    engine = engine_of(fp32(model) if at_once else model, "cpu", moth)
    seqs = [start(engine, 30, seed) for seed in range(3)]
    for seq in seqs:
        engine.step([(seq, 100)])
    moth.damage = (1, 0, seqs[1].row, seqs[1].done - 2)
    with pytest.raises(ValueError, match="broke off"):
        engine.step([(seq, 1) for seq in seqs])
    assert engine.canary is not None
    engine.canary.abandoned()
    assert engine.canary.found() == ()
