"""Log lines on stderr, from loggers named `serinus.<room>`.

For people `[2026-11-21 00:33:08 TP0] message`; for machines (`--log-format json`) an object a line, with fields that
a call gives as `extra`.

The stamp after the time names the rank; `serinus up` puts the engine's name before each line of its children.
Knows nothing of what is logged.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

LOG_FORMATS = ("text", "json")
_ROOT = "serinus"
_OWN = frozenset((*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"))
"""Attributes that every record has; all others are fields of the caller, but those that libraries begin with `_`."""


def get_logger(room: str) -> logging.Logger:
    """The logger of a room (or of a file in it, `pd.registry`)."""
    return logging.getLogger(f"{_ROOT}.{room}")


class _JsonLines(logging.Formatter):
    """One JSON object per record."""

    def __init__(self, rank: str) -> None:
        super().__init__()
        self._stamp = {"rank": rank} if rank else {}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": _shown_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._stamp,
        }
        line |= {name: value for name, value in record.__dict__.items() if name not in _OWN and name[0] != "_"}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _shown_time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def setup_logging(level: str = "info", rank: str = "TP0", log_format: str = "text") -> None:
    """Send the lines of all rooms to stderr; called once per process, at its start.

    Args:
        level: debug, info, warning or error.
        rank: stamp of this process, e.g. TP0 or TP1 PP0; empty = none.
        log_format: text, or json: then warnings of libraries are objects too.
    """
    logger = logging.getLogger(_ROOT)
    handler = logging.StreamHandler(sys.stderr)
    stamp = f" {rank}" if rank else ""
    handler.setFormatter(logging.Formatter(f"[%(asctime)s{stamp}] %(message)s", "%Y-%m-%d %H:%M:%S"))
    if log_format == "json":
        handler.setFormatter(_JsonLines(rank))
        logging.getLogger().handlers = [handler]
        logging.captureWarnings(True)
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def child_line(line: str, engine: str, unix: float, log_format: str) -> str:
    """A line of a child process with the name of its engine before it; in json an object that names it, where what was
    none (the dump of a crash) becomes the message of one."""
    if log_format != "json":
        return f"{engine:>10} | {line}"
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        found = {"ts": _shown_time(unix), "level": "info", "logger": "stderr", "message": line}
    return json.dumps({**found, "engine": engine})


def fields(**values: object) -> str:
    """`a: 1, b: 0.25` for the tail of a line: floats with three significant digits, underscores as dashes, what
    cannot be printed escaped: no value begins a line of its own."""
    return ", ".join(f"{name.replace('_', '-')}: {_shown(value)}" for name, value in values.items())


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
    text = str(value)
    return text if text.isprintable() else repr(text)
