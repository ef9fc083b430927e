"""TAIL vouches for the rows that a step computed, not for what lies in the pool at its end: every byte that changes
between the store of its layer and the stamp is found in that very step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serinus.kernels import Reason
from serinus.models import Model

from .test_reads import Moth, engine_of, flip, model, slot_of, start
from .watched import SHAPES, started, watched

__all__ = ["model"]  # the fixture


class Stray(Moth):
    """A hook: a byte of a row that this very pass stores changes once its layer is through, and stays changed."""

    def before_layer(self, layer_index: int) -> None:
        if self.damage is not None and layer_index == self.damage[0] + 1:
            self.strike()

    def strike(self) -> None:
        assert self.engine is not None
        assert self.damage is not None
        flip(self.engine, *self.damage)
        self.damage = None


@pytest.mark.parametrize("column", ["cpu", "ref"])
@pytest.mark.parametrize("count", [1, 3, 30])
def test_a_byte_that_changes_after_its_layer_is_found_in_this_very_step(model: Model, column: str, count: int) -> None:
    """Of decoding requests and of chunks, at every layer, half and head."""
    stray = Stray()
    engine = engine_of(model, column, stray, stride=16)
    assert engine.canary is not None
    after = engine.canary.hook.after

    def struck_after(batch: Any) -> None:
        if stray.damage is not None:
            stray.strike()  # of the last layer: behind it there is only the end of the pass
        after(batch)

    engine.canary.hook.after = struck_after  # type: ignore[method-assign]
    for layer in range(3):
        for half in range(2):
            seq = start(engine, 40, 7 * layer + half)
            engine.step([(seq, 9 if count > 1 else 40)])
            slot = slot_of(engine, seq, layer, seq.done + count - 1)
            stray.damage = (layer, half, slot, half * 128 + 37)
            engine.step([(seq, count)])
            part = engine.model.spec.layer_parts[layer].name
            assert [(v.tag, v.slot, v.reasons, v.rid) for v in engine.violations] == [
                (f"TAIL_{'KV'[half]}_{part}", slot, Reason.VERIFY_REAL_KV_HASH, f"row{seq.row}")
            ]
            engine.violations.clear()
            engine.finish(seq)


@pytest.mark.parametrize("real_data", ["all", "partial"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_stored_is_counted_as_due_and_as_read_back(tmp_path: Path, shape: str, real_data: str) -> None:
    engine = watched(tmp_path, shape, real_data=real_data)
    (seq,) = started(engine, [list(range(20, 40))], chunk=7)
    engine.step([(seq, 1)])
    assert engine.canary is not None
    assert engine.violations == []
    for lanes in engine.canary.parts.values():
        assert lanes.stored.due == 21
        assert lanes.stored.checked_L.tolist() == [0, 0, 21, 21]


def test_a_pass_that_broke_off_owes_no_reading_back(tmp_path: Path) -> None:
    engine = watched(tmp_path, "both")
    (seq,) = started(engine, [list(range(20, 40))])
    canary = engine.canary
    assert canary is not None
    for method in ("before", "before_layer", "after"):  # before the canary began, within the pass, at its end

        def broken(*_: object) -> None:
            raise RuntimeError("broken off")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(canary.hook, method, broken)
            with pytest.raises(RuntimeError, match="broken off"):
                engine.step([(seq, 1)])
        canary.abandoned()
        assert canary.found() == ()
        for lanes in canary.parts.values():
            assert lanes.running.due == lanes.running.checked_L[0] == lanes.running.checked_L[2]
            assert lanes.stored.due == lanes.stored.checked_L[2]
