"""The canary around real forward passes of the toy: silent while KV is sound, precise when it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from serinus.canary import CheckRows, CheckSettings, Violation
from serinus.canary.commands import RowPages, TellCounts
from serinus.canary.lanes import PartLanes
from serinus.core.errors import ConfigError, InvariantError
from serinus.core.parts import PageSpan, Part
from serinus.core.rng import Rng
from serinus.kernels import Reason, StampLane
from serinus.testing.direct import DirectEngine, DirectSeq
from tests.cells import diagonal

from .watched import PAGE, SHAPES, decode, started, sweep, watched

PROMPTS = [list(range(20, 43)), list(range(60, 75)), [5]]


def part_of(engine: DirectEngine) -> Part:
    """The part whose KV the tests damage: the sliding one where there is one."""
    return Part.SWA if Part.SWA in engine.pools else Part.FULL


def slot_at(engine: DirectEngine, seq: DirectSeq, position: int) -> int:
    slots = seq.swa_slots if part_of(engine) is Part.SWA else seq.slots
    assert slots is not None
    return int(slots[position])


def flip(engine: DirectEngine, slot: int, layer: int = 0, half: int = 0, byte: int = 0) -> None:
    pool = engine.pools[part_of(engine)].layers[layer][half]
    row = pool.view(len(pool), -1).view(torch.uint8)[slot]
    row[byte] ^= 0x5A


def found(violations: list[Violation]) -> set[tuple[str, str, int]]:
    return {(v.tag, str(v.reasons.name), v.slot) for v in violations}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "settings"),
    diagonal(SHAPES, [{}, {"stride": 4}, {"real_data": "partial"}, {"real_data": "none"}, {"entries_max": 8}]),
)
def test_a_sound_engine_is_never_accused(tmp_path: Path, shape: str, settings: dict[str, object]) -> None:
    engine = watched(tmp_path, shape, **settings)
    seqs = started(engine, PROMPTS)
    decode(engine, seqs, 30)
    assert engine.violations == []
    assert engine.canary is not None
    assert all(engine.canary.due_slots.values())
    assert "violations=0" in engine.canary.stats_line()


@pytest.mark.parametrize("shape", SHAPES)
def test_one_flipped_byte_is_reported_at_its_slot_and_nowhere_else(tmp_path: Path, shape: str) -> None:
    engine = watched(tmp_path, shape)
    seqs = started(engine, PROMPTS)
    decode(engine, seqs, 2)
    slot = slot_at(engine, seqs[0], seqs[0].done - 3)
    flip(engine, slot, half=1, byte=5)
    decode(engine, seqs, 1)
    part = part_of(engine).name
    assert found(engine.violations) == {(f"TAIL_V_{part}", "VERIFY_REAL_KV_HASH", slot)}
    violation = engine.violations[0]
    assert violation.rid == f"row{seqs[0].row}"
    assert violation.position == seqs[0].done - 1 - 3
    assert violation.page == slot // PAGE
    assert violation.line().startswith(
        f"kv_canary violation: launch_tag=TAIL_V_{part} fail_reason=verify_real_kv_hash slot_idx={slot} position="
    )
    assert (violation.owner, violation.users, violation.history) == ("", (), ""), "the leader adds these"


@pytest.fixture(params=[1, 3], ids=["turns of a page", "turns of three pages"])
def turns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of 64 positions have a turn of their own; of smaller ones several have it together."""
    monkeypatch.setattr("serinus.canary.lanes.turn_size", lambda page_size: page_size * request.param)


@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("shape", SHAPES)
def test_partial_digests_see_the_first_16_bytes_and_rotating_coverage_sees_all_within_its_turns(
    tmp_path: Path, shape: str
) -> None:
    engine = watched(tmp_path, shape, real_data="partial", stride=3)
    seqs = started(engine, PROMPTS)
    decode(engine, seqs, 4)
    slot = slot_at(engine, seqs[0], seqs[0].done - 2)
    flip(engine, slot, byte=15)
    decode(engine, seqs, 3)
    assert {v.slot for v in engine.violations} == {slot}


