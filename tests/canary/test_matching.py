"""Which planted fault a violation is the report of: where one report would fit two faults, each gets its own."""

from __future__ import annotations

from dataclasses import replace

from serinus.canary import Violation
from serinus.canary.perturb import Injection
from serinus.canary.perturb.plan import Place
from serinus.core.parts import Part
from serinus.kernels import Reason
from serinus.selftest import Planted
from serinus.selftest.matching import matched

PAGE = 4


def planted(mode: str, slot: int, place: Place | None, **more: object) -> Planted:
    injection = Injection(mode=mode, step=1, part="FULL", slot=slot, place=place, **more)  # type: ignore[arg-type]
    return Planted(injection=injection, side="prefill", steps={"prefill": 1, "decode": 0})


def report(tag: str, position: int, reasons: Reason, rid: str) -> tuple[str, Violation]:
    violation = Violation(
        step=2, tag=f"{tag}_FULL", reasons=reasons, part=Part.FULL, slot=40 + position, page=10 + position // PAGE,
        position=position, stored_position=position, stored_token=0, expected_token=0, stored_hash=0, expected_hash=0,
        stored_digest=0, found_digest=0, rid=rid,
    )  # fmt: skip
    return "decode", violation


def test_a_damaged_digest_does_not_take_the_report_of_a_byte_of_the_other_half() -> None:
    """Both lie in slot 0 of a page of one request, in keys and in values, and both are wrong digests."""
    faults = [
        planted("transfer_bytes", 0, Place(lane="TAIL_V", field="digest")),
        planted("transfer_bytes", 0, Place(layer=2, half="K", head=0)),
    ]
    found = [
        report("TAIL_K", 12, Reason.VERIFY_REAL_KV_HASH, "r"),
        report("TAIL_V", 4, Reason.VERIFY_REAL_KV_HASH, "r"),
    ]
    matches = matched(faults, found, "decode", PAGE)
    assert matches.detected() == [2, 2]
    assert not matches.unexplained


def test_what_follows_on_the_other_half_is_of_the_same_fault() -> None:
    """Keys are held against values: a wrong hash of the values' stamp is told at the keys' first."""
    faults = [
        planted("transfer_bytes", 0, Place(lane="TAIL_K", field="position")),
        planted("transfer_bytes", 0, Place(lane="TAIL_V", field="hash")),
    ]
    found = [
        report("TAIL_K", 8, Reason.VERIFY_POSITION, "r1"),
        report("TAIL_K", 4, Reason.VERIFY_CHAIN_HASH, "r2"),
        report("TAIL_V", 4, Reason.VERIFY_CHAIN_HASH, "r2"),
        report("TAIL_V", 5, Reason.VERIFY_CHAIN_HASH, "r2"),
    ]
    matches = matched(faults, found, "decode", PAGE)
    assert matches.detected() == [2, 2]
    assert not matches.unexplained


def test_what_follows_from_a_stamp_may_be_the_first_that_is_told_of_it_and_of_no_fault_of_another_page() -> None:
    """The prompt ends behind the damaged slot: it is bound to its request before it is held against its twin."""
    place = Place(lane="TAIL_V", field="token")
    faults = [planted("tier_bytes", 3, place), planted("tier_bytes", 3, place)]
    first = [report("TAIL_V", 19, Reason.VERIFY_TOKEN, "r1"), report("HOST_V", 19, Reason.VERIFY_TOKEN, "")]
    second = [
        report("TAIL_V", 39, Reason.VERIFY_CHAIN_HASH, "r2"),
        report("TAIL_K", 39, Reason.VERIFY_TOKEN, "r2"),
        report("TAIL_V", 39, Reason.VERIFY_TOKEN, "r2"),
        report("TAIL_V", 40, Reason.VERIFY_CHAIN_HASH, "r2"),
    ]
    matches = matched(faults, [*first, *second], "decode", PAGE)
    assert matches.by_fault == [first, second]
    assert matches.detected() == [2, 2]
    assert not matches.unexplained
    other = report("TAIL_V", 59, Reason.VERIFY_CHAIN_HASH, "r3")
    assert matched(faults, [*first, *second, other], "decode", PAGE).unexplained == [other]
    # What follows alone is not the report that a fault must have.
    assert matched(faults, [*first, second[0]], "decode", PAGE).detected() == [2, None]


