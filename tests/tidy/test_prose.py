"""Prose is plain technical English: in docstrings, in comments and in the names of tests.

`python -m tests.tidy.test_prose canary` prints what is wrong in serinus/canary and tests/canary.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.tidy.house import Source, package, suite

ACTORS = re.compile(
    r"\b(who|whoever|whom|nobody|somebody|everybody|anybody|everyone|someone|anyone)\b"
    r"|(?:^|[.:;,(]|\b(?:on|of|for|in|to|by|from|about|and|or|says?|knows?|tells?))\W*\b(whose)\b",
    re.I,
)
"""An actor has a noun: the leader, the decode engine, the caller. `A page whose bytes ...` is fine."""

METAPHORS = re.compile(
    r"\b(letters?|post office|postman|doors?|court|judges?|verdicts?|last words|sung|sings?|gossip|funeral|burial)\b",
    re.I,
)
"""Use the field's term: message, mailbox, endpoint, result. Judge and verdict are words of the canary."""

Place = tuple[int, str]


def _texts(source: Source) -> Iterator[Place]:
    """(line, text) of what follows each #, of every string that stands alone (a docstring), of every name of a test."""
    for number, line in enumerate(source.text.splitlines(), start=1):
        if "#" in line:
            yield number, line.partition("#")[2]
    for node in source.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for offset, line in enumerate(node.value.value.splitlines()):
                yield node.lineno + offset, line
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")


def actors(source: Source) -> Iterator[Place]:
    """Pronouns in place of an actor's name."""
    for line, text in _texts(source):
        yield from ((line, f"{found[0]!r} in: {text.strip()}") for found in ACTORS.finditer(text))


def metaphors(source: Source) -> Iterator[Place]:
    """Pictures in place of a technical term."""
    for line, text in _texts(source):
        for word in METAPHORS.findall(text):
            if not (word.lower().startswith(("judge", "verdict")) and "canary" in f"{source.name} {text}".lower()):
                yield line, f"{word!r} in: {text.strip()}"


def short_docstrings(source: Source) -> Iterator[Place]:
    """Docstrings of three words or fewer, those of fields too, say nothing that a name does not."""
    for node in source.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            says = node.value.value
            if len(says.split()) <= 3:
                yield node.lineno, f"docstring of three words or fewer: {says!r}"


def silent_raises(source: Source) -> Iterator[Place]:
    """Public functions of the package that raise and do not say so."""
    if not source.name.startswith("serinus/"):
        return
    for function in _public_functions(source.tree):
        raises = any(isinstance(node, ast.Raise) and node.exc is not None for node in _own_nodes(function))
        if raises and "raise" not in (ast.get_docstring(function) or "").lower():
            yield function.lineno, f"{function.name} raises, and its docstring does not say so"


def _public_functions(body: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body.body:
        if getattr(node, "name", "_").startswith("_"):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _public_functions(node)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Everything in it, without functions and classes that it defines."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield node
            yield from _own_nodes(node)


CHECKS: dict[str, Callable[[Source], Iterator[Place]]] = {
    "actors": actors,
    "metaphors": metaphors,
    "short_docstrings": short_docstrings,
    "silent_raises": silent_raises,
}


def _room(source: Source) -> str:
    parts = source.name.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


@pytest.mark.parametrize("check", CHECKS)
def test_prose_is_plain(check: str) -> None:
    places = [(source, place) for source in (*package(), *suite()) for place in CHECKS[check](source)]
    found = "\n".join(f"{source.name}:{line} {what}" for source, (line, what) in places[:50])
    assert not places, f"{len(places)} {check}, expected none:\n{found}"


def main(rooms: list[str]) -> None:
    """Print the places of these rooms, or without any the counts of all."""
    counts: Counter[tuple[str, str]] = Counter()
    for source in (*package(), *suite()):
        for check, find in CHECKS.items():
            for line, what in find(source):
                counts[_room(source), check] += 1
                if _room(source).split("/")[-1] in rooms:
                    print(f"{source.name}:{line} {what}")
    for (room, check), count in sorted(counts.items()):
        if not rooms or room.split("/")[-1] in rooms:
            print(f"{room} {check}: {count}")


if __name__ == "__main__":
    main(sys.argv[1:])
