"""The detector matrix and the commands that show it: a perfect canary gets 0, one that misses something gets 1."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serinus.canary.perturb import MODES
from serinus.cli.canary import _subjects
from serinus.cli.canary_show import canary_lines, story_lines
from serinus.cli.main import main
from serinus.core.parts import Part
from serinus.models.small_checkpoints import make_checkpoint
from serinus.selftest import (
    CANARY_SHAPES,
    CLEAN,
    OVERFLOW,
    RANK_WEAKNESSES,
    WEAKNESSES,
    CanaryPDFixture,
    Subject,
    Weakness,
    grade,
    make_canary_toy,
    plan_matrix,
    run_cell,
)
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import front_settings, running_front
from serinus.testing.small_tokenizers import make_byte_tokenizer


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """The commands make these rooms quiet."""
    rooms = [logging.getLogger(f"serinus.{name}") for name in ("canary", "engine")]
    levels = [room.level for room in rooms]
    yield
    for room, level in zip(rooms, levels, strict=True):
        room.setLevel(level)


def subject(folder: Path, shape: str, **settings: Any) -> Subject:
    return Subject(name=shape, checkpoint=make_canary_toy(folder / shape, shape), settings=settings)


@pytest.mark.parametrize("shape", CANARY_SHAPES)
def test_every_fault_has_a_cell_in_every_part_it_can_damage(tmp_path: Path, shape: str) -> None:
    cells = plan_matrix(subject(tmp_path, shape))
    parts = {"full": [Part.FULL], "swa": [Part.SWA], "both": [Part.FULL, Part.SWA], "latent": [Part.LATENT]}[shape]
    wanted = {(name, part.name if mode.has_part else "tokens") for name, mode in MODES.items() for part in parts}
    over = {(OVERFLOW, "all")} if parts != [Part.SWA] else set()
    assert {(cell.mode, cell.part) for cell in cells} == wanted | {(CLEAN, "all")} | over
    finders = {cell.mode for cell in cells if cell.finder == "prefill"}
    assert finders >= {"req_to_token", "real_kv_used", "real_kv_unused_cache"}
    assert not any(cell.perfect for cell in cells)  # nothing is perfect that was not run


@pytest.mark.proof
@pytest.mark.parametrize(("shape", "kind"), [("both", "fp8_e4m3"), ("full", "fp8_e5m2"), ("latent", "fp8_e4m3")])
def test_a_canary_over_kv_of_one_byte_has_a_perfect_matrix(tmp_path: Path, shape: str, kind: str) -> None:
    model = subject(tmp_path, shape, kv_cache_dtype=kind)
    for cell in plan_matrix(model):
        assert run_cell(cell, model, faults=2, seed=6).perfect, cell


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3"])
def test_a_real_model_with_kv_in_fp8_has_no_false_alarm_and_no_fault_unseen(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path / "model", family, layers=2, vocab=320, tokenizer=False)
    model = Subject(
        name=family, checkpoint=path, settings={"dtype": "bfloat16", "kv_cache_dtype": "fp8", "page_size": 4}
    )  # fmt: skip
    cells = [cell for cell in plan_matrix(model) if cell.mode in (CLEAN, "real_kv_used", "real_kv_post_forward")]
    assert len(cells) > 4
    for cell in cells:
        assert run_cell(cell, model, faults=1, seed=5).perfect, cell


@pytest.mark.proof
@pytest.mark.parametrize("shape", ["full", "both", "latent"])
def test_a_sound_canary_has_a_perfect_matrix(tmp_path: Path, shape: str) -> None:
    model = subject(tmp_path, shape, kv_canary_real_data="partial")
    for cell in plan_matrix(model):
        assert run_cell(cell, model, faults=2, seed=5).perfect, cell


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_more_violations_than_a_ring_holds_are_all_counted_also_with_a_step_queued_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    monkeypatch.setattr("serinus.engine.planning.overlaps", lambda parts: ahead)
    model = subject(tmp_path, "full", kv_canary_real_data="partial")
    (cell,) = [cell for cell in plan_matrix(model) if cell.mode == OVERFLOW]
    found = run_cell(cell, model, faults=1, seed=5)
    assert found.perfect, found


@pytest.mark.proof
@pytest.mark.parametrize(("shape", "tp", "pp"), [("full", 2, 1), ("both", 1, 2), ("latent", 2, 1)])
def test_every_rank_of_an_engine_finds_the_faults_that_are_planted_in_it(
    tmp_path: Path, shape: str, tp: int, pp: int
) -> None:
    model = subject(tmp_path, shape, tp_size=tp, pp_size=pp)
    cells = [run_cell(cell, model, faults=1, seed=5) for cell in plan_matrix(model)]
    for cell in cells:
        assert cell.perfect, cell
        assert cell.hit == cell.places or cell.mode == "tier_bytes", cell
    names = {"TP0 PP0", "TP1 PP0" if tp == 2 else "TP0 PP1"}
    hit = {mode: {name for cell in cells if cell.mode == mode for name in cell.ranks_hit} for mode in MODES}
    for mode in ("req_to_token", "real_kv_used", "tier_bytes"):
        assert hit[mode] == names
    assert hit["transfer_bytes"] == ({"TP0 PP0"} if shape == "latent" else names), "one slice sends latent rows"


@pytest.mark.proof
@pytest.mark.parametrize("weak", RANK_WEAKNESSES, ids=lambda weak: weak.name)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_each_weakness_of_the_canary_of_one_rank_turns_the_self_test_red(
    tmp_path: Path, weak: Weakness, tp: int, pp: int
) -> None:
    toy = make_canary_toy(tmp_path / "toy", "full")
    ranked = {"tp_size": tp, "pp_size": pp}
    model = Subject(name="ranks", checkpoint=toy, settings=ranked, modes=("real_kv_used",), sides=("decode",))
    assert "real_kv_used full in decode" in grade([model], weak).seen_by, f"the self-test is blind: {weak.name}"


@pytest.mark.slow
def test_a_fault_is_found_by_the_rank_that_has_it(tmp_path: Path) -> None:
    toy = make_canary_toy(tmp_path / "toy", "full")
    model = Subject(name="ranks", checkpoint=toy, settings={"tp_size": 2}, modes=("real_kv_used",), sides=("decode",))
    cell = next(cell for cell in plan_matrix(model) if cell.mode == "real_kv_used")
    assert (cell.ranks, cell.places) == (["TP0 PP0", "TP1 PP0"], 3 * 2 * 2), "each has one head"
    assert run_cell(cell, model, faults=1).perfect, cell
    assert (cell.hit, sorted(cell.ranks_hit)) == (12, ["TP0 PP0", "TP1 PP0"])
    cell.ranks_hit.remove("TP1 PP0")
    assert not cell.perfect, "a rank that was not damaged proves nothing"


def test_places_are_those_of_the_ranks_that_hold_the_part(tmp_path: Path) -> None:
    staged = {
        cell.part: cell for cell in plan_matrix(subject(tmp_path, "both", pp_size=2)) if cell.mode == "real_kv_used"
    }
    assert staged["FULL"].ranks == ["TP0 PP0"], "the second stage has the last layer, which slides"
    assert staged["SWA"].ranks == ["TP0 PP0", "TP0 PP1"]
    partial = plan_matrix(subject(tmp_path, "full", tp_size=2, kv_canary_real_data="partial"))
    by_mode = {cell.mode: cell for cell in partial}
    assert by_mode["real_kv_used"].ranks == ["TP0 PP0"], "only head 0 is digested"
    assert by_mode["req_to_token"].ranks == ["TP0 PP0", "TP1 PP0"]


@pytest.mark.parametrize(("tp", "pp", "shapes"), [(1, 4, 4), (2, 1, 4), (4, 1, 4), (3, 1, 3)])
def test_the_toys_can_be_divided_among_the_ranks_that_are_asked_for(
    tmp_path: Path, tp: int, pp: int, shapes: int
) -> None:
    """The latent one, of 4 query heads, is left out where they cannot be shared."""
    given = Namespace(
        tp_size=tp, pp_size=pp, model=None, page_size=4, kv_canary_real_data="all", kv_canary_coverage="full",
        device="cpu", dtype="auto", kv_cache_dtype="auto",
    )  # fmt: skip
    subjects = _subjects(given, tmp_path)
    assert [len(plan_matrix(each)) > 3 for each in subjects] == [True] * (shapes + 1), "and the first one in turns"


def test_of_latent_rows_those_of_the_slice_that_sends_them_are_damaged_on_their_way(tmp_path: Path) -> None:
    ranks = {(cell.mode, cell.side): cell.ranks for cell in plan_matrix(subject(tmp_path, "latent", tp_size=2))}
    assert ranks["transfer_bytes", "prefill"] == ranks["real_kv_post_forward", "prefill"] == ["TP0 PP0"]
    assert ranks["real_kv_post_forward", "decode"] == ranks["tier_bytes", "prefill"] == ["TP0 PP0", "TP1 PP0"]


IN_TURNS = ("req_to_token", "real_kv_used", "tier_bytes")


@pytest.mark.proof
def test_a_sound_canary_that_checks_in_turns_has_a_perfect_matrix(tmp_path: Path) -> None:
    toy = make_canary_toy(tmp_path / "toy", "full")
    turns = {"kv_canary_coverage": "rotating:3"}
    model = Subject(name="turns", checkpoint=toy, settings=turns, modes=IN_TURNS, sides=("decode",))
    for cell in plan_matrix(model):
        assert run_cell(cell, model, faults=4, seed=5).perfect, cell


def grading(folder: Path) -> list[Subject]:
    """The models of `serinus canary selftest`, those that see most first."""
    full = subject(folder, "full", page_size=4)
    turns = {"kv_canary_coverage": "rotating:3"}
    in_turns = Subject(name="turns", checkpoint=full.checkpoint, settings=turns, modes=IN_TURNS, sides=("decode",))
    return [full, in_turns, subject(folder, "both")]


@pytest.mark.slow
def test_the_self_test_is_graded_by_weaknesses_of_the_canary(tmp_path: Path) -> None:
    """One weakness that a self-test of the first byte alone was blind to, and the canary is whole again afterwards."""
    full = subject(tmp_path, "full")
    used = Subject(name="full", checkpoint=full.checkpoint, modes=("real_kv_used",), sides=("decode",))
    (weak,) = [each for each in WEAKNESSES if each.name == "only keys are digested"]
    found = grade([used], weak)
    assert "real_kv_used full in decode" in found.seen_by
    assert "place=layer" in found.said
    cell = next(cell for cell in plan_matrix(used) if cell.mode == "real_kv_used")
    assert run_cell(cell, used).perfect


@pytest.mark.proof
@pytest.mark.parametrize("weak", WEAKNESSES, ids=lambda weak: weak.name)
def test_each_weakness_of_the_canary_turns_the_self_test_red(tmp_path: Path, weak: Weakness) -> None:
    """About two minutes in all on one core."""
    assert grade(grading(tmp_path), weak).seen_by, f"the self-test is blind: {weak.name}"


def test_there_are_weaknesses_enough() -> None:
    assert len({each.name for each in WEAKNESSES}) == len(WEAKNESSES) >= 12
    assert len({each.name for each in RANK_WEAKNESSES}) == len(RANK_WEAKNESSES) >= 3


def test_a_model_that_does_not_fit_so_many_ranks_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = str(make_canary_toy(tmp_path / "toy", "full"))
    for words, said in (
        (["--tp-size", "3"], "tp_size is 3, expected a divisor of 2, the model's KV heads"),
        (["--pp-size", "4"], "pp_size is 4, expected at most 3, the model's layers"),
        (["--tp-size", "4", "--mutants"], "tp_size is 4, expected a divisor of 2"),
    ):
        assert main(["canary", "selftest", toy, *words]) == 2
        found = capsys.readouterr()
        assert said in found.err
        assert not found.out


@pytest.mark.slow
def test_a_perfect_matrix_is_exit_code_0_and_is_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy, result = make_canary_toy(tmp_path / "toy", "swa"), tmp_path / "result.json"
    words = ["canary", "selftest", str(toy), "--page-size", "4", "--faults", "1", "--json", str(result)]
    assert main(words) == 0
    text = capsys.readouterr().out
    found = json.loads(result.read_text())
    injected = sum(cell["injected"] for cell in found["cells"])
    assert f"{injected} faults injected, {injected} detected, 0 false alarms: the matrix is perfect" in text
    used = next(c for c in found["cells"] if c["mode"] == "real_kv_used")
    assert (used["places"], used["hit"]) == (3 * 2 * 2, 3 * 2 * 2), "each layer, half and head"
    assert "real_kv_used swa decode 12/12" in text
    assert found["perfect"]
    assert found["settings"]["kv_canary_coverage"] == "full"
    assert {cell["mode"] for cell in found["cells"]} == {CLEAN, *MODES}
    assert all(cell["slots_checked"] for cell in found["cells"])


@pytest.mark.proof
def test_a_model_of_the_families_that_are_served_passes_the_selftest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path / "mistral", "mistral", tokenizer=False, sliding_window=9, dtype="bfloat16")
    assert main(["canary", "selftest", str(folder), "--page-size", "4", "--faults", "1"]) == 0
    text = capsys.readouterr().out
    assert "0 false alarms: the matrix is perfect" in text
    assert "mistral" in text


@pytest.mark.proof
def test_a_canary_that_misses_something_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Turns so long that requests end before most of their slots had one."""
    toy = make_canary_toy(tmp_path / "toy", "full")
    words = ["canary", "selftest", str(toy), "--page-size", "4", "--faults", "2"]
    assert main([*words, "--kv-canary-coverage", "rotating:5000"]) == 1
    text = capsys.readouterr().out
    assert "are not as they must be" in text
    assert "WRONG" in text


