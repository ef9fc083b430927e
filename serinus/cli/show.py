"""Where commands write: the terminal, and files that flags name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from serinus.cli.parser import UsageProblem
from serinus.core.errors import ConfigError

_FILE_WIDTH = 160
"""Columns where the output is no terminal."""


def console(*, stderr: bool = False) -> Console:
    """The terminal; wide enough for our tables where it is a file."""
    terminal = Console(stderr=stderr)
    return terminal if terminal.is_terminal else Console(stderr=stderr, width=_FILE_WIDTH)


def write_json(path: str | None, result: Any) -> None:
    """Write a result to a file, `-` being standard output; None = it is not wanted. Raises ConfigError."""
    if path is None:
        return
    text = json.dumps(result, indent=1)
    if path == "-":
        print(text)
        return
    write_text(path, text + "\n")


def write_text(path: str, text: str) -> None:
    """Write a file anew. Raises ConfigError."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cli: cannot write {path}: {error.strerror}") from None


def check_folder(flag: str, path: str | None) -> None:
    """Before a long run: the folder of the file that it will write is there. Raises UsageProblem."""
    if path is not None and not Path(path).parent.is_dir():
        raise UsageProblem(f"{flag} is {path!r}, expected a file in a folder that exists")
