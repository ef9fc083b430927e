"""Pages that a closed grant may still write: held by nobody else until an event says that nobody can. Pure.

Push: until every writer rank acknowledged the ABORT, or its peer was cut off at the transport. Pull: until our own
reads have ended. Time only makes us ask louder (a peer that does not acknowledge is cut off); it never frees a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from serinus.core.parts import PageSpan
from serinus.pd.actions import DecodeAction, QuarantineOver
from serinus.pd.asked import Asked
from serinus.pd.modes import Mode

__all__ = ["Quarantines", "Ward", "ward_of"]


@dataclass(slots=True, kw_only=True)
class Ward:
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


def ward_of(handoff: Asked, now: float) -> Ward | None:
    """What must be held of a handoff that ends now; None = nothing: nobody can write its pages any more."""
    landing = handoff.landing
    if landing is None or handoff.mode is Mode.RECEIVER_CHECKED:
        return None
    reads = handoff.copying if handoff.mode is Mode.PULL else 0
    writers = {rank for _, rank in landing.due} if handoff.mode is Mode.PUSH else set()
    if not reads and not writers:
        return None
    return Ward(
        grant=handoff.grant, xid=handoff.xid, peer=handoff.peer, address=handoff.address,
        spans=tuple(landing.spans.values()), since=now, writers=writers, reads=reads,
    )  # fmt: skip


class Quarantines:
    """All of them."""

    def __init__(self) -> None:
        self._wards: dict[int, Ward] = {}

    def __len__(self) -> int:
        return len(self._wards)

    def __iter__(self) -> Iterator[Ward]:
        return iter(list(self._wards.values()))

    @property
    def page_count(self) -> int:
        """Pages held now."""
        return sum(len(span.pages) for ward in self._wards.values() for span in ward.spans)

    def add(self, ward: Ward) -> None:
        """Hold its pages."""
        assert ward.grant not in self._wards, f"pd: grant {ward.grant} is in quarantine already"
        self._wards[ward.grant] = ward

    def acknowledged(self, grant: int, peer: str, ranks: tuple[int, ...], now: float, out: list[DecodeAction]) -> bool:
        """These ranks will write nothing more. False = nothing of the kind is awaited: nothing changes."""
        ward = self._wards.get(grant)
        if ward is None or ward.peer != peer or not ward.writers:
            return False
        ward.writers -= set(ranks)
        self._free_if_over(ward, now, out)
        return True

    def fenced(self, peer: str, now: float, out: list[DecodeAction]) -> None:
        """Nothing that came over this connection can write any more."""
        for ward in self:
            if ward.peer == peer and ward.writers:
                ward.writers.clear()
                self._free_if_over(ward, now, out)

    def read_ended(self, xid: str, now: float, out: list[DecodeAction]) -> Ward | None:
        """One read of a closed handoff has ended; its ward if it is known (over, where no read is left)."""
        ward = next((ward for ward in self._wards.values() if ward.xid == xid), None)
        if ward is None or not ward.reads:
            return None
        ward.reads -= 1
        self._free_if_over(ward, now, out)
        return ward

    def awaited(self, peer: str) -> bool:
        """Whether a word (or a fence) of this connection is awaited."""
        return any(ward.peer == peer and ward.writers for ward in self._wards.values())

    def floor(self, address: str, otherwise: int) -> int:
        """Lowest grant of a peer that is not over."""
        return min((ward.grant for ward in self._wards.values() if ward.address == address), default=otherwise)

    def _free_if_over(self, ward: Ward, now: float, out: list[DecodeAction]) -> None:
        if not ward.writers and not ward.reads:
            del self._wards[ward.grant]
            out.append(QuarantineOver(grant=ward.grant, spans=ward.spans, seconds=now - ward.since))