def test_what_makes_no_sense_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["selftest", "--faults", "0"], "--faults is 0, expected at least 1"),
        (["selftest", "--kv-canary-real-data", "none"], "expected partial or all"),
        (["selftest", "--fault", "1"], "did you mean --faults?"),
        (["selftest", "--tp-size", "0"], "--tp-size is 0, expected at least 1"),
        (["selftest", "--tp-size", "8", "--pp-size", "4"], "makes 32 ranks, expected at most 16"),
        (["selftest", "--pp-size", "2", "--device", "cuda"], "--device is 'cuda' with 2 ranks, expected cpu"),
        (["show", "--limit", "0"], "--limit is 0, expected at least 1"),
        (["show", "http://127.0.0.1:9"], "expected a running engine or router"),
        (["test"], "expected `serinus canary selftest`"),
    ):
        assert main(["canary", *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_latest_violations_of_a_running_engine_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(endpoint=f"ipc://{tmp_path}/e", vocab_size=267, engine="fake-0")
    settings = front_settings(model_path=str(make_byte_tokenizer(tmp_path)), admin_api_key="secret")
    with running_front(settings, engine) as front:
        assert main(["canary", "show", front.url, "--api-key", "secret"]) == 0
        assert "no canary (start it with --kv-canary log, raise or heal)" in capsys.readouterr().out
        assert main(["canary", "show", front.url]) == 2
        assert "give the admin key" in capsys.readouterr().err


def test_violations_are_shown_with_the_requests_concerned(tmp_path: Path) -> None:
    model = subject(tmp_path, "full")
    pair = CanaryPDFixture(model.checkpoint, perturb_decode="real_kv_used=1.0", armed=False)
    (rid,) = pair.send_parallel_short_requests(1, distinct_prompts=True)
    assert pair.run_until(lambda: len(pair.tokens(rid)) > 2)
    pair.arm("decode")
    pair.run()
    view = json.loads(json.dumps(pair.lead("decode").view()))
    lines = canary_lines({"url": "http://there", "canary": view}, limit=1)
    assert lines[0].startswith("http://there: mode log, real data all, each slot once in 1 steps; ")
    assert lines[0].endswith(f"0 sweeps, {view['violations']} violations in 1 incident")
    assert "verify_real_kv_hash by TAIL_K_FULL" in lines[1]
    assert "1  faults planted on purpose" in lines[2]
    assert f"request '{rid}'" in lines[3]
    (incident,) = view["incidents"]
    assert incident["count"] > 1
    assert lines[3].startswith(
        f"  steps {incident['first_step']} to {incident['last_step']}, {incident['count']} times"
    )
    assert len(lines) == 4
    ranks = [{"rank": "TP0 PP0", "slots_due": 9, "slots_checked": 9, "violations": 0}]
    told = canary_lines({"url": "http://there", "canary": {**view, "ranks": ranks}}, limit=1)
    assert told[1].strip() == "0  of rank TP0 PP0; 9 of 9 slots checked"
    assert told[2:] == lines[1:]


def test_what_two_engines_know_of_a_request_is_shown_as_one_story(tmp_path: Path) -> None:
    model = subject(tmp_path, "full")
    pair = CanaryPDFixture(model.checkpoint, perturb_prefill="real_kv_post_forward=1.0", armed=False)
    pair.arm("prefill")
    (rid,) = pair.send_parallel_short_requests(1, distinct_prompts=True)
    pair.run()
    views = [{"engine": f"{side}-0", **pair.lead(side).view()} for side in ("prefill", "decode")]
    views = json.loads(json.dumps(views))
    (injected,) = views[0]["injected"]
    xid = injected["rid"]
    name, planted, *found, told = story_lines(views, limit=3)
    assert name == f"request '{rid}'"
    assert planted.startswith(f"  prefill-0: step {injected['step']}: real_kv_post_forward planted on purpose, slot ")
    for line in found:
        assert line.startswith("  decode-0: step")
        assert line.endswith(f"; page filled by 'prefill-0', handoff '{xid}', piece 0 of rank 0")
        assert f"position {injected['position']};" in line
    assert told.startswith("  prefill-0: was told by decode-0: 'KV integrity: verify_real_kv_hash at slot ")
    assert story_lines([{"engine": "e", "mode": "none"}], limit=3) == []
