"""The wheel: everything of the package and nothing else, and `serinus demo` runs from its files alone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

REPO = Path(__file__).parents[2]

pytestmark = pytest.mark.proof

MODES = ("log", "raise", "heal")


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
    """One fault under three canaries: a foreign code, an error, the right code; all engines are stopped at the end."""
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)

    def run(*words: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(unpacked), "PYTHONUNBUFFERED": "1"}
        command, pipe = [sys.executable, *words], subprocess.PIPE
        return subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stdout=pipe, stderr=subprocess.STDOUT)

    assert str(unpacked) in run("-c", "import serinus; print(serinus.__file__)").communicate()[0]
    demo, out = run("-m", "serinus", "demo", "--stay"), ""
    assert demo.stdout is not None
    while "/dashboard" not in out and (line := demo.stdout.readline()):
        out += line
    page = re.search(r"http://\S+/dashboard", out)
    assert page is not None, out
    assert "KV map" in httpx.get(page[0]).text
    demo.send_signal(signal.SIGINT)
    out += demo.communicate()[0]
    assert demo.returncode == 0, out
    assert "All went as it should" in out
    acts = [re.search(rf"--kv-canary {mode}.*?customer B:.*?HTTP (\d+) ([^\n]+)", out, re.DOTALL) for mode in MODES]
    assert [act and act[1] for act in acts] == ["200", "500", "200"], out
    log, failed, healed = (act[2] for act in acts if act is not None)
    assert "KV integrity: verify_chain_hash at slot" in failed
    assert log != healed
    pages = re.search(r"prefill-0 │ +\d+ │ +0 │ +(\d+) │ +0 │", out)
    assert pages is not None, out
    assert int(pages[1]) > 0
    assert re.search(rf"decode-0 .* │ +0 │ +{pages[1]} │ .* GB/s", out), out
