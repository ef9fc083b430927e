"""Stamps that are right by themselves, on pages of another request, are found before a token leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from serinus.core.parts import Part
from serinus.kernels import Reason
from serinus.models import NullHook
from serinus.testing.direct import DirectEngine, DirectSeq

from .watched import PAGE, SHAPES, decode, started, watched

A, B = list(range(20, 43)), list(range(60, 83))


def exchange(engine: DirectEngine, one: DirectSeq, other: DirectSeq, first: int = 0) -> None:
    """All pages of two sequences from that page on, KV and stamps, as a mover would that mistook them."""
    for part, pool in engine.pools.items():
        slots = [seq.slots if part is Part.FULL else seq.swa_slots for seq in (one, other)]
        mine, theirs = (torch.from_numpy(each[first * PAGE : one.done + PAGE]) for each in slots if each is not None)
        if pool.stamps_LS4 is None:
            continue  # no layer is of this part
        for lane in (*(half for pair in pool.layers for half in pair), *pool.stamps_LS4):
            kept = lane[mine].clone()
            lane[mine] = lane[theirs]
            lane[theirs] = kept


def parts_of(engine: DirectEngine) -> list[str]:
    """Those that have layers."""
    assert engine.canary is not None
    return [part.name for part in engine.canary.parts]


def told(engine: DirectEngine) -> set[tuple[str, str, str]]:
    """Request, check and reason of each violation."""
    return {(v.rid, v.tag, str(v.reasons.name)) for v in engine.violations}


@pytest.mark.parametrize("settings", [{}, {"stride": 16}], ids=["full", "rotating"])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_pages_of_two_requests_exchanged_are_found_in_the_very_step(
    tmp_path: Path, shape: str, settings: dict[str, int]
) -> None:
    engine = watched(tmp_path, shape, **settings)
    seqs = started(engine, [A, B])
    decode(engine, seqs, 3)
    assert engine.violations == []
    exchange(engine, *seqs)
    decode(engine, seqs, 1)
    tags = {f"{when}_{half}_{part}" for when in ("HEAD", "TAIL") for half in "KV" for part in parts_of(engine)}
    wrong = {(v.rid, v.tag) for v in engine.violations if Reason.VERIFY_CHAIN_HASH in v.reasons}
    assert wrong == {(f"row{seq.row}", tag) for seq in seqs for tag in tags}
    if "stride" not in settings and shape == "full":
        assert {v.reasons for v in engine.violations} == {Reason.VERIFY_CHAIN_HASH}, "stamps agree with each other"
    assert all(v.position == seqs[0].done - 2 for v in engine.violations)
    hashes = [{v.expected_hash for v in engine.violations}, {v.stored_hash for v in engine.violations}]
    assert hashes[0] == hashes[1], "each has what the other should have"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_that_names_all_slots_of_another_request_is_found(tmp_path: Path, shape: str) -> None:
    engine = watched(tmp_path, shape, stride=16)
    seqs = started(engine, [A, B])
    decode(engine, seqs, 3)
    for part, table in engine.tables.items():
        slots = seqs[1].slots if part is Part.FULL else seqs[1].swa_slots
        assert slots is not None
        table.table[seqs[0].row, : seqs[0].done] = torch.from_numpy(slots[: seqs[0].done].astype(np.int32))
    decode(engine, seqs[:1], 1)
    tags = {f"{when}_{half}_{part}" for when in ("HEAD", "TAIL") for half in "KV" for part in parts_of(engine)}
    assert {(f"row{seqs[0].row}", tag, "VERIFY_CHAIN_HASH") for tag in tags} <= told(engine)


def test_a_prompt_chunk_after_one_page_of_another_prompt_is_found(tmp_path: Path) -> None:
    """A prefix hit of one page: the page is another prompt's."""
    engine = watched(tmp_path, "full", stride=16)
    (theirs,) = started(engine, [B[:PAGE] + B])
    mine = started(engine, [A], chunk=PAGE)[0]
    late = engine.start(A, mine.params, tokens=8)
    late.slots[:PAGE] = theirs.slots[:PAGE]
    late.done = PAGE
    engine.rewrite(late)
    engine.step([(late, 100)])
    assert {(v.position, str(v.reasons.name)) for v in engine.violations} == {(PAGE - 1, "VERIFY_CHAIN_HASH")}
    engine.violations.clear()
    sound = engine.start(A, mine.params, tokens=8)
    sound.slots[:PAGE] = mine.slots[:PAGE]
    sound.done = PAGE
    engine.rewrite(sound)
    engine.step([(sound, 100)])
    assert engine.violations == []


