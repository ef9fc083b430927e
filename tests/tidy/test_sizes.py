"""Files and functions that fit into a head."""

from __future__ import annotations

import ast

from tests.tidy.house import REPO, package, suite

FILE_LINES_MAX = 499
FUNCTION_LINES_MAX = 69
KERNEL_LINES_MAX = 149
"""A device kernel is one function by nature."""


def test_files_are_under_500_lines() -> None:
    long = [
        f"{s.name}: {s.text.count(chr(10))} lines"
        for s in (*package(), *suite())
        if s.text.count("\n") > FILE_LINES_MAX
    ]
    assert not long, f"files of 500 lines or more, expected one job per file: {long}"


def test_functions_are_under_70_lines() -> None:
    long = []
    for source in (*package(), *suite()):
        limit = KERNEL_LINES_MAX if source.name.startswith("serinus/kernels/") else FUNCTION_LINES_MAX
        for node in source.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
                if lines > limit:
                    long.append(f"{source.name}:{node.lineno} {node.name}: {lines} lines")
    assert not long, "functions of 70 lines or more:\n" + "\n".join(long)


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """A promise that is told in full does not make a function long."""
    first = node.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and ast.get_docstring(node)
    return (first.end_lineno or first.lineno) - first.lineno + 1 if is_text else 0


def test_every_file_says_its_job_first() -> None:
    silent = [s.name for s in package() if not ast.get_docstring(s.tree)]
    assert not silent, f"files without a docstring: {silent}"


def test_every_public_class_and_function_says_what_it_is() -> None:
    silent = []
    for source in package():
        for node in source.tree.body:
            named = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            if named and not node.name.startswith("_") and not ast.get_docstring(node):
                silent.append(f"{source.name}:{node.lineno} {node.name}")
    assert not silent, "public names without a docstring:\n" + "\n".join(silent)


def test_nothing_is_left_to_do() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")
    found = [f"{s.name}: {word}" for s in (*package(), *suite()) for word in words if word in s.text]
    assert not found, f"unfinished work: {found}"


def test_no_file_names_the_place_where_it_was_written() -> None:
    words = ("/wo" + "rk/", "/tmp/br" + "ief", "/op" + "t/pypi")
    suffixes = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".cfg", ""}
    folders = ("serinus", "tests", "docs", "benchmarks", ".ci")
    files = [file for folder in folders for file in (REPO / folder).rglob("*") if file.is_file()]
    files += [file for file in REPO.iterdir() if file.is_file() and file.name != ".git"]  # a file in a worktree
    found = []
    for file in files:
        if file.suffix in suffixes and "__pycache__" not in file.parts:
            text = file.read_text(encoding="utf-8", errors="replace")
            found += [f"{file.relative_to(REPO)}: {word}" for word in words if word in text]
    assert not found, f"paths of somebody's machine: {found}"
