"""The canary's watch with buffers and addresses that stay: a decode step has few slots to verify, and then the calls of
the kernels cost more than the kernels.

What a batch reads is digested by its attention; what it does not read in a layer (a prompt whose chunk wants no token
of the last one), by a pass of its own after the layers. Both kinds of sums meet in verify.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import is_

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.canary import UNKNOWN, DuePages, StampLane
from serinus.kernels.checks import check_digest
from serinus.kernels.contracts import CanaryOps, LayerDigest, LayerDigests, LayersKv, RingTensors, Watch, WrittenRows
from serinus.kernels.cpu import canary as kernels
from serinus.kernels.cpu import canary_bind, canary_lookup
from serinus.kernels.cpu.body import address_of, thread_count
from serinus.kernels.cpu.calls import Calls
from serinus.kernels.cpu.paged_attention import cuts_of
from serinus.kernels.cpu.watched_attention import pack_factors
from serinus.kernels.packed import PackedFactors

_WORD = 8
_HEAD, _TAIL = int(StampLane.HEAD_K), int(StampLane.TAIL_K)
_ROOM, _ROOM_KEPT = 64, 4096
"""Entries for which there is room beyond those that are asked for; and beyond four times as many, of room that is kept:
what is due differs from step to step, and arguments of all layers made anew cost more than so many zeros."""
_KEPT = 64
_PLAN, _HEADS, _TAILS, _FIND, _DIGEST, _READ_BACK = 0, 1, 5, 9, 10, 11
_LOOK, _BIND, _VERIFY, _WRITE = range(4)
"""The calls of a pass, by their places: the first one expands; four look rows up, bind, verify and stamp the lanes of
HEAD, and four those of TAIL; the others read back. One run makes all that come one after the other."""
_NO_COLUMNS = np.empty((7, 0), np.int64)
_Span = tuple[int, int]
"""Entries: the first, how many."""


def canary_watch(
    ops: CanaryOps, table_RC: Tensor, written_RC: Tensor, stamps_LS4: Tensor, layers_kv: LayersKv,
    coefficients_L22W: Tensor | None, ring: RingTensors, stored: RingTensors,
    page_size: int,
) -> Watch:  # fmt: skip
    """A watch over one part; see the reference. `ops` is not used: this watch calls the kernels of its column.

    Raises:
        ValueError: the coefficients are not those of these pools, or strided.
    """
    return _CpuWatch(table_RC, written_RC, stamps_LS4, layers_kv, coefficients_L22W, ring, stored, page_size)


class _CpuWatch:
    """The argument structures of the kernels, filled once; of each pass only what differs is written into them."""

    def __init__(
        self, table_RC: Tensor, written_RC: Tensor, stamps_LS4: Tensor, layers_kv: LayersKv,
        coefficients_L22W: Tensor | None, ring: RingTensors,
        stored: RingTensors, page_size: int,
    ) -> None:  # fmt: skip
        self._holds = (table_RC, written_RC, stamps_LS4, layers_kv, coefficients_L22W, ring, stored)
        self._pools = _Pools(layers_kv, coefficients_L22W) if coefficients_L22W is not None else None
        plan, halves = (table_RC.data_ptr(), table_RC.shape[1]), len(stamps_LS4) // 2
        stamps = (stamps_LS4.data_ptr(), stamps_LS4.shape[1])
        self._plan = kernels.Plan(0, plan[0], 0, 0, 0, 0, plan[1], page_size, stamps[1])
        *self._verify, self._read_back = (
            kernels.Verify(
                0, *stamps, lane, 0, 0, 0, 0, 0, 0, *_addresses(of), 0, kernels.VERIFY_STEP, 0, 0, 0, halves,
                *_counts(of),
            )
            for lane, of in ((_HEAD, ring), (_TAIL, ring), (_TAIL, stored))
        )  # fmt: skip
        self._bind = [
            canary_bind.Bind(0, *stamps, lane, 0, 0, 0, 0, *_addresses(ring), 0, halves, *_counts(ring))
            for lane in (_HEAD, _TAIL)
        ]
        self._by_sequence = [each.numpy() for each in ring[3:]]
        self._look = canary_lookup.Look(0, plan[0], written_RC.data_ptr(), plan[1], 0, 0, 0)
        self._find = canary_lookup.Find(0, *plan, stamps[1], 0, 0, 0, 0, 0, 0, 0, 0, 0)
        self._write = [
            kernels.Write(0, *stamps, lane, 0, 0, 0, 0, 0, *plan, 0, 0, 0, halves) for lane in (_HEAD, _TAIL)
        ]
        calls = [kernels.plan_call(self._plan)]
        for bind, verify, write in zip(self._bind, self._verify, self._write, strict=True):
            calls += [canary_lookup.look_call(self._look), canary_bind.bind_call(bind)]
            calls += [kernels.verify_call(verify), kernels.write_call(write)]
        calls.append(canary_lookup.find_call(self._find))
        if self._pools is not None:
            calls += [kernels.digest_call(self._pools.stored), kernels.verify_call(self._read_back)]
        self._calls = Calls(len(calls))
        self._calls.put(0, calls)
        self._first = _BIND
        """The first of the calls of the next verification: `expand` (-1: the plan is expanded before them) and
        `look_again` leave theirs to it."""
        self._stands = (0, 0)
        """Sequences and tokens that the arguments of writing and reading back are for."""
        self._due, self._due_at = kernels.DueWords(), 0
        self._given: tuple[NDArray[np.int64], ...] = ()
        """The plan of this pass, as long as its addresses are in use (`_due_at`, of its columns)."""
        self._bound, self._words, self._stored, self._unknown = _Words(), _Words(), _Words(), _Words(UNKNOWN)
        self._written: tuple[WrittenRows, ...] = ()
        """By layer; the sums are zeros at the beginning of a pass."""
        self._stored_sums: NDArray[np.int64] = np.empty(0, np.int64)
        """The same sums, as an array."""
        self._told: tuple[tuple[WrittenRows, ...], tuple[LayerDigest, ...], Sequence[LayerDigests]] = (), (), ()
        """What `layer_digests` returned, and what it is made of."""
        self._standing: tuple[Tensor, ...] = ()
        """The tokens of this pass as they were named, often the tensors of the pass before..."""
        self._batch: list[Tensor] = []
        """...and what lies at the addresses of them."""
        self._reads = None if self._pools is None else _Reads(self._pools, len(table_RC), page_size)
        self.entry_count, self.is_staged = 0, False
        self._rest: tuple[_Span, ...] = ()
        """What the attention that was asked about last does not digest."""
        self._all: tuple[_Span, ...] = ()
        """All entries of this pass."""
        self._left: list[tuple[int, int, tuple[_Span, ...]]] = []
        """First layer, end, entries: what is to be digested by a pass of its own."""
        self._taken = 0
        """Layers of this pass of which that is settled."""
        self._has_digests = False
        """Whether sums lie behind the entries."""
        self._sums = (0, 0, 0, 0)
        """The sums that TAIL is verified by, as `Verify` has them."""

    def due(self, reads_6B: NDArray[np.int64], page_size: int) -> DuePages:
        return self._due.work_out(reads_6B, page_size)

    def has_room(self, room: int, entry_count: int) -> bool:
        return True

    def stage(self, plan: object, put: object) -> None:
        """All is done in `expand`."""

    def expand(self, due: Sequence[tuple[NDArray[np.int64], int]], bound_5B: NDArray[np.int64]) -> None:
        """The pieces are put together again: what they would save is kept from pass to pass anyway."""
        due_7C, count = _joined(due)
        self._given, self.entry_count = (due_7C, bound_5B), count
        self.drop_digests()
        for counts in self._by_sequence:
            counts.fill(0)
        look, plan, own, bound = self._look, self._plan, self._due, bound_5B.shape[1]
        look.bound = own.bound_at if bound_5B is own.bound_5B else address_of(bound_5B)
        if bound != look.count or not look.out:
            look.count, look.out = bound, self._bound.room(4 * bound)
            for bind in self._bind:
                bind.count = bound
                bind.slots, bind.positions, bind.chains, bind.names = (look.out + i * _WORD * bound for i in range(4))
        # Slots, positions, previous slots, names, then two sums each.
        base = self._words.room(6 * count)
        self._due_at = own.columns_at if due_7C is own.columns_7B else address_of(due_7C)
        plan.due, plan.sequence_count = self._due_at, due_7C.shape[1]
        if base != plan.out or count != plan.entry_count:
            plan.out, plan.entry_count = base, count
            self._calls.set_threads(_PLAN, kernels.plan_threads(count))
            for first, verify in zip((_HEADS, _TAILS), self._verify, strict=True):
                verify.slots, verify.positions, verify.previous, verify.names = (
                    base + i * _WORD * count for i in range(4)
                )
                verify.count = count
                self._calls.set_threads(first + _VERIFY, kernels.verify_threads(count))
        self._first = -1

    def reads(self, layer: int, batch: AttentionBatch) -> LayerDigest | None:
        digests = self._of_batch(batch)
        if self._taken == layer and not self._rest:
            self._taken = layer + 1
        else:
            self._leave(layer, self._all)
            self._leave(layer + 1, self._rest)
        return digests[layer] if digests else None

    def layer_digests(self, batch: AttentionBatch) -> Sequence[LayerDigests]:
        if self._pools is None:
            return ()
        told, digests = self._told, self._of_batch(batch)
        self._leave(self._pools.layer_count, self._rest)
        if told[0] is not self._written or told[1] is not digests:
            pairs = tuple(zip(self._written, digests or [None] * self._pools.layer_count, strict=True))
            told = self._told = self._written, digests, pairs
        return told[2]

    def _of_batch(self, batch: AttentionBatch) -> tuple[LayerDigest, ...]:
        """By layer, what attention digests as it reads for this batch; empty where that is nothing."""
        reads = self._reads
        if reads is None or not self.entry_count:
            return ()
        if reads.batch is not batch:
            rest = reads.take(batch, self._given[0], self._due_at, self.entry_count)
            self._rest = self._all if rest is None else rest
        return reads.digests

    def drop_digests(self) -> None:
        self._rest, self._left, self._taken, self._has_digests = (), [], 0, False
        self._all = ((0, self.entry_count),) if self.entry_count else ()
        if self._reads is not None:
            self._reads.drop()

    def look_again(self) -> None:
        if self._first > _LOOK:
            self._first = _LOOK

    def verify(self, lane: int) -> None:
        self._calls.run(self._to_verify(lane), (_HEADS if lane < _TAIL else _TAILS) + _WRITE)

    def verify_and_write(self, lane: int) -> None:
        self._calls.run(self._to_verify(lane), self._end_of(lane))

    def _to_verify(self, lane: int) -> int:
        """Say what the calls that verify a lane are to do; the first of them."""
        first, self._first = self._first, _BIND
        if lane < _TAIL:
            return _HEADS + first
        if first < _LOOK:  # HEAD was not verified: which slots they are is not known yet
            self._calls.run(_PLAN, _HEADS)
            first = _LOOK
        pools, reads = self._pools, self._reads
        if pools is not None and reads is not None:
            if self.entry_count:
                self._leave(pools.layer_count, self._all)
            if self._left:
                self._digest_left(pools)
            sums = self._digests_at if self._has_digests else 0, *(reads.sums_at if reads.has_sums else (0, 0, 0))
            if sums != self._sums:
                arguments, self._sums = self._verify[1], sums
                arguments.digests, arguments.sums, arguments.cuts, arguments.sums_stride = sums
        return _TAILS + first

    def stand(
        self, slots_T: Tensor, positions_T: Tensor, tokens_T: Tensor, q_starts_B1: Tensor, rows_B: Tensor,
        first_name: int,
    ) -> None:  # fmt: skip
        given, pools = (slots_T, positions_T, tokens_T, q_starts_B1, rows_B), self._pools
        if not _are_same(given, self._standing):
            self._batch = [tensor.contiguous() for tensor in given]
            self._standing = given if _are_same(given, self._batch) else ()  # else copies are to be made each time
            self._point(*(tensor.data_ptr() for tensor in self._batch))
            if self._stands != (len(rows_B), len(slots_T)):
                self._stands = len(rows_B), len(slots_T)
                self._make_room(pools)
        if pools is not None:
            self._find.first_name = first_name
            self._stored_sums.fill(0)

    def _point(self, slots: int, positions: int, tokens: int, starts: int, rows: int) -> None:
        """Say where the tokens of a pass lie."""
        find = self._find
        for write in self._write:
            write.slots, write.positions, write.tokens = slots, positions, tokens
            write.starts, write.rows = starts, rows
        find.slots, find.positions, find.starts, find.rows = slots, positions, starts, rows
        self._read_back.tokens = tokens

    def _make_room(self, pools: _Pools | None) -> None:
        """For so many tokens as there are now, of so many sequences."""
        find, back, (sequences, count) = self._find, self._read_back, self._stands
        threads, find.count = kernels.verify_threads(count), sequences
        for first, write in zip((_HEADS, _TAILS), self._write, strict=True):
            write.sequence_count, write.total = sequences, count
            self._calls.set_threads(first + _WRITE, threads)
        if pools is None:
            return
        # Names, slots, positions, then two digests each.
        base, back.previous = self._stored.room(5 * count), self._unknown.room(count)
        find.names, find.found, find.placed, back.digests = (base + i * count * _WORD for i in range(4))
        back.names, back.slots, back.positions, back.count = find.names, find.found, find.placed, count
        digest = pools.stored
        digest.slots, digest.out, digest.count = back.slots, back.digests, count
        self._calls.set_threads(_DIGEST, kernels.cut_digest(digest))
        self._calls.set_threads(_READ_BACK, threads)
        sums_T2 = torch.zeros((count, 2), dtype=torch.int64)
        self._stored_sums, self._write[1].digests = sums_T2.numpy(), sums_T2.data_ptr()
        self._written = tuple([WrittenRows(coefficients_22W=each, sums_T2=sums_T2) for each in pools.coefficients_L22W])

    def writes(self, layer: int) -> WrittenRows | None:
        return self._written[layer] if self._pools is not None else None

    def write(self, lane: int) -> None:
        self._calls.run((_HEADS if lane < _TAIL else _TAILS) + _WRITE, self._end_of(lane))

    def _end_of(self, lane: int) -> int:
        """The end of the calls that stamp a lane; behind TAIL the rows are read back."""
        if lane < _TAIL:
            return _TAILS
        return _FIND if self._pools is None else _READ_BACK + 1

    # ---- what is digested by a pass of its own --------------------------------------------------------------------

    def _leave(self, end: int, spans: tuple[_Span, ...]) -> None:
        """Of the layers up to `end` that are not settled, these entries are to be digested by a pass of their own."""
        if end > self._taken:
            first = self._taken
            if spans and self._left and self._left[-1][1:] == (first, spans):
                first = self._left.pop()[0]
            if spans:
                self._left.append((first, end, spans))
            self._taken = end

    def _digest_left(self, pools: _Pools) -> None:
        """Digest what was left; sums are added to those of other layers."""
        left, self._left = self._left, []
        count = self.entry_count
        if not self._has_digests:
            self._words.array[4 * count : 6 * count] = 0
            self._has_digests = True
        for first, end, spans in left:
            for begin, entries in spans:
                slots_at = self._words.address + begin * _WORD
                pools.add(slots_at, self._digests_at + begin * 2 * _WORD, entries, first, end)

    @property
    def _digests_at(self) -> int:
        return self._words.address + 4 * _WORD * self.entry_count


def _are_same(given: Sequence[Tensor], kept: Sequence[Tensor]) -> bool:
    """Whether these are the very tensors that were given before: where they lie is known."""
    return len(kept) == len(given) and all(map(is_, given, kept))


def _joined(due: Sequence[tuple[NDArray[np.int64], int]]) -> tuple[NDArray[np.int64], int]:
    """The columns of all pieces with entries that count through, and how many these are."""
    if len(due) == 1:
        return due[0]
    columns, count = [_NO_COLUMNS], 0
    for piece, entries in due:
        columns.append(piece + np.array([[0]] * 6 + [[count]]))
        count += entries
    return np.concatenate(columns, axis=1), count


def _counts(ring: RingTensors) -> tuple[int, int]:
    """Its counts by sequence, as `Verify` has them."""
    return kernels.counts_at(ring[3] if len(ring) > 3 else None)


def _addresses(ring: RingTensors) -> tuple[int, int, int, int]:
    """Of a ring, as `Verify` has them."""
    rows_QF, count_1, checked_L, *_ = ring
    return rows_QF.data_ptr(), len(rows_QF), count_1.data_ptr(), checked_L.data_ptr()


class _Words:
    """int64 words that stay where they are from pass to pass, and grow."""

    def __init__(self, value: int = 0) -> None:
        """`value`: of words that are new."""
        self._value = value
        self.array: NDArray[np.int64] = np.empty(0, np.int64)
        self.address = self.array.ctypes.data

    def room(self, count: int) -> int:
        """The address of so many words."""
        if len(self.array) < count:
            self.array = np.full(2 * count, self._value, np.int64)
            self.address = self.array.ctypes.data
        return self.address


class _Reads:
    """What attention digests of the slots that a pass verifies. All is kept from pass to pass and only filled anew: in
    decoding one pass is like the next."""

    def __init__(self, pools: _Pools, row_count: int, page_size: int) -> None:
        self._pools, self._page_size = pools, page_size
        self._places = np.full(2 * row_count, -1, np.int64)
        self._match = canary_lookup.Match(0, 0, 0, 0, 0, 0, 0, row_count, self._places.ctypes.data, *[0] * 7)
        self._run_match = canary_lookup.match_run(self._match)
        self._due, self._left = _Words(), _Words()
        self._made: dict[int, tuple[LayerDigest, ...]] = {}
        """By columns of what is due; of these sums and that memory."""
        self._sums_P22E = torch.zeros((1, 2, 2, 0), dtype=torch.int32)
        self._sums = self._sums_P22E.numpy()
        self.sums_at = (0, 0, 0)
        """Their address, P and E."""
        self.has_sums = False
        """Whether attention adds to these sums in this pass."""
        self._given: tuple[Tensor, ...] = ()
        """Rows, starts and contexts of the queries, where the addresses of these very tensors are noted."""
        self.batch: AttentionBatch | None = None
        """That of which `digests` are."""
        self.digests: tuple[LayerDigest, ...] = ()
        """By layer; empty where nothing that is due is of this batch."""

    def drop(self) -> None:
        """A pass begins: nothing of it is digested yet."""
        self.batch, self.digests, self.has_sums = None, (), False

    def take(
        self, batch: AttentionBatch, due_7C: NDArray[np.int64], due_at: int, entry_count: int
    ) -> tuple[_Span, ...] | None:
        """Attention is about to read for these queries. Returns the entries that it does not; None = all. `due_at`:
        where the columns lie."""
        match, columns = self._match, due_7C.shape[1]
        given = batch.rows_B, batch.q_starts_B1, batch.context_B
        if not _are_same(given, self._given):
            inputs = [tensor.contiguous() for tensor in given]
            self._given = given if _are_same(given, inputs) else ()
            match.rows, match.starts, match.contexts = (tensor.data_ptr() for tensor in inputs)
            sequences, at = batch.sequence_count, self._due.address
            match.sequences, match.out = sequences, self._due.room(14 * sequences)
            if self._due.address != at:
                self._made.clear()
        match.due = due_at
        if match.count != columns:
            match.count, match.left = columns, self._left.room(columns)
        sequences = match.sequences
        self._run_match()
        self.batch, self.digests = batch, ()
        if match.left_count == columns:
            return None
        if not self.has_sums:
            self._begin(batch, entry_count)
        self.digests = self._digests_of(match.sets * sequences)
        if not match.left_count:
            return ()
        left_C, ends = self._left.array[:columns], np.append(due_7C[6, 1:], entry_count)
        left = np.stack((due_7C[6], ends), 1)[left_C != 0]
        return tuple([(begin, end - begin) for begin, end in left.tolist()])

    def _begin(self, batch: AttentionBatch, entry_count: int) -> None:
        """Zeros to add to. Threads that share a sequence have slices of their own."""
        match, threads = self._match, thread_count()
        is_shared = match.queries > match.sequences
        if not is_shared and 4 * threads * match.longest > match.sum:  # else the work is even enough for whole rows
            is_shared = cuts_of(batch.context_B.tolist(), self._pools.kv_heads) > 1
        cuts, (_, made, room) = threads if is_shared else 1, self.sums_at
        self.has_sums = True
        if made == cuts and entry_count <= room <= 4 * entry_count + _ROOM_KEPT:
            self._sums.fill(0)
            return
        room = entry_count + entry_count // 4 + _ROOM
        self._sums_P22E = torch.zeros((cuts, 2, 2, room), dtype=torch.int32)
        self._sums = self._sums_P22E.numpy()
        self.sums_at = self._sums_P22E.data_ptr(), cuts, room
        self._made.clear()

    def _digests_of(self, width: int) -> tuple[LayerDigest, ...]:
        made = self._made.get(width)
        if made is None:
            if len(self._made) >= _KEPT:
                self._made.clear()
            due_7D = torch.from_numpy(self._due.array[: 7 * width].reshape(7, width))
            made = self._made[width] = tuple([
                LayerDigest(
                    factors=factors, due_7B=due_7D, sums_P22E=self._sums_P22E, page_size=self._page_size,
                    canary_digest=kernels.canary_digest,
                )
                for factors in self._pools.packed
            ])  # fmt: skip
        return made


class _Pools:
    """The layers that are digested, and by what."""

    def __init__(self, layers_kv: LayersKv, coefficients_L22W: Tensor) -> None:
        check_digest(layers_kv, coefficients_L22W)
        if not coefficients_L22W.is_contiguous():
            raise ValueError("kernels: digest coefficients lie in strides, expected them contiguous")
        self.layer_count = len(layers_kv)
        self._halves, addresses = len(layers_kv[0]), [pool.data_ptr() for halves in layers_kv for pool in halves]
        self._addresses = (ctypes.c_int64 * len(addresses))(*addresses)
        self.coefficients_L22W = tuple(coefficients_L22W)
        self._factors = coefficients_L22W.data_ptr()
        self._factor_bytes = coefficients_L22W[0].numel() * coefficients_L22W.element_size()
        pool = layers_kv[0][0]
        slot_bytes, lanes = pool.stride(0) * pool.element_size(), coefficients_L22W.shape[-1]
        self._digest = kernels.Digest(0, 0, 0, 0, 0, 0, 0, lanes, slot_bytes, 0, 0, 0, self._halves)
        self.stored = kernels.Digest(
            0, ctypes.addressof(self._addresses), 0, self._factors, 0, 0, self.layer_count, lanes, slot_bytes, 0, 0, 0,
            self._halves,
        )  # fmt: skip
        """Arguments for rows of all layers; slots, sums and count are the caller's."""
        self.kv_heads = pool.shape[1]
        self.packed = [
            pack_factors(factors_22W, self.kv_heads)
            if 2 * lanes == slot_bytes and self._halves == 2
            else PackedFactors(factors=factors_22W, bias=None, plain_22W=factors_22W)
            for factors_22W in coefficients_L22W
        ]
        """Factors for attention, by layer."""

    def add(self, slots_at: int, sums_at: int, count: int, first: int, end: int) -> None:
        """Add digests of layers first .. end - 1 to sums."""
        arguments = self._digest
        arguments.ticket, arguments.adds = 0, 1
        arguments.pools = ctypes.addressof(self._addresses) + first * self._halves * _WORD
        arguments.coefficients = self._factors + first * self._factor_bytes
        arguments.slots, arguments.out, arguments.count, arguments.layers = slots_at, sums_at, count, end - first
        kernels.run_digest(arguments)