class Rewriter(NullHook):
    """A hook that damages an entry of a row in the middle of a pass."""

    def can_replay(self, room: int) -> bool:
        return False  # it acts between layers

    def __init__(self) -> None:
        self.table: torch.Tensor | None = None
        self.entry: tuple[int, int, int] | None = None

    def before(self, batch: object) -> None:
        """It comes with a layer."""

    def before_layer(self, layer_index: int) -> None:
        if layer_index == 1 and self.entry is not None and self.table is not None:
            row, position, slot = self.entry
            self.table[row, position], self.entry = slot, None

    def reads(self, layer_index: int, attention: object) -> None:
        """Nothing is digested for it."""

    def writes(self, layer_index: int) -> None:
        """Nothing is stored for it."""

    def after(self, batch: object) -> None:
        """Its layer is behind it."""


@pytest.mark.parametrize("behind", [0, 1, 9], ids=["of_the_new_token", "of_the_last", "of_an_older"])
@pytest.mark.parametrize("chunk", [1, 8], ids=["decode", "prompt"])
def test_an_entry_that_changes_during_the_pass_is_found_in_it(tmp_path: Path, chunk: int, behind: int) -> None:
    hook = Rewriter()
    engine = watched(tmp_path, "full", hook=hook)
    (theirs,) = started(engine, [B])
    mine = engine.start(A, theirs.params, tokens=20)
    engine.step([(mine, len(A) if chunk == 1 else 14)])
    hook.table = engine.table.table
    hook.entry = (mine.row, mine.done - behind, int(theirs.slots[mine.done - behind]))
    engine.step([(mine, chunk)])
    assert {v.rid for v in engine.violations} == {f"row{mine.row}"}


@pytest.mark.parametrize("column", ["cpu", "ref"])
@pytest.mark.parametrize("shape", ["full", "swa"])
def test_an_entry_that_changes_and_changes_back_between_its_turns_is_found(
    tmp_path: Path, shape: str, column: str
) -> None:
    """With rotating:16 most pages are not due in a step; their entries are held against the leader's all the same."""
    engine = watched(tmp_path, shape, column=column, stride=16)
    assert engine.canary is not None
    (lanes,) = engine.canary.parts.values()
    seqs = started(engine, [A, B])
    reads = range(0 if lanes.part is Part.FULL else seqs[0].done - 5, seqs[0].done, 2)
    tags = {f"{when}_{half}_{lanes.part.name}" for when in ("HEAD", "TAIL") for half in "KV"}
    for position in reads:
        sound = int(lanes.table_RC[seqs[0].row, position])
        lanes.table_RC[seqs[0].row, position] = lanes.table_RC[seqs[1].row, position]
        decode(engine, seqs, 1)
        lanes.table_RC[seqs[0].row, position] = sound
        assert {(f"row{seqs[0].row}", tag, "VERIFY_CHAIN_HASH") for tag in tags} <= told(engine), f"at {position}"
        assert {(v.rid, v.position - position) for v in engine.violations} <= {
            (f"row{seqs[0].row}", behind) for behind in (0, 1)
        }
        engine.violations.clear()
        decode(engine, seqs, 1)
        assert engine.violations == [], "it is right again"


@pytest.mark.parametrize("column", ["cpu", "ref"])
def test_a_fault_in_the_rows_that_are_kept_beside_is_a_violation_and_no_crash(tmp_path: Path, column: str) -> None:
    engine = watched(tmp_path, "full", column=column, stride=16)
    assert engine.canary is not None
    (lanes,) = engine.canary.parts.values()
    seqs = started(engine, [A, B])
    for wrong in (0, -7, 1 << 30, int(seqs[1].slots[3]), int(seqs[0].slots[3]) + (1 << 16)):
        kept = int(lanes.written.table[seqs[0].row, 3])
        lanes.written.table[seqs[0].row, 3] = wrong
        decode(engine, seqs, 1)
        assert {(v.rid, v.position, v.slot) for v in engine.violations} == {(f"row{seqs[0].row}", 3, seqs[0].slots[3])}
        lanes.written.table[seqs[0].row, 3] = kept
        engine.violations.clear()
        decode(engine, seqs, 1)
        assert engine.violations == []
