"""Every room has a face, every kernel a reference, every error a place in the tree, every setting a use and a row."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

from serinus.cli import http_markdown, metrics_markdown, settings_markdown
from serinus.core import errors
from serinus.core.config import RouterConfig, ServeConfig, UpConfig, groups_of, settings_in
from serinus.core.setting import KINDS, settings_of
from tests.tidy.house import FLOORS, REPO, package, room_of


def _rooms() -> list[str]:
    return sorted(name for name in FLOORS if (REPO / "serinus" / name / "__init__.py").exists())


@pytest.mark.parametrize("room", _rooms())
def test_a_room_says_its_job_and_lists_its_names(room: str) -> None:
    face = next(s for s in package() if s.name == f"serinus/{room}/__init__.py")
    says = ast.get_docstring(face.tree) or ""
    assert len(says.split()) >= 5, f"serinus/{room}: {says!r}, expected a docstring that says its job"
    assert "__all__" in face.text or room in ("core", "wire"), f"serinus/{room}: no __all__, expected the room's names"


@pytest.mark.slow
@pytest.mark.parametrize("room", _rooms())
def test_every_name_of_a_face_is_there(room: str) -> None:
    module = importlib.import_module(f"serinus.{room}")
    missing = [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)]
    assert not missing, f"serinus.{room}.__all__ names {missing}, which are not there"


def test_names_listed_in_files_are_there() -> None:
    """`__all__` of every file lists names that the file makes or imports."""
    wrong = []
    for source in package():
        listed = _listed(source.tree)
        text = source.text
        wrong += [f"{source.name}: {name}" for name in listed if text.count(name) < 2]
    assert not wrong, f"listed and not there: {wrong}"


def _listed(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(item.value) for item in getattr(node.value, "elts", []) if isinstance(item, ast.Constant)]
    return []


def test_every_kernel_has_a_reference() -> None:
    columns = REPO / "serinus" / "kernels"
    reference = {file.stem for file in (columns / "ref").glob("*.py")}
    kernels = importlib.import_module("serinus.kernels")
    fields = kernels.Kernels.__dataclass_fields__.values()
    ops = {field.name for field in fields if str(field.type).startswith("Callable[") and str(field.type)[-4:] != "None"}
    text = "".join(file.read_text() for file in (columns / "ref").glob("*.py"))
    missing = sorted(op for op in ops if f"def {op}(" not in text)
    assert not missing, f"ops without a function in kernels/ref: {missing}"
    for column in ("cpu", "triton"):
        for file in (columns / column).glob("*.py"):
            makes_op = any(f"def {op}(" in file.read_text() for op in ops)
            assert not makes_op or file.stem in reference, f"{column}/{file.name} has no ref/{file.name}"


def test_every_error_is_exported_and_on_the_tree() -> None:
    classes = {name for name, item in inspect.getmembers(errors, inspect.isclass) if item.__module__ == errors.__name__}
    assert classes == set(errors.__all__), "core.errors.__all__ differs from what the file defines"
    drawn = errors.__doc__ or ""
    assert [name for name in classes if name not in drawn] == [], "errors that the drawn tree lacks"
    for name in classes - {"SerinusError"}:
        assert issubclass(getattr(errors, name), errors.SerinusError), f"{name} is outside the tree"


def test_the_settings_page_is_true() -> None:
    page = (REPO / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings_markdown(), "docs/settings.md is stale: serinus doctor --settings-doc > docs/settings.md"


def test_the_metrics_page_is_true() -> None:
    page = (REPO / "docs" / "METRICS.md").read_text(encoding="utf-8")
    assert page == metrics_markdown(), "docs/METRICS.md is stale: serinus doctor --metrics-doc > docs/METRICS.md"


def test_the_page_of_endpoints_is_true() -> None:
    page = (REPO / "docs" / "HTTP.md").read_text(encoding="utf-8")
    assert page == http_markdown(), "docs/HTTP.md is stale: serinus doctor --http-doc > docs/HTTP.md"


@pytest.mark.parametrize("tree", [ServeConfig, UpConfig, RouterConfig])
def test_flags_and_variables_mean_one_thing_each(tree: type) -> None:
    flags: list[str] = []
    for _, setting in settings_in(tree):
        flags += [setting.flag, *setting.aliases, *setting.inverse]
        assert setting.kind in KINDS, f"{setting.name}: annotation {setting.kind}, expected one of {list(KINDS)}"
        assert len(setting.help.split()) >= 2, f"{setting.name} has no help"
    assert len(flags) == len(set(flags)), f"flags that occur twice: {sorted(f for f in flags if flags.count(f) > 1)}"


def test_there_are_fewer_than_130_settings() -> None:
    settings = [setting for tree in (ServeConfig, UpConfig, RouterConfig) for _, setting in settings_in(tree)]
    assert len({setting.flag for setting in settings if not setting.role}) < 130  # one of a role repeats that of all


SETTINGS = tuple(f"serinus/core/{name}.py" for name in ("settings", "server_settings", "canary_settings", "config"))


def test_every_setting_is_used() -> None:
    """Each setting is read somewhere; one that is not would be a promise that is not kept."""
    used = {
        node.attr
        for source in package()
        if source.name not in SETTINGS
        for node in source.nodes
        if isinstance(node, ast.Attribute)
    }
    config = next(s for s in package() if s.name == "serinus/core/config.py")
    used |= {node.attr for node in config.nodes if isinstance(node, ast.Attribute)}
    for tree in (ServeConfig, UpConfig, RouterConfig):
        for _, group in groups_of(tree):
            unused = [setting.name for setting in settings_of(group) if setting.name not in used]
            assert not unused, f"{group.__name__}: nobody reads {unused}"


def test_every_field_of_the_shared_data_is_explained() -> None:
    """A sentence under each field of a dataclass of core, unless the class's own says what it is."""
    silent = []
    for source in package():
        if room_of(source) != "core" or source.name.endswith("settings.py"):
            continue
        for node in (n for n in source.tree.body if isinstance(n, ast.ClassDef)):
            if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            says = ast.get_docstring(node) or ""
            for item, after in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(item, ast.AnnAssign) and not _is_text(after):
                    name = ast.unparse(item.target)
                    silent += [f"{source.name}:{item.lineno} {node.name}.{name}"] if name not in says else []
    silent = [line for line in silent if not line.endswith((".rid", ".row", ".step", ".last"))]  # words of the map
    assert not silent, "fields without a sentence:\n" + "\n".join(silent)


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
