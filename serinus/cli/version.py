"""`serinus version`: the version, read from the installed package."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from serinus.cli.parser import Command, make_parser, unknown_flag

__all__ = ["run", "serinus_version"]


def serinus_version() -> str:
    """The installed version; `0 (not installed)` when run from a bare checkout."""
    try:
        return version("serinus")
    except PackageNotFoundError:
        return "0 (not installed)"


def run(command: Command, words: Sequence[str]) -> int:
    """Print it."""
    parser = make_parser(command, settings=False)
    _, rest = parser.parse_known_args(list(words))
    if rest:
        raise unknown_flag(parser, rest[0])
    print(f"serinus {serinus_version()}")
    return 0
