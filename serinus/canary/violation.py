"""Violation: one broken promise about KV, with the evidence needed to find the cause. Plain data."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from serinus.core.parts import Part
from serinus.kernels import Reason, StampLane, stamp_lanes

OVERFLOW: Final = ("ring_overflow", "ANY")
"""Reason and tag under which violations without detail are counted."""


def launch_tag(lane: StampLane, part: Part, *, sweep: bool) -> str:
    """The name of a check: {HEAD, TAIL, SWEEP}_{K, V}_{FULL, SWA}; of latent rows _K_LATENT."""
    when, half = lane.name.split("_")
    return f"{'SWEEP' if sweep else when}_{half}_{part.name}"


def host_tag(lane: StampLane, part: Part) -> str:
    """The name of the check of host pages that go to the storage or come from it: HOST_{K, V}_{FULL, SWA}, or
    HOST_K_LATENT."""
    return f"HOST_{lane.name[-1]}_{part.name}"


def reason_names(reasons: Reason) -> tuple[str, ...]:
    """Names of the reasons in lower case, as in logs and metrics."""
    return tuple(str(reason.name).lower() for reason in Reason if reason in reasons)


def possible_counts(parts: Iterable[Part]) -> frozenset[tuple[str, str]]:
    """Reason and tag of every violation that can be, of these parts: the series that exist at 0 before there is one."""
    written = Reason.WRITE_TOKEN | Reason.WRITE_POSITION
    return (
        frozenset({OVERFLOW})
        | frozenset(
            (reason, launch_tag(lane, part, sweep=sweep))
            for part in parts
            for lane in stamp_lanes(part)
            for sweep in (False, True)
            for reason in reason_names(~written if lane >= StampLane.TAIL_K else ~Reason(0))
            if lane >= StampLane.TAIL_K or not sweep
        )
        | frozenset(
            (reason, host_tag(lane, part))
            for part in parts
            for lane in stamp_lanes(part)[part.halves :]
            for reason in reason_names(~written)
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """What was expected of one slot, what was found there, and the requests concerned."""

    step: int
    """Step, counted by the rank's canary, in which it was found."""
    tag: str
    """Which check found it (launch_tag)."""
    reasons: Reason
    part: Part
    slot: int
    page: int
    position: int
    """Position the slot was checked as."""
    stored_position: int
    stored_token: int
    expected_token: int
    stored_hash: int
    expected_hash: int
    stored_digest: int
    found_digest: int
    rid: str = ""
    """The request whose row (or arrival) was checked; empty for the sweep."""
    client: str = ""
    """What its client calls that request, where it is another name: a prefill engine calls it by the handoff."""
    owner: str = ""
    """The owner of the page, by the ledger, in words."""
    users: tuple[str, ...] = ()
    """Requests whose rows name the page."""
    history: str = ""
    """The page's last operations."""
    rank: str = ""
    """Name of the rank whose pools hold it, where the engine has several ranks."""

    def line(self) -> str:
        """key=value in a fixed order, for the log."""
        values = {
            "launch_tag": self.tag,
            "fail_reason": "|".join(reason_names(self.reasons)),
            "slot_idx": self.slot,
            "position": self.position,
            "stored_position": self.stored_position,
            "stored_token": self.stored_token,
            "expected_token": self.expected_token,
            "stored_chain_hash": f"{self.stored_hash & _MASK64:#018x}",
            "expected_chain_hash": f"{self.expected_hash & _MASK64:#018x}",
            "stored_kv_digest": f"{self.stored_digest & _MASK64:#018x}",
            "found_kv_digest": f"{self.found_digest & _MASK64:#018x}",
            "step": self.step,
            "page": self.page,
            "req": self.rid or "-",
            "owner": self.owner.replace(" ", "_") or "-",
            "users": ",".join(self.users) or "-",
            "history": self.history.replace(" ", "_") or "-",
        }
        if self.client:
            values["client"] = self.client
        if self.rank:
            values["rank"] = self.rank.replace(" ", "_")
        return "kv_canary violation: " + " ".join(f"{key}={value}" for key, value in values.items())

    def as_json(self) -> dict[str, Any]:
        """The violation as `GET /canary` lists it."""
        values = asdict(self)
        values.update(reasons=list(reason_names(self.reasons)), part=self.part.name, users=list(self.users))
        for name in ("stored_hash", "expected_hash", "stored_digest", "found_digest"):
            values[name] = f"{values[name] & _MASK64:#018x}"
        return values


_MASK64 = (1 << 64) - 1


class ViolationLog:
    """The latest violations, and how many there ever were."""

    def __init__(self, kept: int = 256) -> None:
        self._latest: deque[Violation] = deque(maxlen=kept)
        self.counts: Counter[tuple[str, str]] = Counter()
        """Number of violations by (reason, tag)."""
        self.total = 0
        """How many were ever added, those no longer kept included."""

    def overflowed(self, lost: int) -> None:
        """So many more of which no detail is known."""
        self.total += lost
        self.counts[OVERFLOW] += lost

    def add(self, violation: Violation) -> None:
        """One more; a violation of several reasons counts under each."""
        self._latest.append(violation)
        self.total += 1
        for reason in reason_names(violation.reasons):
            self.counts[reason, violation.tag] += 1

    def __iter__(self) -> Iterator[Violation]:
        """The latest, oldest first."""
        return iter(tuple(self._latest))

    def __len__(self) -> int:
        return len(self._latest)
