"""Imports point down: a room imports lower floors and itself, never a sibling, never up, nowhere in a file."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.tidy.house import FLOORS, REPO, TORCH_FILES, TORCH_FREE, imports_of, package, room_of

HEAVY = ("torch", "transformers", "numba", "safetensors.torch", "triton")
"""What a torch-free room must not name. transformers drags torch in behind our back."""


def test_every_room_is_on_the_map() -> None:
    rooms = {folder.name for folder in (REPO / "serinus").iterdir() if (folder / "__init__.py").exists()}
    assert rooms <= set(FLOORS), f"rooms without a floor: {sorted(rooms - set(FLOORS))}"


def test_imports_point_down() -> None:
    wrong = []
    for source in package():
        room = room_of(source)
        if not room:
            continue  # the package's own files (`from serinus import LLM`, `python -m serinus`) are above all rooms
        for line, module in imports_of(source):
            parts = module.split(".")
            if parts[0] != "serinus" or len(parts) < 2 or parts[1] == room:
                continue
            if parts[1] not in FLOORS or FLOORS[parts[1]] >= FLOORS[room]:
                wrong.append(f"{source.name}:{line} imports {module}")
    assert not wrong, "imports that do not point down:\n" + "\n".join(wrong)


def test_imports_by_name_in_texts_point_down_too() -> None:
    """`import_module("serinus.engine...")` would hide from the test above."""
    wrong = []
    for source in package():
        room = room_of(source)
        for node in source.nodes:
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            parts = node.value.split(":")[0].split(".")
            is_module = parts[0] == "serinus" and len(parts) > 1 and all(part.isidentifier() for part in parts)
            if room and is_module and parts[1] in FLOORS and parts[1] != room and FLOORS[parts[1]] >= FLOORS[room]:
                wrong.append(f"{source.name}:{node.lineno} names {node.value!r}")
    assert not wrong, "modules above, named in texts:\n" + "\n".join(wrong)


def test_imports_are_absolute() -> None:
    wrong = [f"{s.name}:{line}" for s in package() for line, module in imports_of(s) if module.startswith(".")]
    assert not wrong, f"relative imports, expected `from serinus.room import name`: {wrong}"


def test_torch_free_rooms_name_no_torch() -> None:
    wrong = []
    for source in package():
        if room_of(source) not in TORCH_FREE or source.name in TORCH_FILES:
            continue
        for line, module in imports_of(source):
            heavy = any(module == name or module.startswith(name + ".") for name in HEAVY)
            # The front may ask transformers for a tokenizer that has no tokenizer.json, inside a function.
            if heavy and not (source.name == "serinus/text/tokenizer.py" and module == "transformers"):
                wrong.append(f"{source.name}:{line} imports {module}")
    assert not wrong, "torch-free rooms that are not:\n" + "\n".join(wrong)


@pytest.mark.slow
def test_importing_a_torch_free_room_loads_no_torch() -> None:
    names = [f"serinus.{room}" for room in TORCH_FREE]
    modules = sorted(
        ".".join(source.path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")
        for source in package()
        if room_of(source) in TORCH_FREE and source.name not in TORCH_FILES
    )
    script = (
        "import importlib, sys\n"
        f"for name in {names + modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
