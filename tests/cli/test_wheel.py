"""The wheel: everything of the package and nothing else, and `serinus demo` runs from its files alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, with the setuptools that is installed."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    shutil.copytree(REPO / "serinus", source / "serinus", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    words = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(home), str(source))
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(home.glob("serinus-*.whl"))


def test_it_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    package = {file.relative_to(REPO).as_posix() for file in (REPO / "serinus").rglob("*") if file.is_file()}
    expected = {name for name in package if "__pycache__" not in name and "/." not in name}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name for name in names if name.endswith(".dist-info/METADATA")).removesuffix("METADATA")
        assert {name for name in names if not name.startswith(info)} == expected
        assert "serinus = serinus.cli:main" in archive.read(f"{info}entry_points.txt").decode()
        metadata = archive.read(f"{info}METADATA").decode()
    assert f"{info}licenses/LICENSE" in names
    assert "License-Expression: Apache-2.0" in metadata
    assert "# Serinus" in metadata


@pytest.mark.timeout(600)
def test_the_demo_runs_from_it(wheel: Path, tmp_path: Path) -> None:
    """It makes a model, chats through a prefill and a decode engine, shows what each did, and stops everything."""
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)

    def run(*words: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(unpacked)}
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert str(unpacked) in run("-c", "import serinus; print(serinus.__file__)")
    out = run("-m", "serinus", "demo", "--checkpoint", "model", "--max-tokens", "8")
    assert "All went right" in out
    pages = re.search(r"prefill-0 │ +\d+ │ +0 │ +(\d+) │ +0 │", out)
    assert pages is not None, out
    assert int(pages[1]) > 0
    assert re.search(rf"decode-0 .* │ +24 │ +0 │ +{pages[1]} │ .* GB/s", out), out
