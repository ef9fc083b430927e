"""Where commands write: the terminal, and the file of --json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from serinus.core.errors import ConfigError

__all__ = ["console", "write_json"]

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
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cli: cannot write {path}: {error.strerror}") from None
