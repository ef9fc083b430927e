"""Names of a package that are imported when they are first used, so that the package itself costs next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str, **files: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package: by file the names that it has, with spaces between them. Raises AttributeError
    for others."""
    file_of = {name: file for file, names in files.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in file_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{file_of[name]}"), name)

    return find
