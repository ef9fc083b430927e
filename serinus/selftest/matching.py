"""matching: which planted fault a violation is the report of, and what each fault must be reported as."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from types import MappingProxyType

from serinus.canary import Violation
from serinus.canary.perturb import MODES, Injection
from serinus.kernels import Reason
from serinus.selftest.fixture import Planted

_FIELDS = {
    "token": Reason.VERIFY_TOKEN,
    "position": Reason.VERIFY_POSITION,
    "hash": Reason.VERIFY_CHAIN_HASH,
    "digest": Reason.VERIFY_REAL_KV_HASH,
}
_IN_ROWS = ("req_to_token", "foreign_page")
"""Row entries are changed, no bytes."""
_ALONE: Mapping[str, Sequence[str]] = MappingProxyType({})
_ELSEWHERE = ("tier_bytes", "transfer_bytes")
"""Damaged on another tier or on the way: the slot within the page is known, the page is not."""
Report = tuple[str, Violation]
"""The side that found it, and the violation."""


def must_say(injection: Injection, *, same_position: bool) -> tuple[Reason, tuple[str, ...]]:
    """(the reason, the checks) that a fault must be reported with: all of these checks."""
    place, mode = injection.place, MODES[injection.mode]
    if place is not None and place.lane:
        return _FIELDS[place.field], (place.lane.split("_")[0],)
    if injection.mode in _IN_ROWS:
        reason = Reason.VERIFY_CHAIN_HASH if same_position else Reason.VERIFY_POSITION
        return reason, ("HEAD", "TAIL")
    if injection.mode == "next_token_swap":
        return Reason.WRITE_TOKEN, ("HEAD",)
    return Reason.VERIFY_REAL_KV_HASH, ("SWEEP",) if mode.found_by == "SWEEP" else ("TAIL",)


def _is_of_host(violation: Violation) -> bool:
    """Whether it is of a host page: the copy of one that failed on the device is looked at, and has the same damage."""
    return violation.tag.startswith("HOST_")


def matched(
    planted: Sequence[Planted], reports: Iterable[Report], finder: str, page_size: int, ranks: Sequence[str] = ("",),
    takers: Mapping[str, Sequence[str]] = _ALONE,
) -> Matches:  # fmt: skip
    """Match what was found with what was planted. `finder`: the side that must find it; `ranks`: the names of the ranks
    of either side; `takers`: by rank those of the other side that get what it sends, where that is not the rank of its
    own name."""
    matches = Matches(planted, finder, page_size, ranks, takers)
    for side, violation in reports:
        matches.take(side, violation)
    return matches


class Matches:
    """Reports by the fault that explains them. A report of a page that is not known explains one fault only.

    Damaged KV is reported by the rank that holds it and by no other; of a page that was handed over, by the rank of the
    other engine with the same heads and layers, or of latent rows, which one slice sends to all, by each of them. Wrong
    tokens are written by all ranks, and all report them."""

    def __init__(
        self, planted: Sequence[Planted], finder: str, page_size: int, ranks: Sequence[str],
        takers: Mapping[str, Sequence[str]],
    ) -> None:  # fmt: skip
        self._planted, self._finder, self._page_size, self._ranks = planted, finder, page_size, ranks
        self._takers = takers
        self.by_fault: list[list[Report]] = [[] for _ in planted]
        self.unexplained: list[Report] = []

    def take(self, side: str, violation: Violation) -> None:
        """One more report, in the order of the steps."""
        # What follows from a fault that has a report beside this one is its own, before it is the first of another.
        faults = range(len(self._planted))
        known = [index for index in faults if self.by_fault[index]]
        # Each stamp is held against that of the other half too, which may be the first to be reported.
        for indices, halves in ((known, ""), (faults, "own"), (faults, "other"), (faults, "")):
            for index in indices:
                if self._fits(index, violation) and self._explains(self._planted[index], side, violation, halves):
                    self.by_fault[index].append((side, violation))
                    return
        self.unexplained.append((side, violation))

    def detected(self) -> list[int | None]:
        """Of each fault the step of its finder's first report, once all of its checks have reported it; None = it was
        not found, or not as it must be."""
        return [self._step(index) for index in range(len(self._planted))]

    def _step(self, index: int) -> int | None:
        injection = self._planted[index].injection
        reports = [violation for side, violation in self.by_fault[index] if side == self._finder]
        same = bool(reports) and all(
            violation.stored_position == violation.position for violation in reports
            if violation.position == injection.position
        )  # fmt: skip
        reason, checks = must_say(injection, same_position=same)
        half = injection.place.half if injection.place is not None else ""
        firsts = []
        ranks = self._ranks
        if MODES[injection.mode].has_part:
            ranks = self._holders(self._planted[index], self._finder)
        for check, rank in product(checks, ranks):
            steps = [
                violation.step for violation in reports
                if (reason in violation.reasons and violation.tag.startswith(f"{check}_{half}")
                    and violation.rank == rank)
            ]  # fmt: skip
            if not steps:
                return None
            firsts.append(min(steps))
        return max(firsts)

    def _fits(self, index: int, violation: Violation) -> bool:
        """Whether a fault whose page is not known has this very page, or none yet."""
        planted = self._planted[index]
        if planted.injection.mode not in _ELSEWHERE and planted.side == self._finder:
            return True
        mine = self.by_fault[index]
        return not mine or any(
            (each.rid == violation.rid or _is_of_host(violation)) and abs(each.position - violation.position) <= 1
            for _, each in mine
        )  # fmt: skip

    def _explains(self, planted: Planted, side: str, violation: Violation, halves: str) -> bool:
        """`halves`: "own" or "other" = only what is said of the field that was damaged, on that half's stamp or on the
        other's; empty = also what follows from it."""
        injection = planted.injection
        mode = MODES[injection.mode]
        if violation.reasons & ~mode.reasons:
            return False
        if injection.mode == "next_token_swap":
            return {violation.stored_token, violation.expected_token} == {injection.before, injection.after}
        if violation.part.name != injection.part or violation.rank not in self._holders(planted, side):
            return False
        if injection.mode in _IN_ROWS:
            # A step under way may have written on a foreign chain: found where that ends, or at its last slot.
            return violation.rid == injection.rid and violation.position >= injection.position
        place = injection.place
        assert place is not None, f"testing: {injection.line()} has no place"
        check, half, _ = violation.tag.split("_")
        if check == "HOST" and injection.mode != "tier_bytes":
            return False
        if not place.lane and (
            check == "HEAD" or half != place.half or violation.reasons != Reason.VERIFY_REAL_KV_HASH
        ):
            return False
        # Of latent rows HEAD and TAIL of K are twins: their tokens are held against each other.
        twin = violation.part.halves == 1 and place.field == "token" and violation.reasons == Reason.VERIFY_TOKEN
        if place.lane and check != place.lane.split("_")[0] and not (_is_of_host(violation) or twin):
            return False
        if injection.mode in _ELSEWHERE:
            return self._at_offset(injection, violation, halves)
        if side != self._finder:  # handed over in mode log: found there again
            return side != planted.side and injection.position in (-1, violation.position)
        if side == planted.side:
            return violation.slot == injection.slot and injection.position in (-1, violation.position)
        return violation.position == injection.position

    def _holders(self, planted: Planted, side: str) -> Sequence[str]:
        """The ranks of a side that have what was damaged."""
        rank = planted.injection.rank
        return (rank,) if side == planted.side else self._takers.get(rank, (rank,))

    def _at_offset(self, injection: Injection, violation: Violation, halves: str) -> bool:
        place, offset = injection.place, violation.position % self._page_size
        assert place is not None, "testing: a page without a place"
        if offset == injection.slot:
            own = not place.lane or violation.tag.startswith((place.lane, f"HOST_{place.lane[-1]}"))
            is_said = not place.lane or _FIELDS[place.field] in violation.reasons
            return not halves or (is_said and own == (halves == "own"))
        after = (injection.slot + 1) % self._page_size
        follows = offset == after and violation.reasons == Reason.VERIFY_CHAIN_HASH
        return not halves and bool(place.lane) and follows
