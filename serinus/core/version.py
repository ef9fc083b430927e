"""Versions of installed packages, read from their metadata: nothing is imported for it."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def package_version(name: str = "serinus") -> str:
    """The installed version of a package; `unknown` where it is not installed (a bare checkout)."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
