"""Machine code on the disk: a file for each body, named by all that its code depends on and guarded by a digest.

In place of numba's files, which are numbered, with an index of them that is written before they are. Two processes that
compile different bodies at the same time can take the same number; then the index leads from one body to the code of
the other, and a process that starts later computes with the wrong kernel, without a word. (Measured with two that
compile 60 small bodies each: 3 to 11 of 60 were exchanged.) After an upgrade the same happens to a process that reads
between the two writes, or where the second one fails. Here a file is whole or not there, and says what it is of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import caching, serialize

from serinus.core.log import get_logger
from serinus.core.whole_file import write_whole

# What these are is not declared by every release of numba.
FunctionCache: Any = caching.FunctionCache
dumps: Any = serialize.dumps
loads: Any = serialize.loads
_DIGEST_BYTES = 32
_NAME_DIGITS = 24
_log = get_logger("kernels")


class CodeFiles:
    """The files of one body; what numba's cache asks for. `base`: its name, the line where it begins and Python's
    version, as numba puts them together; `stamp`: when its file was changed, and how long it is."""

    def __init__(self, folder: Path, base: str, stamp: object) -> None:
        self._folder, self._base = folder, base
        self._source = f"numba {numba.__version__}, source {stamp}"

    def load(self, key: object) -> Any:
        """What was saved for this key; None = nothing was, or the file can't be trusted."""
        path = self._path(key)
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._refuse(f"it can't be read ({error})")
        digest, content = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            return self._refuse(f"{path} is damaged")
        source, said, data = loads(content)
        if (source, said) != (self._source, repr(key)):
            return self._refuse(f"{path} is of another kernel")
        return data

    def save(self, key: object, data: object) -> None:
        """Replace what there is for this key, and remove what was made of another source. Where it can't be written
        this process goes on with what it has compiled."""
        content = dumps((self._source, repr(key), data))
        path, own = self._path(key), self._prefix()
        try:
            write_whole(path, hashlib.sha256(content).digest() + content)
            name, _, line_and_python = self._base.rpartition("-")
            for other in self._folder.glob(f"{name}-*.{line_and_python.partition('.')[2]}.*"):
                if not other.name.startswith(own):
                    other.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("kernels: machine code could not be stored, each process compiles it: %s", error)

    def _refuse(self, why: str) -> None:
        _log.warning("kernels: machine code is compiled anew: %s", why)

    def _prefix(self) -> str:
        return f"{self._base}.{_named(self._source)[:8]}-"

    def _path(self, key: object) -> Path:
        return self._folder / f"{self._prefix()}{_named(repr(key))}.nbc"


def cache_of(function: Callable[..., Any]) -> Any:
    """numba's cache of a function, with these files. Raises RuntimeError: there is no folder that can be written."""
    cache: Any = FunctionCache(function)
    place = Path(cache._impl.locator.get_cache_path()), cache._impl.filename_base
    cache._cache_file = CodeFiles(*place, cache._impl.locator.get_source_stamp())
    return cache


def _named(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_NAME_DIGITS]