def test_of_latent_rows_the_twin_of_a_damaged_token_is_told_too_and_is_not_the_report_that_there_must_be() -> None:
    def latent(tag: str, reasons: Reason) -> tuple[str, Violation]:
        side, violation = report(tag, 6, reasons, "r")
        return side, replace(violation, tag=f"{tag}_LATENT", part=Part.LATENT)

    fault = planted("tier_bytes", 2, Place(lane="TAIL_K", field="token"))
    fault = replace(fault, injection=replace(fault.injection, part="LATENT"))
    twin, own = latent("HEAD_K", Reason.VERIFY_TOKEN), latent("TAIL_K", Reason.VERIFY_TOKEN)
    assert matched([fault], [twin, own], "decode", PAGE).unexplained == []
    assert matched([fault], [twin, own], "decode", PAGE).detected() == [2]
    assert matched([fault], [twin], "decode", PAGE).detected() == [None]
    other = latent("HEAD_K", Reason.VERIFY_POSITION)
    assert matched([fault], [other, own], "decode", PAGE).unexplained == [other]


def test_latent_rows_that_one_slice_sends_damaged_are_reported_by_every_slice_that_got_them() -> None:
    ranks, stages = ("TP0 PP0", "TP1 PP0", "TP0 PP1", "TP1 PP1"), (("TP0 PP0", "TP1 PP0"), ("TP0 PP1", "TP1 PP1"))
    takers = {stage[0]: stage for stage in stages}
    fault = planted("transfer_bytes", 2, Place(layer=0, half="K", head=0))
    fault = replace(fault, injection=replace(fault.injection, part="LATENT", rank="TP0 PP1"))

    def told(rank: str) -> tuple[str, Violation]:
        side, violation = report("TAIL_K", 6, Reason.VERIFY_REAL_KV_HASH, "r")
        return side, replace(violation, tag="TAIL_K_LATENT", part=Part.LATENT, rank=rank)

    both = [told(rank) for rank in stages[1]]
    found = matched([fault], both, "decode", PAGE, ranks, takers)
    assert (found.unexplained, found.detected()) == ([], [2])
    assert matched([fault], both[:1], "decode", PAGE, ranks, takers).detected() == [None], "one slice is silent"
    other = told("TP1 PP0")
    assert matched([fault], [*both, other], "decode", PAGE, ranks, takers).unexplained == [other], "of another stage"
    own = ("prefill", told("TP1 PP1")[1])
    assert matched([fault], [own], "decode", PAGE, ranks, takers).unexplained == [own], "the sender's other slice"


def test_a_chunk_that_was_under_way_is_written_on_the_foreign_chain_and_found_at_its_last_slot() -> None:
    """With two stages: the entry of position 7 is wrong, a chunk of the positions 8 to 15 goes on from there."""
    fault = planted("req_to_token", 9, None, position=7, rid="r")
    both = Reason.VERIFY_POSITION | Reason.VERIFY_CHAIN_HASH
    found = [("prefill", report(f"{check}_K", 7, both, "r")[1]) for check in ("HEAD", "TAIL")]
    found.append(("prefill", report("HEAD_K", 15, Reason.VERIFY_CHAIN_HASH, "r")[1]))
    matches = matched([fault], found, "prefill", PAGE)
    assert not matches.unexplained
    before = ("prefill", report("HEAD_K", 6, Reason.VERIFY_CHAIN_HASH, "r")[1])
    assert matched([fault], [before], "prefill", PAGE).unexplained == [before]
