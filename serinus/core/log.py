"""Log lines for people: `[2026-11-21 00:33:08 TP0] message`, on stderr, from loggers named `serinus.<room>`.

The stamp after the time names the rank; `serinus up` puts the engine's name before each line of its children.
Knows nothing of what is logged.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["fields", "get_logger", "setup_logging"]

_ROOT = "serinus"


def get_logger(room: str) -> logging.Logger:
    """The logger of a room (or of a file in it, `pd.registry`)."""
    return logging.getLogger(f"{_ROOT}.{room}")


def setup_logging(level: str = "info", rank: str = "TP0") -> None:
    """Send the lines of all rooms to stderr; called once per process, at its start.

    Args:
        level: debug, info, warning or error.
        rank: stamp of this process, e.g. TP0 or TP1 PP0; empty = none.
    """
    logger = logging.getLogger(_ROOT)
    handler = logging.StreamHandler(sys.stderr)
    stamp = f" {rank}" if rank else ""
    handler.setFormatter(logging.Formatter(f"[%(asctime)s{stamp}] %(message)s", "%Y-%m-%d %H:%M:%S"))
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def fields(**values: object) -> str:
    """`a: 1, b: 0.25` for the tail of a line: floats with three significant digits, underscores as dashes."""
    return ", ".join(f"{name.replace('_', '-')}: {_shown(value)}" for name, value in values.items())


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
    return str(value)
