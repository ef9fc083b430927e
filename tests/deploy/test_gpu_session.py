"""The command that runs all that needs a GPU: no piece takes the time of the next, nothing that was said is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_session import PIECES, Piece, run_pieces

ROOT = Path(__file__).parents[2]


@pytest.mark.proof  # the limit is what a slow machine needs to print a line
def test_a_piece_that_does_not_end_is_ended_and_what_it_said_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    stuck = "import time; print('{\"benchmark\": 1}'); time.sleep(600)"
    pieces = [
        Piece(name="stuck", words=("-c", stuck)),
        Piece(name="broken/one", words=("-c", "print('why'); raise SystemExit(3)")),
        Piece(
            name="whole",
            words=("-c", "import os; print('{\"benchmark\": \"' + os.environ['CUDA_VISIBLE_DEVICES'] + '\"}')"),
            gpus=(1,),
        ),
    ]
    stuck_line, *others = run_pieces(pieces, tmp_path, limit_s=8, total_s=300)
    assert stuck_line.startswith("stuck: ended at its limit")
    assert stuck_line.endswith("1 results")
    assert [line.split(", ")[0] for line in others] == ["broken/one: code 3", "whole: ok"]
    assert (tmp_path / "whole.txt").read_text() == '{"benchmark": "1"}\n'
    assert others[0].endswith("why")
    assert (tmp_path / "broken_one.txt").read_text() == "why\n"


def test_pieces_without_time_are_named(tmp_path: Path) -> None:
    assert run_pieces([Piece(name="late", words=("-c", "1"))], tmp_path, limit_s=5, total_s=0) == ["late: not begun"]


def test_every_test_of_a_gpu_is_of_a_piece() -> None:
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    pieces = [ROOT / word for piece in PIECES["tests"] for word in piece.words if word.startswith("tests/")]
    own = Path(__file__)
    left = [path for path in files if path != own and not any(path.is_relative_to(piece) for piece in pieces)]
    assert not left
    assert all(piece.exists() for piece in pieces)
    assert len(files) > 10


def test_every_benchmark_of_a_piece_is_there() -> None:
    modules = [piece.words[1].split(".")[1] for name in ("benchmarks", "benchmarks_of_gpus") for piece in PIECES[name]]
    assert [name for name in modules if not (ROOT / "benchmarks" / f"{name}.py").is_file()] == []
