"""Pages of unequal engines over one-sided backends: read whole into staging rows, checked, and cut there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from serinus.core.clock import ManualClock
from serinus.core.errors import TransferFailed
from serinus.core.parts import Part
from serinus.pd import AttachPeer, CancelReads, ClosePeer, Mode, PageWorker, RankLayout, digest_pages
from serinus.pd.backends import Fenced, OpResult, OpState, Region, strips_into_rows
from serinus.pd.modes import Capabilities
from serinus.pd.pages import PeerUnreachable, TakeIn, TakenIn
from serinus.wire.messages import LayoutSignature
from tests.pd.tiny import Store

SEED, TOKENS, HEADS, LAYERS = 7, 16, 4, 4
ONE = LayoutSignature(
    model="m", kv_dtype="float16", page_size=4, layer_count=LAYERS, kv_head_count=HEADS, head_size=2
)  # fmt: skip
KV = np.random.default_rng(1).integers(0, 256, (LAYERS, 2, TOKENS, HEADS, 4), dtype=np.uint8)
"""Of a whole prompt: layer, lane, token, head, byte."""
IDS = np.array([3, 1, 4, 2, 7, 5, 8, 6], np.int32)
"""Pages that hold it, in order, as far as there are so many."""


def layout(tp: int = 1, pp: int = 1, page_size: int = 4) -> RankLayout:
    return RankLayout(msgspec.structs.replace(ONE, tp=tp, pp=pp, page_size=page_size))


def pages_of(of: RankLayout, rank: int) -> NDArray[np.uint8]:
    """The prompt as one rank has it, page by page."""
    count, shard = TOKENS // of.page_size, of.shards[rank]
    rows = np.zeros((count, of.page_bytes(rank, Part.FULL)), np.uint8)
    mine = KV[shard.layers.start : shard.layers.stop, :, :, shard.heads.start : shard.heads.stop]
    parts = mine.reshape(len(shard.layers), 2, count, of.page_size, len(shard.heads), 4)
    of.view(rank, Part.FULL, rows)[:] = parts.transpose(2, 0, 1, 3, 4, 5)
    return rows


class Reader:
    """A one-sided backend that reads rows when it is told to."""

    name, capabilities = "reader", Capabilities(mode=Mode.PULL, recut=Mode.PULL)

    def __init__(self, source: RankLayout) -> None:
        self.far = {f"p/{shard.rank}": pages_of(source, shard.rank) for shard in source.shards}
        self.peers: set[str] = set()
        self.lent: NDArray[np.uint8] | None = None
        self.begun: list[tuple[NDArray[np.uint8], str, NDArray[np.int32]]] = []
        self.done: dict[int, OpResult] = {}

    def connect(self, peer: str, endpoint: bytes) -> None:
        self.peers.add(peer)

    def disconnect(self, peer: str) -> None:
        self.peers.discard(peer)

    def lend(self, rows: NDArray[np.uint8]) -> None:
        assert self.lent is None, "lent twice"
        self.lent = rows

    def read_rows(self, peer: str, part: Part, rows: NDArray[np.uint8], sources: NDArray[np.int32]) -> int:
        if peer not in self.peers:
            raise TransferFailed(f"{peer} is not connected")
        assert self.lent is not None
        assert np.may_share_memory(rows, self.lent)
        assert all(
            at in self.done or not np.may_share_memory(rows, other) for at, (other, _, _) in enumerate(self.begun)
        )
        self.begun.append((rows, peer, sources))
        return len(self.begun) - 1

    def go_on(self, damage: int = 0) -> None:
        """All that was begun is read."""
        for op, (rows, peer, sources) in enumerate(self.begun):
            if op not in self.done:
                rows[:] = self.far[peer][[IDS.tolist().index(page) for page in sources]]
                rows[0, 0] ^= damage
                self.done[op] = OpResult(state=OpState.DONE)

    def poll(self, op: int) -> OpResult:
        return self.done.get(op, OpResult(state=OpState.PENDING))

    def cancel(self, op: int) -> None:
        pass

    def fence(self, peer: str) -> Fenced:
        raise AssertionError(f"{peer} only reads")

    def close(self) -> None:
        pass


class Rank:
    """One rank of a decode engine that takes pages of a prefill engine `p`."""

    def __init__(self, source: RankLayout, target: RankLayout, rank: int, staging_bytes: int = 1 << 20) -> None:
        self.source, self.rank, self.target = source, rank, target
        self.reader, self.pages = Reader(source), Store(target.page_bytes(rank, Part.FULL))
        self.worker = PageWorker(
            rank, layout=target, stores={Part.FULL: self.pages}, backends=[self.reader], clock=ManualClock(),
            staging_bytes=staging_bytes,
        )  # fmt: skip
        self.answers: list[Any] = []

    def attach(self) -> None:
        endpoints = (b"e",) * len(self.source.shards)
        attach = AttachPeer(
            peer="p", backend="reader", layout=self.source.signature, endpoints=endpoints, sends=True
        )  # fmt: skip
        assert self.worker.obey(attach) is None

    def take(self, source: int, first: int, count: int, xid: str = "x") -> None:
        """Command to take some source pages in."""
        far = self.reader.far[f"p/{source}"][first : first + count]
        ratio = self.source.page_size / self.target.page_size
        start, end = int(first * ratio), -int(-(first + count) * ratio // 1)
        answer = self.worker.obey(
            TakeIn(
                peer="p", xid=xid, piece=first, source=source, rank=self.rank, mode=Mode.PULL, part=Part.FULL,
                first=first, digests=digest_pages(far, SEED), digest_seed=SEED, pages=IDS[start:end],
                target_first=start, byte_count=far.nbytes, sources=IDS[first : first + count],
            )
        )  # fmt: skip
        self.answers += [] if answer is None else [answer]

    def poll(self) -> list[TakenIn]:
        self.answers += self.worker.answers()
        return self.answers

    @property
    def taken(self) -> NDArray[np.uint8]:
        return self.pages.data[IDS[: TOKENS // self.target.page_size]]


SHAPES: Sequence[tuple[dict[str, int], dict[str, int]]] = [
    ({"tp": 2}, {}),
    ({}, {"tp": 2}),
    ({"pp": 2}, {"tp": 2}),
    ({"tp": 2, "pp": 2}, {"tp": 4}),
    ({"page_size": 8}, {"page_size": 4, "tp": 2}),
    ({"page_size": 4, "pp": 2}, {"page_size": 8}),
]


@pytest.mark.parametrize(("ours", "theirs"), SHAPES, ids=str)
def test_every_rank_reads_what_it_needs_and_cuts_its_own_bytes_out(ours: Any, theirs: Any) -> None:
    """Staging has room for one piece: the reads take turns."""
    source, target = layout(**ours), layout(**theirs)
    count = TOKENS // source.page_size
    for shard in target.shards:
        piece_bytes = 2 * max(source.page_bytes(other.rank, Part.FULL) for other in source.shards)
        rank = Rank(source, target, shard.rank, staging_bytes=piece_bytes)
        rank.attach()
        wanted = [other for other in source.shards if _overlap(other, shard)]
        assert rank.reader.peers == {f"p/{other.rank}" for other in wanted}
        for first in range(0, count, 2):
            for other in wanted:
                rank.take(other.rank, first, 2)
        for turn in range(len(wanted) * count // 2):
            assert rank.worker.busy
            assert len(rank.reader.begun) == turn + 1, "there is room for one"
            rank.reader.go_on()
            assert len(rank.poll()) == turn + 1
        assert not rank.worker.busy
        assert not [answer.error for answer in rank.answers if answer.error]
        assert np.array_equal(rank.taken, pages_of(target, shard.rank))


def _overlap(one: Any, two: Any) -> bool:
    return bool(set(one.layers) & set(two.layers) and set(one.heads) & set(two.heads))


def test_bytes_that_differ_are_not_cut() -> None:
    rank = Rank(layout(tp=2), layout(), 0)
    rank.attach()
    rank.take(0, 0, 2)
    rank.reader.go_on(damage=1)
    (answer,) = rank.poll()
    assert (answer.code, "page 0 of the prompt" in answer.error) == ("digest", True)
    assert not rank.pages.data.any()


def test_what_was_given_up_is_answered_when_it_is_over_and_used_by_no_one() -> None:
    piece_bytes = 2 * layout(tp=2).page_bytes(0, Part.FULL)
    rank = Rank(layout(tp=2), layout(), 0, staging_bytes=piece_bytes)
    rank.attach()
    rank.take(0, 0, 2, "gone")
    rank.take(1, 0, 2, "gone")
    rank.take(0, 0, 2, "wanted")
    rank.worker.obey(CancelReads(peer="p", xid="gone"))
    assert [answer.source for answer in rank.poll()] == [1], "the first still writes into its rows"
    rank.reader.go_on()
    assert [(answer.xid, answer.source, answer.code) for answer in rank.poll()] == [
        ("gone", 1, "transfer"), ("gone", 0, "transfer"),
    ]  # fmt: skip
    assert not rank.pages.data.any()
    rank.reader.go_on()
    assert [answer.error for answer in rank.poll()[2:]] == [""]
    assert rank.pages.data.any()
    assert len(rank.reader.begun) == 2, "the one that waited was never begun"


def test_reads_that_wait_for_room_end_with_their_peer() -> None:
    piece_bytes = 2 * layout(tp=2).page_bytes(0, Part.FULL)
    rank = Rank(layout(tp=2), layout(), 0, staging_bytes=piece_bytes)
    rank.attach()
    rank.take(0, 0, 2)
    rank.take(1, 0, 2)
    rank.worker.obey(ClosePeer(peer="p"))
    rank.reader.go_on()
    assert ["closed" in answer.error or "not connected" in answer.error for answer in rank.poll()] == [True, True]
    assert not rank.pages.data.any()
    assert not rank.worker.busy


def test_a_piece_that_never_finds_room_fails_in_words() -> None:
    rank = Rank(layout(tp=2), layout(), 0, staging_bytes=64)
    rank.attach()
    rank.take(0, 0, 4)
    (answer,) = rank.poll()
    assert answer.error == f"pd: a piece of {4 * 256} bytes to be cut, expected at most 64"
    assert not rank.worker.busy


def test_a_peer_with_fewer_endpoints_than_ranks_is_unreachable() -> None:
    source = layout(tp=2)
    rank = Rank(source, layout(), 0)
    attach = AttachPeer(peer="p", backend="reader", layout=source.signature, endpoints=(b"e",), sends=True)
    answer = rank.worker.obey(attach)
    assert isinstance(answer, PeerUnreachable)
    assert "names 1 endpoints" in answer.reason


def test_rows_are_pages_as_their_owner_reads_them() -> None:
    """Against a byte-by-byte copy; two regions of a part, as a pool with stamps has."""
    memory = np.random.default_rng(2).integers(0, 256, 4000, dtype=np.uint8)
    kv, stamps = memory[: 3 * 20 * 32].reshape(3, 20, 32), memory[2000 : 2000 + 2 * 20 * 8].reshape(2, 20, 8)
    regions = [
        Region(part=Part.FULL, address=0, lane_count=3, lane_stride=640, strip_bytes=32, page_count=20),
        Region(part=Part.SWA, address=0, lane_count=1, lane_stride=640, strip_bytes=8, page_count=20),
        Region(part=Part.FULL, address=2000, lane_count=2, lane_stride=160, strip_bytes=8, page_count=20),
    ]
    sources, rows = np.array([4, 5, 19, 1], np.int32), np.zeros((4, 112), np.uint8)
    strips, start = strips_into_rows(rows, regions, Part.FULL, sources), rows.ctypes.data
    flat = rows.reshape(-1)
    for local, remote, count in zip(strips.local, strips.remote, strips.byte_counts, strict=True):
        flat[local - start : local - start + count] = memory[remote : remote + count]
    expected = [np.concatenate((kv[:, page].reshape(-1), stamps[:, page].reshape(-1))) for page in sources]
    assert np.array_equal(rows, expected)


def test_rows_of_another_size_and_pages_that_are_not_there_are_refused() -> None:
    region = Region(part=Part.FULL, address=0, lane_count=3, lane_stride=640, strip_bytes=32, page_count=20)
    with pytest.raises(TransferFailed, match="2 pages of 96 bytes"):
        strips_into_rows(np.zeros((2, 95), np.uint8), [region], Part.FULL, np.array([1, 2], np.int32))
    with pytest.raises(TransferFailed, match=r"pages 1 \.\. 20, the peer has 1 \.\. 19"):
        strips_into_rows(np.zeros((2, 96), np.uint8), [region], Part.FULL, np.array([1, 20], np.int32))
    with pytest.raises(TransferFailed, match="pages of 0 bytes"):
        strips_into_rows(np.zeros((1, 96), np.uint8), [region], Part.LATENT, np.array([1], np.int32))
