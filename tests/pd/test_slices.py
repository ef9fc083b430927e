"""Ranks of another layout read their own layers and heads of pages in place: what lands, what is never committed."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from serinus.core.errors import TransferFailed
from serinus.core.parts import Part
from serinus.pd import AbortPrefill, CancelHandoff, Landed, PieceMoved, PrefillDrained, RankLayout, Recompute, Routes
from serinus.pd.backends import CudaIpcBackend, Region, rows_of, strips_between_rows, whole_rows
from serinus.pd.layout import cut
from serinus.pd.pages import TakeIn
from serinus.pd.slices import slices
from serinus.pd.stamps import StampIntake, StampOutlet
from serinus.wire import Gone
from tests.pd import test_stamps
from tests.pd.slices_pair import END, HALF, PAGE_SIZE, TOKENS, HostIpc, SlicesPair, make_pool, shaped

SHAPES = {
    "TP2 to one": ({"tp": 2}, {}),
    "one to TP2": ({}, {"tp": 2}),
    "PP2 to TP2": ({"pp": 2}, {"tp": 2}),
    "TP2 x PP2 to one": ({"tp": 2, "pp": 2}, {}),
    "one to TP2 x PP2": ({}, {"tp": 2, "pp": 2}),
    "three stages, cut by hand, to TP2 x PP2": ({"pp": 3, "stage_layers": (1, 2, 1)}, {"tp": 2, "pp": 2}),
    "TP2 each": ({"tp": 2}, {"tp": 2}),
}
SLIDING = msgspec.structs.replace(HALF, layer_parts=bytes([0, 1, 1, 0]), window=7)
LATENT = msgspec.structs.replace(
    HALF, layer_parts=bytes([Part.LATENT] * 4), kv_head_count=1, lanes=("latent",), head_size=8
)  # fmt: skip


@lru_cache(maxsize=32)
def prompt_kv(part: Part, layers: int, heads: int, head_bytes: int) -> NDArray[np.uint8]:
    """[token, layer of the part, half, head, byte]."""
    shape = (TOKENS, layers, part.halves, heads, head_bytes)
    return np.random.default_rng(int(part)).integers(0, 256, shape, dtype=np.uint8)


def kv_of(layout: RankLayout, part: Part) -> NDArray[np.uint8]:
    signature = layout.signature
    layers = list(signature.layer_parts or bytes(signature.layer_count)).count(part)
    return prompt_kv(part, layers, signature.kv_head_count, 2 * signature.head_size)


def pages_of(layout: RankLayout, rank: int, part: Part) -> NDArray[np.uint8]:
    """The prompt as one rank has it, page by page."""
    kv = kv_of(layout, part)
    if layout.signature.stamp_bytes:
        return test_stamps.pages_of(layout, rank, part, kv, 0, END)
    shard = layout.shards[rank]
    mine = kv[:, shard.part_layers[part].start : shard.part_layers[part].stop, :, shard.heads.start : shard.heads.stop]
    by_page = mine.reshape(END, PAGE_SIZE, *mine.shape[1:]).transpose(0, 2, 3, 1, 4, 5)
    return np.ascontiguousarray(by_page).reshape(END, -1)


def pair(shape: str, base: Any = HALF, **settings: Any) -> SlicesPair:
    ours, theirs = SHAPES[shape]
    return SlicesPair(shaped(base, **ours), shaped(base, **theirs), pages_of, **settings)


def check_landed(both: SlicesPair) -> None:
    """All of it is where it belongs, byte by byte, and nothing is left."""
    assert [end for end in both.ends if isinstance(end, Recompute)] == []
    (landed,) = both.ended(Landed)
    assert landed.backend == "cuda_ipc"
    assert len(both.ended(PrefillDrained)) == 1
    target = both.d.layout
    for shard in target.shards:
        for part in target.parts:
            if target.page_bytes(shard.rank, part):
                first = both.first[part]
                wanted = pages_of(target, shard.rank, part)
                assert np.array_equal(both.landed(shard.rank, part)[first:], wanted[first:]), (shard.rank, part)
                assert (both.landed(shard.rank, part)[:first] == 0xEE).all(), "pages that were not asked for"
    check_empty(both)


def check_empty(both: SlicesPair) -> None:
    assert both.d.port.machine.handoff_count == both.p.port.machine.handoff_count == 0
    assert not both.d.port.machine.quarantined_pages
    for worker in both.d.workers:
        assert not worker.busy
        for attached in worker._peers.values():
            assert attached.intake is not None
            stamps = attached.intake._stamps
            assert stamps is None or not (stamps._kept or stamps._begun)


LAID = [(shape, laid) for shape in SHAPES for laid in ((True, True), (False, True), (True, False))]
"""Whether the pages of prefill, and of decode, are one run each: where they go whole they are laid alike."""


@pytest.mark.parametrize(
    ("shape", "page_first"), [case for case in LAID if case[0] != "TP2 each" or all(case[1])], ids=str
)
def test_every_rank_reads_its_own_layers_and_heads_in_place(shape: str, page_first: tuple[bool, bool]) -> None:
    both = pair(shape, page_first=page_first)
    both.begin()
    both.settle()
    check_landed(both)


@pytest.mark.parametrize("base", [SLIDING, LATENT], ids=["sliding", "latent"])
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_that_slide_and_latent_rows_are_read_in_slices_as_well(shape: str, base: Any) -> None:
    both = pair(shape, base)
    both.begin()
    both.settle()
    check_landed(both)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["none", "partial", "all"])
@pytest.mark.parametrize("base", [HALF, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("shape", SHAPES)
def test_stamps_come_with_the_message_and_hold_for_what_was_read(shape: str, base: Any, data: str) -> None:
    both = pair(shape, msgspec.structs.replace(base, stamp_bytes=128, stamp_data=data))
    both.begin()
    both.settle()
    check_landed(both)


@pytest.mark.parametrize("data", ["partial", "all"])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "TP2 each"])
def test_stamps_that_the_owner_cuts_are_those_that_a_reader_of_whole_pages_would(shape: str, data: str) -> None:
    """Of rows as wide as those of models, and of any bytes."""
    base = msgspec.structs.replace(HALF, head_size=32, stamp_bytes=128, stamp_data=data)
    ours, theirs = SHAPES[shape]
    source, target = shaped(base, **ours), shaped(base, **theirs)
    pages, rng = np.array([5, 2, 9], np.int32), np.random.default_rng(8)
    pools = [make_pool(source, shard.rank, Part.FULL, True) for shard in source.shards]
    for pool in pools:
        pool.write_pages(pages, rng.integers(0, 256, (3, pool.page_bytes), dtype=np.uint8))
    for shard in target.shards:
        there, here = StampIntake(source, target), StampIntake(source, target)
        here.expect("x")
        out, joined = np.zeros((3, target.page_bytes(shard.rank, Part.FULL)), np.uint8), None
        for item in (item for item in cut(source, target) if item.target_rank == shard.rank):
            pool = pools[item.source_rank]
            there.land("x", item, pool.read_pages(pages), 0, out, 0)
            joined = here.join("x", Part.FULL, StampOutlet(source, [item]).cut(pool, pages)[0], 0)
        assert joined is not None
        assert np.array_equal(out[:, -PAGE_SIZE * 128 :], joined)


STAMPED = msgspec.structs.replace(HALF, stamp_bytes=128, stamp_data="all")


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "TP2 each"])
def test_bytes_that_were_damaged_before_they_were_summed_show_at_their_stamp_and_at_no_other(shape: str) -> None:
    both = pair(shape, STAMPED)
    token, pool = 9, both.p.pools[-1][Part.FULL]
    page = both.sources[Part.FULL][token // PAGE_SIZE]
    pool.layers[-1][1].view(-1, PAGE_SIZE, *pool.layers[-1][1].shape[-2:])[page, token % PAGE_SIZE, -1, -1] += 1
    both.begin()
    both.settle()
    assert len(both.ended(Landed)) == 1
    landed = {shard.rank: both.landed(shard.rank, Part.FULL) for shard in both.d.layout.shards}
    wrong = test_stamps.wrong_slots(both.d.layout, Part.FULL, landed, kv_of(both.d.layout, Part.FULL))
    assert {at for _, at in wrong} == {token}


@pytest.mark.parametrize("stamps", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_pages_that_have_another_owner_when_they_are_read_are_found_by_their_sums(shape: str, stamps: bool) -> None:
    """In one source rank, one row of one head: each rank that takes it finds it."""
    for rank in range(len(shaped(**SHAPES[shape][0]).shards)):
        both = pair(shape, STAMPED if stamps else HALF)
        both.begin()
        while not both.gathers:
            both.turn()
        pool = both.p.pools[rank][Part.FULL]
        page = both.sources[Part.FULL][1]
        pool.layers[0][0].view(-1, PAGE_SIZE, *pool.layers[0][0].shape[-2:])[page, 2, 0, 0] += 1
        both.settle()
        (end,) = both.ended(Recompute)
        assert end.code == "digest"
        assert not both.ended(Landed)
        assert len(both.ended(AbortPrefill)) == 1
        check_empty(both)


@pytest.mark.parametrize("shape", ["TP2 to one", "one to TP2"])
def test_stamps_that_changed_on_their_way_are_found_by_the_digests_of_their_pages(shape: str) -> None:
    """What goes beside a frame has no checksum of its own."""
    both = pair(shape, STAMPED)
    obey = both.p.workers[0].obey

    def damaged(command: Any) -> Any:
        found = obey(command)
        if not isinstance(found, PieceMoved):
            return found
        payload = found.payload.copy()
        payload[3] ^= 1
        return replace(found, payload=payload)

    both.p.line.ranks[0].obey = damaged
    both.begin()
    both.settle()
    assert [end.code for end in both.ended(Recompute)] == ["digest"]


def test_an_owner_that_is_gone_is_a_recompute_and_its_memory_stays_open_until_the_last_slice_is_read() -> None:
    both = pair("TP2 to one", STAMPED)
    both.begin()
    while not both.gathers:
        both.turn()
    (peer,), (client,) = both.d.port.machine.peers, both.p.port.machine.clients
    for engine, other in ((both.d, peer.name), (both.p, client.peer)):
        both._act(engine.port.turn(both.clock.now(), [Gone(peer=other, reason="cut")]))
    assert [end.code for end in both.ended(Recompute)] == ["peer_gone"]
    both.d.line.pump()
    opened = both.d.libraries[0].opened
    assert len(opened) == 4, "KV and stamps of two ranks"
    assert both.d.port.machine.quarantined_pages
    both.settle(3)
    assert not opened or both.d.port.machine.peers[0].name != peer.name
    check_empty(both)


def test_slices_that_end_after_their_handoff_leave_no_stamps() -> None:
    both = pair("TP2 to one", STAMPED)
    both.begin()
    while not both.gathers:
        both.turn()
    both._act(both.d.port.handle(CancelHandoff(rid="r"), both.clock.now()))
    pages = both.landed(0, Part.FULL)
    both.d.line.pump()
    both.settle()
    stamps = slice(-PAGE_SIZE * 128, None)
    assert np.array_equal(both.landed(0, Part.FULL)[:, stamps], pages[:, stamps])
    assert len(both.ended(AbortPrefill)) == 1
    check_empty(both)


def test_a_handoff_of_equal_ranks_reads_whole_pages_with_their_stamps() -> None:
    both = pair("TP2 each", STAMPED)
    both.begin(chunks=1)
    while not both.gathers:
        both.turn()
    assert [len(library.gathers) for library in both.d.libraries] == [1, 1]
    both.settle()
    check_landed(both)


def test_a_piece_is_no_larger_than_the_messages_that_each_taker_gets_of_it() -> None:
    both = pair("one to TP2", STAMPED, piece_bytes_max=2 * 2 * PAGE_SIZE * 128)
    both.begin(chunks=1)
    both.settle()
    assert len(both.d.libraries[0].gathers) == 3, "5 pages, 2 at a time"
    check_landed(both)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_what_slices_cannot_be_cut_from_is_said_in_words() -> None:
    objection = CudaIpcBackend.capabilities.objection
    assert objection(HALF, shaped(tp=2).signature) == ""
    assert "page_size: 4 here, 8 there; the data backend cuts layers and heads" in objection(
        HALF, shaped(page_size=8).signature
    )
    assert "4 bytes of a token; the data backend moves words of 8" in objection(HALF, shaped(tp=4).signature)
    assert "layout differs in kv_head_count" in objection(HALF, shaped(kv_head_count=2).signature)
    both = SlicesPair(shaped(page_size=4), shaped(tp=4), pages_of)
    both.begin()
    both.settle(4)
    assert "words of 8" in both.d.port.machine.peers[0].reason


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        ({"tp": 2}, {}, ((0, 0), (1, 0))),
        ({}, {"tp": 2}, ((0, 0), (0, 1))),
        ({"pp": 2}, {"pp": 2, "tp": 2}, ((0, 0), (0, 1), (1, 2), (1, 3))),
        ({"tp": 2, "pp": 2}, {"tp": 2, "pp": 2}, ((0, 0), (1, 1), (2, 2), (3, 3))),
    ],
)
def test_each_rank_must_reach_the_ranks_that_it_reads_and_no_other(ours: Any, theirs: Any, wanted: Any) -> None:
    source, target = shaped(**ours), shaped(**theirs)
    pairs = Routes(source, target).pairs
    assert pairs == wanted

    def endpoints(engine: str, layout: RankLayout, reach: Any) -> list[bytes]:
        ranks = [shard.rank for shard in layout.shards]
        libraries = [HostIpc(f"{engine}.{rank}", f"{engine}{rank}", reach(rank)) for rank in ranks]
        return [CudaIpcBackend(library, shares=False).endpoint for library in libraries]

    owners = endpoints("p", source, lambda _: ())
    leader = CudaIpcBackend(HostIpc("p.0", "p0", ()), shares=True)
    enough = endpoints("d", target, lambda rank: tuple(f"p{owner}" for owner, reader in wanted if reader == rank))
    assert leader.refusal(owners, enough, pairs) == ""
    for lost in wanted:
        reach = [(owner, reader) for owner, reader in wanted if (owner, reader) != lost]
        blind = endpoints(
            "d", target, lambda rank, reach=reach: tuple(f"p{o}" for o, reader in reach if reader == rank)
        )
        assert f"d{lost[1]} does not read memory of p{lost[0]}" in leader.refusal(owners, blind, pairs)


def test_regions_that_are_not_those_of_the_layout_are_refused() -> None:
    source, target = shaped(tp=2), shaped()
    theirs, ours = slices(source, target, cut(source, target)[1])
    region = Region(part=Part.FULL, address=1 << 20, lane_count=1, lane_stride=0, strip_bytes=256, page_count=9)
    own = replace(region, strip_bytes=512)
    assert rows_of(region, theirs).shape == rows_of(own, ours).shape == (8, 4, 8)
    assert rows_of(own, ours).address == (1 << 20) + 8, "behind the heads of rank 0"
    with pytest.raises(TransferFailed, match="pages are 1 x 264 bytes there, the layout says 8 x 32"):
        rows_of(replace(region, strip_bytes=264), theirs)
    with pytest.raises(TransferFailed, match="in 2 lanes, expected 1 or 8"):
        rows_of(replace(region, lane_count=2, strip_bytes=128), theirs)
    with pytest.raises(TransferFailed, match=r"the peer has 1 \.\. 8"):
        strips_between_rows(rows_of(own, ours), rows_of(region, theirs), np.array([1]), np.array([9]))
    with pytest.raises(TransferFailed, match="expected the same"):
        strips_between_rows(rows_of(own, ours), whole_rows(region), np.array([1]), np.array([2]))


def test_a_rank_that_is_told_to_read_what_is_not_its_own_says_so() -> None:
    both = pair("PP2 to TP2")
    both.begin()
    both.settle()
    (peer,) = both.d.port.machine.peers
    pages = np.array([1], np.int32)
    command = TakeIn(
        peer=peer.name, xid="x", piece=0, source=7, rank=0, mode=both.d.port.machine.peers[0].mode, part=Part.FULL,
        first=0, digests=b"", digest_seed=1, pages=pages, target_first=0, byte_count=1, sources=pages,
    )  # fmt: skip
    answer = both.d.workers[0].obey(command)
    assert "nothing of rank 7 belongs to rank 0" in answer.error
