"""Listings: which folders must be listed to know all names in them. Knows no pages."""

from __future__ import annotations

from collections.abc import Callable

from serinus.pool.storage.disk import FileSystem

_SETTLED_NS = 2 * 10**9
"""A folder that changed so short before it was listed may change again without another time: file systems tell
times to a clock tick (ext4, xfs and tmpfs before Linux 6.13: 1 to 10 ms), a second (ext3) or two (FAT)."""
_OWN = -1
"""Stands for the time of a folder that was listed while no other process wrote: once others do it says nothing."""


class Listings:
    """Of what folders one process knows all names. `is_new` is asked by one thread at a time."""

    def __init__(self, disk: FileSystem, now_ns: Callable[[], int]) -> None:
        """`now_ns`: the file system's time; see FileSystem."""
        self._disk, self._now_ns = disk, now_ns
        self._listed: dict[str, int] = {}

    def is_new(self, folder: str, *, alone: bool = False) -> bool:
        """Whether names may have come to a folder since this was asked last. The caller lists it then, and says
        `forget` where it cannot. `alone`: only this process has written since, and knows what. Raises OSError.

        Cost: a look at the folder, none where this process is alone.
        """
        if alone and folder in self._listed:
            return False
        changed_ns = self._disk.changed_ns(folder)
        if self._listed.get(folder) == changed_ns:
            return False
        self.forget(folder)
        if changed_ns < self._now_ns() - _SETTLED_NS:
            self._listed[folder] = changed_ns
        elif alone:
            self._listed[folder] = _OWN
        return True

    def forget(self, folder: str) -> None:
        """A name of it is not known any more, also one that the caller of `is_new` is about to see."""
        self._listed.pop(folder, None)

    def clear(self) -> None:
        """Forget what is known of all folders."""
        self._listed.clear()
