"""docs/CHANGING.md: its diffs fit a copy of the package, and its proofs pass there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .changing import EXAMPLES, REPO, Example, apply

RUN_PROOFS = """
import json, sys, traceback
failed = {}
for title, proof in json.load(sys.stdin).items():
    try:
        exec(compile(proof, title, "exec"), {"__name__": "proof"})
    except BaseException:
        failed[title] = traceback.format_exc()
json.dump(failed, sys.stdout)
"""


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What failed of each example, on a copy of the package that has all of them."""
    root = tmp_path_factory.mktemp("changed")
    shutil.copytree(REPO / "serinus", root / "serinus", ignore=shutil.ignore_patterns("__pycache__"))
    failed: dict[str, str] = {}
    for example in EXAMPLES:
        try:
            for diff in example.diffs:
                apply(diff, root)
        except AssertionError as error:
            failed[example.title] = str(error)
    proofs = {example.title: example.proof for example in EXAMPLES if example.title not in failed}
    environment = {**os.environ, "PYTHONPATH": str(root), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN_PROOFS], input=json.dumps(proofs), capture_output=True, text=True, check=False,
        cwd=root, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), **failed}


@pytest.mark.proof
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.title)
def test_an_example_can_be_followed(example: Example, failures: dict[str, str]) -> None:
    assert example.proof, f"{example.title}: no proof"
    assert example.title not in failures, failures[example.title]


def test_a_diff_that_does_not_fit_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\n")
    apply("a.py\n one\n+more\n-two\n", tmp_path)
    assert (tmp_path / "a.py").read_text() == "one\nmore\n"
    with pytest.raises(AssertionError, match="0 places"):
        apply("a.py\n two\n+more\n", tmp_path)
    with pytest.raises(AssertionError, match="against what the page says"):
        apply("new a.py\n+more\n", tmp_path)
