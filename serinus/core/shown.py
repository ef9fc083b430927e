"""A value as error messages show it: its `repr`, cut. The value may be megabytes; what is not shown is not made."""

from __future__ import annotations

import reprlib
from itertools import islice
from typing import Any

_CHARS = 120


class _Short(reprlib.Repr):
    """`repr` of the first items of each container and of the first characters of each text."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 8
        self.maxlist = self.maxtuple = self.maxdict = _CHARS // 2

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[:_CHARS])

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[:_CHARS])

    def repr_int(self, x: int, level: int) -> str:
        return repr(x)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        keys = islice(x, self.maxdict if level > 0 else 0)
        return f"{{{', '.join(f'{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}' for key in keys)}}}"

    def repr_instance(self, x: Any, level: int) -> str:
        return repr(x)


_SHORT = _Short()


def shown(value: Any) -> str:
    """`repr(value)`, at most 120 characters of it."""
    text = _SHORT.repr(value)
    return text if len(text) <= _CHARS else f"{text[: _CHARS - 3]}..."
