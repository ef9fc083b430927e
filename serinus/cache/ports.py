"""What the cache needs of the rooms that hold the bytes: a mover between device and host, and a store of pages.

Protocols only. `pool` has the real ones, `testing` the fakes. All calls return at once but `wait`; completions are
taken by `PrefixCache.poll`, the only place where they change state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serinus.core.moves import Move, MoveDone, PageOrigin, StorageDone
from serinus.core.parts import Part


class PageMover(Protocol):
    """Copies pages between the device pools and the host pools of one engine, one pool per part and tier."""

    def submit(self, moves: Sequence[Move]) -> None:
        """Begin copies; all moves of one op come in one call.

        A BACKUP reads what the device has computed by now (later forward passes do not write its pinned sources).
        A LOAD fills its targets layer by layer: forward passes that begin after this call wait for each layer.
        """

    def poll(self) -> list[MoveDone]:
        """The copies that ended since the last poll or wait, in the order in which they were submitted."""

    def wait(self, ops: Collection[int]) -> list[MoveDone]:
        """Block until these copies have ended; returns everything that `poll` would return then."""


class PageStorage(Protocol):
    """Pages outside the engine (files, memory), by key. A key names everything that shapes the bytes but the part.

    `key`: 16 bytes, a digest chained over the namespace and all tokens up to the page's end. Host pages given to a
    read or a write stay reserved until its StorageDone came; `cancel` is a hint. `origin`: what the pages are the KV
    of; None = not known, and only what the pages say of themselves can be checked.
    """

    def query(self, op: int, keys: Sequence[bytes], parts: Sequence[Part]) -> None:
        """Ask which keys are stored, for each part; those behind the first key that the first part lacks may count as
        missing."""

    def read(
        self, op: int, part: Part, keys: Sequence[bytes], pages: NDArray[np.int32], origin: PageOrigin | None = None
    ) -> None:
        """Fill host pages, in order, up to the first that is missing, torn, foreign, or not what its stamps vouch for
        (which is removed from the storage)."""

    def write(
        self, op: int, part: Part, keys: Sequence[bytes], pages: NDArray[np.int32], origin: PageOrigin | None = None
    ) -> None:
        """Store host pages, in order, up to the first that is not what its stamps vouch for; what is stored already
        costs nothing."""

    def remove(self, op: int, keys: Sequence[bytes]) -> None:
        """Delete these pages, of every part, and all stored pages that continue one of them; writes of them that were
        asked for earlier are undone too. Engines that share the storage learn it (`recalled`)."""

    def recalled(self) -> Sequence[bytes]:
        """Keys of pages that another engine removed since the last call: what was read of them must not be used."""

    def cancel(self, op: int) -> None:
        """The answer is not needed any more; its StorageDone still comes, sooner."""

    def poll(self) -> list[StorageDone]:
        """The operations that ended since the last poll."""
