"""Temporary folders that do not outlive their process: where it is killed, the next one of the same user removes them.

A folder's file `owner` is locked while its process lives; the system drops the lock however the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "serinus-"
_OWNER = "owner"


class PrivateFolder:
    """A folder for this user alone, removed by `close`. A context manager that gives its path."""

    def __init__(self, parent: Path | None = None) -> None:
        """`parent`: an existing folder; None = the system's for temporary files.

        Removes the folders there that belong to this user and to no process that lives.
        """
        place = Path(tempfile.gettempdir()) if parent is None else parent
        _remove_abandoned(place)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        unlocked = self.path / f"{_OWNER}.new"
        self._file = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        unlocked.rename(self.path / _OWNER)  # only now: a file of that name without a lock has no owner

    def close(self) -> None:
        """Remove it. May be called again."""
        if self._file >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


def _remove_abandoned(place: Path) -> None:
    """Remove what processes left that were killed. What cannot be looked at is left alone, as is a folder without an
    owner's file: it may be a moment old."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            file = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: its process lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(file)
