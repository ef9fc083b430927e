"""The terminal that commands write to."""

from __future__ import annotations

from rich.console import Console

__all__ = ["console"]

_FILE_WIDTH = 160
"""Columns where the output is no terminal."""


def console(*, stderr: bool = False) -> Console:
    """The terminal; wide enough for our tables where it is a file."""
    terminal = Console(stderr=stderr)
    return terminal if terminal.is_terminal else Console(stderr=stderr, width=_FILE_WIDTH)
