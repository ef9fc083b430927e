"""`serinus version` and `serinus --version`: Serinus, torch and Python, without importing torch."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from serinus.cli.parser import Command, make_parser
from serinus.core.version import package_version


def run(command: Command, words: Sequence[str]) -> int:
    """Print one line of versions. Raises UsageProblem for any flag."""
    make_parser(command, settings=False).arguments(words)
    print(f"serinus {package_version()} (torch {package_version('torch')}, python {platform.python_version()})")
    return 0
