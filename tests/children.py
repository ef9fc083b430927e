"""Python programs that a test starts beside itself, and ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

__all__ = ["Spawn", "children"]

Spawn = Callable[..., tuple[subprocess.Popen[str], str]]


@contextlib.contextmanager
def children() -> Iterator[Spawn]:
    """Gives a function that starts Python with these words, `more` in its environment, and returns the process and the
    first line it prints. At the end all of them are killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **more: str) -> tuple[subprocess.Popen[str], str]:
        child = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, text=True, env={**os.environ, **more}
        )  # fmt: skip
        started.append(child)
        assert child.stdout is not None
        return child, child.stdout.readline().strip()

    yield start
    for child in started:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
