"""Bodies: compiled once on a machine, not once in each process, and the same in all of them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from serinus.kernels.cpu.body import INLINED, compile_body
from serinus.kernels.cpu.scalar import FAST, at, carray, exp2, inlined
from serinus.kernels.cpu.vector import largest

ROOT = Path(__file__).parents[2]


def test_a_body_that_closes_over_a_compiled_function_is_refused() -> None:
    """numba's cache has what a body closes over in its key, and a compiled function is another one in each process."""

    @inlined(fastmath=set())
    def part(number: Any) -> Any:
        return number + 1

    def whole(args: Any) -> None:
        part(args)

    with pytest.raises(AssertionError, match=r"whole closes over \['part'\], and would be compiled by each process"):
        compile_body(whole)


@inlined(fastmath=FAST)
def _sum_of_shares(at_row: Any) -> Any:
    """Enough for LLVM to call it rather than to write it out twice."""
    row = carray(at(at_row), 64, np.float32)
    best, added = largest(at_row, 64), np.float32(0)
    for p in range(64):
        added += exp2(row[p] - best)
    for p in range(7, 61):
        added += exp2(row[p] * np.float32(3) - best)
    return added


def test_parts_are_written_out_at_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a body's module but the body itself may be called from elsewhere: a weak copy of a part would give way
    to what the process has already loaded under that name."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))  # what is loaded from the disk shows no code

    def whole(args: Any) -> None:
        a = carray(args, 4, np.int64)
        out = carray(at(a[0]), 4, np.float32)
        for i in range(3):
            out[i] = _sum_of_shares(a[i + 1])
        out[3] = _sum_of_shares(a[1] + 4)

    code = compile_body(whole)._compiled._library.get_llvm_str()
    defined = re.findall(r"^define ([^@]*)@\"?([\w.$]+)", code, re.MULTILINE)
    others = [name for kind, name in defined if "linkonce" in kind or "weak" in kind]
    assert len(defined) > len(others)
    assert {name for name in others if not name.startswith("NRT_")} == set()


def test_what_a_body_inlines_is_of_its_version() -> None:
    """Machine code on the disk is found by a body's own file and by the version: a number that came from elsewhere
    would stay as it was when the code was compiled. Looked at are bodies, the parts beside them, and all of the
    inlined modules of this column but what is of the `host`."""
    host = {"Part", "LayerDigest", "collapse_to_huge_pages", "RowBlocks"}
    inlined_modules = {module.__name__: Path(str(module.__file__)) for module in INLINED}
    column = {f"serinus.kernels.cpu.{path.stem}": path for path in (ROOT / "serinus/kernels/cpu").glob("*.py")}
    strays, bodies = [], 0
    for name, path in (inlined_modules | column).items():
        tree = ast.parse(path.read_text())
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        origin = {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        compiled = {ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "compile_body"}
        defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        bodies += sum(node.name in compiled for node in defined)
        parts = [node for node in defined if "inlined" in "".join(map(ast.unparse, node.decorator_list))]
        used = [tree] if name in column.keys() & inlined_modules else [n for n in defined if n.name in compiled] + parts
        names = {node.id for each in used for node in ast.walk(each) if isinstance(node, ast.Name)} - host
        strays += [
            f"{path.name}: {found} of {origin[found]}" for found in sorted(names & {*origin})
            if origin[found].startswith("serinus") and origin[found] not in inlined_modules
        ]  # fmt: skip
    assert strays == []
    assert bodies > 20


@pytest.mark.proof
def test_a_body_computes_the_same_whether_it_was_compiled_or_loaded(tmp_path: Path) -> None:
    """To the bit, in attention over a window, where what a row's shares add up to decides how its values are rounded:
    the process that compiles, and one that finds its machine code on the disk."""
    source = """
import hashlib
import torch
from serinus.kernels import load
from tests.kernels.test_watched_attention import watched_case
torch.set_num_threads(2)
torch.manual_seed(0)
attend = load("cpu").paged_attention
for seed in (23, 41, 65, 83):
    inputs, given, *_ = watched_case(seed)
    print(seed, hashlib.sha256(attend(*inputs, **given).view(torch.uint8).numpy().tobytes()).hexdigest())
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", source]
    said, stored = [], []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        said.append(done.stdout.splitlines())
        stored.append(len(list(tmp_path.rglob("*.nbc"))))
    assert len(said[0]) == 4
    assert said[0] == said[1]
    assert stored[0] == stored[1] > 0, "the second process is to compile nothing"