@pytest.mark.slow
@pytest.mark.usefixtures("turns")
def test_every_slot_of_a_window_has_its_turn_before_it_leaves(tmp_path: Path) -> None:
    for age in range(2, 9):
        engine = watched(tmp_path / str(age), "swa", stride=50)
        seqs = started(engine, PROMPTS[:1])
        decode(engine, seqs, age)
        slot = slot_at(engine, seqs[0], seqs[0].done - 1)
        flip(engine, slot)
        decode(engine, seqs, 10)
        assert {v.slot for v in engine.violations} == {slot}, f"damaged after {age} steps"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_that_names_another_slot_breaks_the_chain(tmp_path: Path, shape: str) -> None:
    engine = watched(tmp_path, shape, real_data="none")
    seqs = started(engine, PROMPTS)
    part = part_of(engine)
    wrong = seqs[0].done - 4
    engine.tables[part].table[seqs[0].row, wrong] = slot_at(engine, seqs[1], 3)
    decode(engine, seqs, 1)
    at_fault = [v for v in engine.violations if v.position == wrong]
    assert {v.tag for v in at_fault} == {f"{when}_{half}_{part.name}" for when in ("HEAD", "TAIL") for half in "KV"}
    assert all(v.reasons & (Reason.VERIFY_CHAIN_HASH | Reason.VERIFY_POSITION) for v in engine.violations)
    assert {v.rid for v in engine.violations} == {f"row{seqs[0].row}"}


@pytest.mark.parametrize("column", ["ref", "cpu"])
@pytest.mark.parametrize("wild", [0, -7, "end", 1 << 30])
@pytest.mark.parametrize("back", [2, 1])
def test_a_row_entry_that_names_no_slot_is_a_violation_of_its_request_alone(
    tmp_path: Path, column: str, wild: int | str, back: int
) -> None:
    """`back`: 1 is the last slot that is read."""
    engine = watched(tmp_path, "full", column=column)
    seqs = started(engine, PROMPTS)
    wrong = seqs[0].done - back
    engine.table.table[seqs[0].row, wrong] = engine.pool.spec.slot_count if wild == "end" else wild
    decode(engine, seqs, 1)
    assert {v.rid for v in engine.violations} == {f"row{seqs[0].row}"}
    at_fault = [v for v in engine.violations if v.position == wrong]
    assert {v.slot for v in at_fault} == {0}
    assert {v.tag for v in at_fault} == {f"{when}_{half}_FULL" for when in ("HEAD", "TAIL") for half in "KV"}


def test_the_sweep_finds_what_sleeps_in_the_cache(tmp_path: Path) -> None:
    engine = watched(tmp_path, "full", is_swept=True)
    seqs = started(engine, PROMPTS)
    asleep = seqs[0]
    cached = asleep.slots[:20].tolist(), list(range(20))
    sweep(engine, Part.FULL, *cached)
    decode(engine, seqs[1:], 1)
    assert engine.violations == []
    flip(engine, int(asleep.slots[7]))
    sweep(engine, Part.FULL, *cached)
    decode(engine, seqs[1:], 1)
    assert found(engine.violations) == {("SWEEP_K_FULL", "VERIFY_REAL_KV_HASH", int(asleep.slots[7]))}
    assert engine.canary is not None
    assert "sweep_passes=2 violations=1 launch_tags_active=6/6" in engine.canary.stats_line()


