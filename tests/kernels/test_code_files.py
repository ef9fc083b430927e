"""Machine code on the disk: what a body finds there is its own, whatever else is compiled at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from serinus.kernels.cpu.body import Body, compile_body, fields
from serinus.kernels.cpu.code_files import CodeFiles
from serinus.kernels.cpu.scalar import carray

Answer = fields("ticket said")


def body_that_says(number: int) -> Body:
    def say(args: Any) -> None:
        carray(args, 2, np.int64)[1] = number

    return compile_body(say)


def said_by(body: Body) -> int:
    answer: Any = Answer(0, 0)
    body(answer, 1)
    return int(answer.said)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """Bodies are stored in a folder of the test's; which files are there."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return lambda: sorted(path for path in tmp_path.rglob("*") if path.is_file())


def test_a_body_is_compiled_once_and_found_again(stored: Callable[[], list[Path]]) -> None:
    assert body_that_says(7)._compiled.cache_hits == 0
    again = body_that_says(7)
    assert (again._compiled.cache_hits, said_by(again), len(stored())) == (1, 7, 1)


def test_bodies_of_other_numbers_have_files_of_their_own(stored: Callable[[], list[Path]]) -> None:
    assert [said_by(body_that_says(number)) for number in (1, 2, 1, 2)] == [1, 2, 1, 2]
    assert len(stored()) == 2


def test_a_file_that_lies_under_the_name_of_another_body_is_not_run(
    stored: Callable[[], list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    body_that_says(1)
    (one,) = stored()
    body_that_says(2)
    (other,) = {*stored()} - {one}
    other.write_bytes(one.read_bytes())
    assert said_by(body_that_says(2)) == 2
    assert "is of another kernel" in caplog.text
    assert body_that_says(2)._compiled.cache_hits == 1, "it was stored anew"


@pytest.mark.parametrize("damage", [lambda code: code[:-1], lambda code: b"", lambda code: code[:999] + b"?" * 9])
def test_a_damaged_file_is_compiled_anew(
    stored: Callable[[], list[Path]], caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    body_that_says(3)
    (file,) = stored()
    file.write_bytes(damage(file.read_bytes()))
    assert said_by(body_that_says(3)) == 3
    assert f"{file} is damaged" in caplog.text
    assert (body_that_says(3)._compiled.cache_hits, stored()) == (1, [file]), "it was stored anew, whole"


def test_where_code_can_not_be_stored_it_is_compiled_and_runs(
    stored: Callable[[], list[Path]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    assert said_by(body_that_says(4)) == 4
    assert "could not be stored, each process compiles it: [Errno 28] No space left on device" in caplog.text
    assert stored() == []


def test_what_was_made_of_a_former_source_goes(tmp_path: Path) -> None:
    """Of the same function and release of Python; numba's own numbered files too."""
    for name in ("m.f-9.py311.1.nbc", "m.f-9.py311.nbi", "m.f-8.py311.1.nbc", "m.f-9.py312.1.nbc", "m.g-9.py311.1.nbc"):
        (tmp_path / name).write_bytes(b"")
    CodeFiles(tmp_path, "m.f-8.py311", (1.0, 10)).save("key", "former")
    CodeFiles(tmp_path, "m.f-9.py311", (2.0, 11)).save("key", "now")
    CodeFiles(tmp_path, "m.f-9.py311", (2.0, 11)).save("other key", "other")
    assert CodeFiles(tmp_path, "m.f-8.py311", (1.0, 10)).load("key") is None
    assert [CodeFiles(tmp_path, "m.f-9.py311", (2.0, 11)).load(key) for key in ("key", "other key")] == ["now", "other"]
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("m.f-9.py311."))
    assert left == ["m.f-9.py312.1.nbc", "m.g-9.py311.1.nbc"]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.proof
def test_processes_that_compile_at_the_same_time_leave_each_body_its_own_code(tmp_path: Path) -> None:
    """By an index of numbered files, numba's, 1 of 12 bodies ran another one's code afterwards."""
    source = "import sys; from tests.kernels.test_code_files import *; begin, end = map(int, sys.argv[1:]);"
    source += "print([said_by(body_that_says(number)) for number in range(begin, end)] == [*range(begin, end)])"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def start(begin: int, end: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", source, str(begin), str(end)]
        root = Path(__file__).parents[2]
        return subprocess.Popen(command, cwd=root, env=environment, text=True, stdout=subprocess.PIPE)

    for numbers in ((0, 60), (60, 120)), ((0, 120),):
        started = [start(*each) for each in numbers]
        assert [child.communicate()[0] for child in started] == ["True\n"] * len(numbers)
    assert len(list(tmp_path.rglob("*.nbc"))) == 120
