"""What lives in one place only: time, chance, the environment, broad excepts, prints; and what lives nowhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.tidy.house import Source, imports_of, package, room_of, suite

ONE_PLACE = {
    "time": ("serinus/core/clock.py",),
    "random": ("serinus/core/rng.py",),
    "secrets": ("serinus/core/ids.py",),
    "pickle": (),
    "marshal": (),
    "shelve": (),
    "unittest": (),
}
"""Module -> the files that may import it. Others take a Clock, an Rng, or an id from core."""

BROAD_EXCEPT = ("serinus/engine/process.py", "serinus/ranks/process.py")
"""One broad except per process: what the loop lets through is logged, told to the front, and ends the process."""

PRINTS = ("cli",)
"""Rooms that may print to the terminal."""


def test_time_chance_and_pickle_stay_where_they_belong() -> None:
    wrong = []
    for source in package():
        for line, module in imports_of(source):
            top = module.split(".")[0]
            if top in ONE_PLACE and source.name not in ONE_PLACE[top]:
                wrong.append(f"{source.name}:{line} imports {module}, expected only {ONE_PLACE[top] or 'nowhere'}")
    assert not wrong, "\n".join(wrong)


def _names(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every attribute access on a plain name."""
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.lineno, f"{node.value.id}.{node.attr}"


def test_only_the_config_reads_the_environment() -> None:
    words = ("os.environ", "os.getenv", "os.putenv", "os.environb")
    wrong = [
        f"{source.name}:{line} {name}, expected core.config.environment()"
        for source in package()
        for line, name in _names(source)
        if name in words and source.name != "serinus/core/config.py"
    ]
    assert not wrong, "\n".join(wrong)


def _ends_in_raise(handler: ast.ExceptHandler) -> bool:
    """A handler that undoes something and passes the error on swallows nothing."""
    return bool(handler.body) and isinstance(handler.body[-1], ast.Raise)


def test_no_code_swallows_errors_in_general() -> None:
    wrong = []
    for source in package():
        for node in source.nodes:
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = ast.unparse(node.type) if node.type is not None else "everything"
            broad = any(
                name in caught.replace("(", " ").replace(",", " ").replace(")", " ").split()
                for name in ("Exception", "BaseException", "everything")
            )
            if broad and not _ends_in_raise(node) and source.name not in BROAD_EXCEPT:
                wrong.append(f"{source.name}:{node.lineno} except {caught}, expected the errors that can happen")
    assert not wrong, "\n".join(wrong)


def _calls(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


def test_only_the_command_line_prints() -> None:
    wrong = [
        f"{source.name}:{line}"
        for source in package()
        for line, name in _calls(source)
        if name == "print" and room_of(source) not in PRINTS
    ]
    assert not wrong, f"print outside cli, expected core.log: {wrong}"


def test_nothing_runs_text_as_code() -> None:
    words = ("eval", "exec", "compile", "__import__")
    wrong = [f"{s.name}:{line} {name}" for s in package() for line, name in _calls(s) if name in words]
    assert not wrong, "\n".join(wrong)


def test_tests_never_sleep_and_never_mock() -> None:
    wrong = []
    for source in suite():
        wrong += [f"{source.name}:{line} {name}" for line, name in _calls(source) if name.split(".")[-1] == "sleep"]
        wrong += [
            f"{source.name}:{line} imports {module}"
            for line, module in imports_of(source)
            if module.split(".")[0] in ("unittest", "mock", "pytest_mock")
        ]
    assert not wrong, "expected events in an order the test owns:\n" + "\n".join(wrong)


def test_no_test_is_skipped() -> None:
    """But for the marks `gpus` and `nixl`, which tests/conftest.py reads: `make test` has none of these tests."""
    marks = ("skip", "skipif", "xfail", "importorskip")
    wrong = []
    for source in suite():
        if source.name == "tests/conftest.py":
            continue
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and node.attr in marks and "pytest" in ast.unparse(node):
                wrong.append(f"{source.name}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, f"tests that may not run: {wrong}"


def test_every_test_can_fail() -> None:
    """A test without an assert, a pytest.raises or a helper that has one proves nothing."""
    functions = [
        (source, node)
        for source in suite()
        for node in source.nodes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    able = {"raises", "sanity_check", "run_state_machine_as_test"}
    while True:
        more = {node.name for _, node in functions if _asserts(node, able)} - able
        if not more:
            break
        able |= more
    empty = [
        f"{source.name}:{node.lineno} {node.name}"
        for source, node in functions
        if node.name.startswith("test_") and node.name not in able
    ]
    assert not empty, "tests that cannot fail:\n" + "\n".join(empty)


def _asserts(function: ast.AST, able: set[str]) -> bool:
    """Whether it asserts or raises, or calls by name one that does."""
    for node in ast.walk(function):
        if isinstance(node, (ast.Assert, ast.Raise)):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in able:
            return True
    return False
