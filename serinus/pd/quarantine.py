"""Pages that a closed grant may still write: given to no other request until an event says that it cannot. Pure.

Push: until every writer rank acknowledged the ABORT, or its peer was cut off at the transport. Pull: until our own
reads have ended. Time only makes us ask louder (a peer that does not acknowledge is cut off); it never frees a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from serinus.core.parts import PageSpan
from serinus.pd.actions import DecodeAction, QuarantineOver
from serinus.pd.decode_handoff import DecodeHandoff
from serinus.pd.modes import Mode


@dataclass(slots=True, kw_only=True)
class QuarantineEntry:
    """The pages of one closed grant."""

    grant: int
    xid: str
    peer: str
    """The connection over which it was granted."""
    address: str
    spans: tuple[PageSpan, ...]
    since: float
    writers: set[int]
    """Source ranks that may still write; push."""
    reads: int = 0
    """Own reads under way; pull."""


def entry_of(handoff: DecodeHandoff, now: float) -> QuarantineEntry | None:
    """What must be held of a handoff that ends now; None = nothing: its pages can be written no more."""
    account = handoff.account
    if account is None or handoff.mode is Mode.RECEIVER_CHECKED:
        return None
    reads = handoff.copying if handoff.mode is Mode.PULL else 0
    writers = {rank for _, rank in account.due} if handoff.mode is Mode.PUSH else set()
    if not reads and not writers:
        return None
    return QuarantineEntry(
        grant=handoff.grant, xid=handoff.xid, peer=handoff.peer, address=handoff.address,
        spans=tuple(account.spans.values()), since=now, writers=writers, reads=reads,
    )  # fmt: skip


class Quarantines:
    """The quarantine entries of one decode engine."""

    def __init__(self) -> None:
        self._entries: dict[int, QuarantineEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QuarantineEntry]:
        return iter(list(self._entries.values()))

    @property
    def page_count(self) -> int:
        """Number of pages held now, over all parts."""
        return sum(len(span.pages) for entry in self._entries.values() for span in entry.spans)

    def add(self, entry: QuarantineEntry) -> None:
        """Hold the pages of a closed grant. Raises AssertionError: it is held already."""
        assert entry.grant not in self._entries, f"pd: grant {entry.grant} is in quarantine already"
        self._entries[entry.grant] = entry

    def acknowledged(self, grant: int, peer: str, ranks: tuple[int, ...], now: float, out: list[DecodeAction]) -> bool:
        """These ranks will write nothing more. False = nothing of the kind is awaited: nothing changes."""
        entry = self._entries.get(grant)
        if entry is None or entry.peer != peer or not entry.writers:
            return False
        entry.writers -= set(ranks)
        self._free_if_over(entry, now, out)
        return True

    def fenced(self, peer: str, now: float, out: list[DecodeAction]) -> None:
        """Nothing that came over this connection can write any more."""
        for entry in self:
            if entry.peer == peer and entry.writers:
                entry.writers.clear()
                self._free_if_over(entry, now, out)

    def read_ended(self, xid: str, now: float, out: list[DecodeAction]) -> QuarantineEntry | None:
        """One read of a closed handoff has ended; its entry if it is known (over, where no read is left)."""
        entry = next((entry for entry in self._entries.values() if entry.xid == xid), None)
        if entry is None or not entry.reads:
            return None
        entry.reads -= 1
        self._free_if_over(entry, now, out)
        return entry

    def awaited(self, peer: str) -> bool:
        """Whether an acknowledgement (or a fence) of this connection is awaited."""
        return any(entry.peer == peer and entry.writers for entry in self._entries.values())

    def floor(self, address: str, otherwise: int) -> int:
        """Lowest grant of a peer that is not over."""
        return min((entry.grant for entry in self._entries.values() if entry.address == address), default=otherwise)

    def _free_if_over(self, entry: QuarantineEntry, now: float, out: list[DecodeAction]) -> None:
        if not entry.writers and not entry.reads:
            del self._entries[entry.grant]
            out.append(QuarantineOver(grant=entry.grant, spans=entry.spans, seconds=now - entry.since))
