"""What the tests of the house rules look at: every Python file of the package, parsed once."""

from __future__ import annotations

import ast
import atexit
import gc
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["FLOORS", "REPO", "TORCH_FILES", "TORCH_FREE", "Source", "imports_of", "package", "room_of", "suite"]

REPO = Path(__file__).resolve().parents[2]

FLOORS = {
    "core": 0,
    "wire": 1,
    "cache": 1,
    "kernels": 1,
    "parallel": 1,
    "scale": 1,
    "pool": 2,
    "models": 2,
    "text": 2,
    "canary": 3,
    "pd": 3,
    "front": 3,
    "sched": 4,
    "runner": 4,
    "ranks": 5,
    "engine": 6,
    "sim": 7,
    "selftest": 7,
    "testing": 7,
    "cli": 8,
}
"""Room -> floor. A room imports lower floors and itself."""

TORCH_FREE = ("core", "wire", "cache", "text", "front", "sched", "parallel", "scale")
"""Rooms that never import torch, nor anything that does. `cli` may, but only while a command runs."""

TORCH_FILES = tuple(f"serinus/parallel/{name}.py" for name in ("comm", "near", "thread_comm"))
"""Files of these rooms that do. Import them by module path, not from the room's face."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One Python file, parsed."""

    path: Path
    text: str
    tree: ast.Module

    nodes: tuple[ast.AST, ...]
    """Every node of the tree, as ast.walk gives them."""

    @property
    def name(self) -> str:
        """Path from the repository's root, with slashes."""
        return self.path.relative_to(REPO).as_posix()


def _read(folder: str) -> tuple[Source, ...]:
    files = sorted((REPO / folder).rglob("*.py"))
    gc.disable()  # nothing of it is let go: to look for what is, again and again, took more than half of the time
    try:
        texts = [(file, file.read_text(encoding="utf-8")) for file in files]
        trees = [ast.parse(text) for _, text in texts]
        return tuple(
            Source(path=file, text=text, tree=tree, nodes=tuple(ast.walk(tree)))
            for (file, text), tree in zip(texts, trees, strict=True)
        )
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries complain of what is not let go then
        gc.enable()


@cache
def package() -> tuple[Source, ...]:
    """Every file of serinus/."""
    return _read("serinus")


@cache
def suite() -> tuple[Source, ...]:
    """Every file of tests/."""
    return _read("tests")


def room_of(source: Source) -> str:
    """The room a file of the package belongs to; empty for the package's own files."""
    parts = source.path.relative_to(REPO / "serinus").parts
    return parts[0] if len(parts) > 1 else ""


def imports_of(source: Source) -> list[tuple[int, str]]:
    """(line, absolute module) of every import, wherever it stands; relative ones are an error of their own."""
    found: list[tuple[int, str]] = []
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.append((node.lineno, module))
            if module == "serinus":
                found += [(node.lineno, f"serinus.{alias.name}") for alias in node.names]
    return found