def test_the_sweep_finds_a_whole_page_of_another_prompt(tmp_path: Path) -> None:
    """KV and stamps agree with each other, and with the page behind them, as there is none: only the tree knows."""
    engine = watched(tmp_path, "full", is_swept=True)
    asleep, other, runs = started(engine, PROMPTS)
    slots, tokens = asleep.slots[:PAGE].tolist(), asleep.prompt[:PAGE].tolist()
    page, source = ([int(seq.slots[0]) // PAGE] for seq in (asleep, other))
    sweep(engine, Part.FULL, slots, list(range(PAGE)), tokens)
    engine.pool.write_pages(np.array(page), engine.pool.read_pages(np.array(source)))
    decode(engine, [runs], 1)
    assert engine.violations == []
    sweep(engine, Part.FULL, slots, list(range(PAGE)), tokens)
    decode(engine, [runs], 1)
    assert {each[:2] for each in found(engine.violations)} == {(f"SWEEP_{half}_FULL", "VERIFY_TOKEN") for half in "KV"}


def test_the_sweep_finds_a_page_of_the_same_tokens_behind_others(tmp_path: Path) -> None:
    """Only the hash of what lies before it tells."""
    engine = watched(tmp_path, "full", is_swept=True)
    alike = list(range(90, 90 + PAGE))
    asleep, other, runs = started(
        engine, [[*range(20, 20 + PAGE), *alike], [*range(40, 40 + PAGE), *alike], PROMPTS[0]]
    )
    slots, positions = asleep.slots[: 2 * PAGE].tolist(), list(range(2 * PAGE))
    page, source = ([int(seq.slots[PAGE]) // PAGE] for seq in (asleep, other))
    sweep(engine, Part.FULL, slots, positions, asleep.prompt)
    decode(engine, [runs], 1)
    assert engine.violations == []
    engine.pool.write_pages(np.array(page), engine.pool.read_pages(np.array(source)))
    sweep(engine, Part.FULL, slots, positions, asleep.prompt)
    decode(engine, [runs], 1)
    first = page[0] * PAGE
    assert found(engine.violations) == {(f"SWEEP_{half}_FULL", "VERIFY_CHAIN_HASH", first) for half in "KV"}


@pytest.mark.parametrize("shape", ["full", "both"])
def test_pages_that_arrive_are_held_against_the_requests_own_tokens(tmp_path: Path, shape: str) -> None:
    engine = watched(tmp_path, shape)
    canary = engine.canary
    assert canary is not None
    seq = started(engine, PROMPTS[:1])[0]
    length = len(seq.prompt)
    pages = (seq.slots[: length + PAGE - 1 : PAGE] // PAGE).astype(np.int32)[: -(-length // PAGE)]
    span = PageSpan(part=Part.FULL, first=0, pages=pages)

    def arrived(span: PageSpan, tokens: NDArray[np.int32]) -> list[Violation]:
        (answer,) = canary.obey(
            CheckRows(number=1, rows=(RowPages(rid="mine", spans=(span,), tokens=tokens),), is_arrival=True)
        )
        return list(answer.violations)

    assert arrived(span, seq.prompt) == []
    other = seq.prompt.copy()
    other[9] += 1
    accused = arrived(span, other)
    tags = [f"{when}_{half}_FULL" for when in ("HEAD", "TAIL") for half in "KV"]
    wrong = {("VERIFY_TOKEN", int(seq.slots[9])), ("VERIFY_CHAIN_HASH", int(seq.slots[length - 1]))}
    assert found(accused) == {(tag, *each) for tag in tags for each in wrong}, "the token, and the hash behind them all"
    assert {v.rid for v in accused} == {"mine"}
    late = PageSpan(part=Part.FULL, first=2, pages=pages[2:])
    assert arrived(late, seq.prompt) == []
    engine.pool.k[0][int(seq.slots[11])] += 1
    assert {v.slot for v in arrived(late, seq.prompt)} == {int(seq.slots[11])}


def test_a_token_that_the_oracle_did_not_emit_is_a_write_violation(tmp_path: Path) -> None:
    engine = watched(tmp_path, "full", real_data="none", token_oracle=True)
    seqs = started(engine, PROMPTS)
    decode(engine, seqs, 3)
    assert engine.violations == []
    right = seqs[1].output[-1]
    seqs[1].output[-1] = right + 1
    decode(engine, seqs, 1)
    assert {(v.tag, v.reasons, v.rid) for v in engine.violations} == {
        (f"HEAD_{half}_FULL", Reason.WRITE_TOKEN, f"row{seqs[1].row}") for half in "KV"
    }
    assert {(v.stored_token, v.expected_token) for v in engine.violations} == {(right + 1, right)}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_any_flipped_byte_of_a_live_page_is_found_there_alone(tmp_path: Path, shape: str) -> None:
    """200 random bytes of K and V, any layer, each undone before the next."""
    engine = watched(tmp_path, shape)
    seqs = started(engine, PROMPTS)
    decode(engine, seqs, 2)
    rng = Rng(7)
    pool = engine.pools[part_of(engine)]
    width = pool.layers[0][0][0].numel() * 2
    window = engine.model.spec.window or 1 << 30
    for _ in range(40):
        seq = seqs[rng.randrange(2)]
        position = rng.randrange(max(0, seq.done - window + 1), seq.done)
        slot, layer, half = slot_at(engine, seq, position), rng.randrange(len(pool.layers)), rng.randrange(2)
        byte = rng.randrange(width)
        flip(engine, slot, layer, half, byte)
        engine.violations.clear()
        decode(engine, seqs, 1)
        assert {(v.tag[5], v.slot) for v in engine.violations} == {("KV"[half], slot)}
        flip(engine, slot, layer, half, byte)


SKIPS = {
    "around forward passes": lambda ring, lane: lane is StampLane.HEAD_K,
    "in the sweep": lambda ring, lane: ring == "sweeping",
    "at arrival": lambda ring, lane: ring == "arriving" and lane is StampLane.HEAD_K,
}


@pytest.mark.parametrize("check", SKIPS)
def test_a_check_that_is_left_out_is_found_out(tmp_path: Path, check: str) -> None:
    engine = watched(tmp_path, "full", is_swept=True)
    canary = engine.canary
    assert canary is not None
    lanes = canary.parts[Part.FULL]
    hook, watch = canary.hook, lanes.watch
    verify, verify_now = watch.verify, hook.verify_now

    def skipped(lane: StampLane) -> None:
        if not (check == "around forward passes" and SKIPS[check]("running", lane)):
            verify(lane)

    def skipped_both(lane: StampLane) -> None:
        watch.verify(lane)
        watch.write(lane)

    def skipped_now(lanes: PartLanes, lane: StampLane, *more: Any) -> None:
        name = "sweeping" if more[2] is lanes.sweeping else "arriving"
        if check == "around forward passes" or not SKIPS[check](name, lane):
            verify_now(lanes, lane, *more)

    seqs = started(engine, PROMPTS)
    decode(engine, seqs, 2)
    sweep(engine, Part.FULL, seqs[0].slots[:8].tolist(), list(range(8)))
    decode(engine, seqs, 2)
    watch.verify, watch.verify_and_write, hook.verify_now = skipped, skipped_both, skipped_now  # type: ignore[method-assign]
    pages = (seqs[0].slots[:8:PAGE] // PAGE).astype(np.int32)
    span = PageSpan(part=Part.FULL, first=0, pages=pages)

    def all_checks() -> None:
        canary.obey(
            CheckRows(number=1, rows=(RowPages(rid="mine", spans=(span,), tokens=seqs[0].prompt[:8]),), is_arrival=True)
        )
        sweep(engine, Part.FULL, seqs[0].slots[:8].tolist(), list(range(8)))
        decode(engine, seqs, 2)

    with pytest.raises(InvariantError, match=f"slots to verify {check}, .* does not sing"):
        all_checks()


def test_where_a_check_finds_more_than_the_ring_holds_all_that_it_checked_is_named(tmp_path: Path) -> None:
    engine = watched(tmp_path, "full", is_swept=True, ring_rows=3)
    canary = engine.canary
    assert canary is not None
    seqs = started(engine, PROMPTS)
    decode(engine, seqs, 1)
    assert engine.violations == []
    for slot in range(5):
        flip(engine, int(seqs[0].slots[slot]))
    decode(engine, seqs, 1)
    rids = tuple(f"row{seq.row}" for seq in seqs)
    assert len(engine.violations) == 3
    (over,) = engine.overflows
    assert (over.check, over.lost, over.rids, over.part) == ("around forward passes", 2, rids, Part.FULL)
    sweep(engine, Part.FULL, seqs[0].slots[:8].tolist(), list(range(8)))
    *_, over = canary.obey(TellCounts(number=2))[0].overflows
    assert (over.check, over.lost, over.rids) == ("in the sweep", 2, ())
    pages = np.unique(seqs[0].slots[:8] // PAGE).astype(np.int32)
    assert over.pages.tolist() == pages.tolist()
    spans = (PageSpan(part=Part.FULL, first=0, pages=pages),)
    rows = tuple(RowPages(rid=rid, spans=spans, tokens=seqs[0].prompt[:8]) for rid in ("one", "two"))
    (answer,) = canary.obey(CheckRows(number=3, rows=rows))
    assert [(each.check, each.lost, each.rids) for each in answer.overflows] == [("at the end", 7, ("one", "two"))]
    assert {each.rid for each in answer.violations} == {"two"}, "the latest are kept"


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="real data is 'some'"):
        CheckSettings(page_size=4, real_data="some")
    with pytest.raises(ConfigError, match="stride is 0"):
        CheckSettings(page_size=4, stride=0)


@pytest.mark.parametrize("shape", ["full", "both"])
def test_the_line_of_statistics_counts_what_was_done(tmp_path: Path, shape: str) -> None:
    engine = watched(tmp_path, shape, is_swept=True)
    canary = engine.canary
    assert canary is not None
    halves = 2 if shape == "both" else 1
    assert canary.stats_line() == (
        f"[canary] step=0 protected_tokens=0 sweep_passes=0 violations=0 launch_tags_active=0/{6 * halves}"
    )
    (seq,) = started(engine, [list(range(20, 30))], chunk=10)
    decode(engine, [seq], 2)
    # The window of 10 sees 9 slots beside the new one; the last one is held against the request beside that.
    read = {Part.FULL: 10 + 11 + 2, Part.SWA: 9 + 9 + 2}
    protected = sum(read[part] for part in canary.parts)
    assert canary.stats_line() == (
        f"[canary] step=3 protected_tokens={protected} sweep_passes=0 violations=0"
        f" launch_tags_active={4 * halves}/{6 * halves}"
    )
    sweep(engine, Part.FULL, seq.slots[:4].tolist(), [0, 1, 2, 3])
    engine.pool.k[0][int(seq.slots[2])] += 1
    decode(engine, [seq], 1)
    words = dict(word.split("=") for word in canary.stats_line().split()[1:])
    assert words["sweep_passes"] == "1"
    assert words["violations"] == "1"
    assert words["launch_tags_active"] == f"{4 * halves + 2}/{6 * halves}"


def test_the_line_of_divergence_counts_slots_by_part(tmp_path: Path) -> None:
    engine = watched(tmp_path, "both")
    canary = engine.canary
    assert canary is not None
    (seq,) = started(engine, [list(range(20, 35))], chunk=15)
    assert canary.divergence_line() == "[canary] step=1 full_slots=0 swa_slots=0 difference=0"
    decode(engine, [seq], 2)
    full, swa = 15 + 16 + 2, 9 + 9 + 2  # the last slot of each step is held against the request, too
    assert canary.divergence_line() == (f"[canary] step=3 full_slots={full} swa_slots={swa} difference={full - swa}")
