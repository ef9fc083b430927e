"""A secret that the processes of one user on one machine share without being told: a file that only this user reads."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from serinus.core.ids import new_token

_SECRET_CHARS = 32


def user_secret(places: tuple[Path, ...] = ()) -> str:
    """The secret of this user, made where there is none yet; empty where no file can be kept.

    `places`: folders, best first; () = the user's cache folder, then the system's for temporary files.
    """
    for folder in places or user_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            return _kept_in(folder / f"serinus-{os.getuid()}.secret")
    return ""


def user_folders() -> tuple[Path, ...]:
    """Where files of this user may be kept, best first: the user's cache, then the system's folder for temporary ones,
    in which others have theirs too."""
    temporary = Path(tempfile.gettempdir())
    try:
        return Path.home() / ".cache" / "serinus", temporary
    except RuntimeError:  # this user has no home
        return (temporary,)


def _kept_in(file: Path) -> str:
    """Raises OSError: it cannot be made, or another user may read or have written it."""
    if not file.exists():
        handle, new = tempfile.mkstemp(dir=file.parent, prefix=file.name)  # for this user alone
        try:
            os.write(handle, new_token().hex().encode())
            with contextlib.suppress(FileExistsError):
                os.link(new, file)  # of two processes at one time, one is first
        finally:
            os.close(handle)
            os.unlink(new)
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        about = os.fstat(handle)
        found = os.read(handle, _SECRET_CHARS)
    finally:
        os.close(handle)
    private = about.st_uid == os.getuid() and not about.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if not private or len(found) != _SECRET_CHARS:
        raise PermissionError(f"core: {file} is no secret of this user")
    return found.decode()
