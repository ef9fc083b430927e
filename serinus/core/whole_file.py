"""Files that other processes see whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from serinus.core.ids import new_token


def write_whole(file: Path, content: bytes) -> None:
    """Write a file, or replace it; of processes that do so at the same time the last one counts. Raises OSError: it
    can't be written, and nothing is left of it."""
    unfinished = file.with_name(f".{new_token().hex()}.unfinished")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
