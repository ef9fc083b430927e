"""The mover beside a real accelerator: a stream of its own, pinned memory, a gate that waits on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serinus.core.moves import Move, MoveKind
from serinus.core.parts import Part
from serinus.kernels import load
from serinus.pool import DeviceMover, DevicePool, HostPool, LayerGate, PoolSpec

pytestmark = pytest.mark.gpu

FULL, SWA = Part.FULL, Part.SWA
LAYERS = (SWA, FULL, SWA, SWA, FULL, SWA)


def made(page_count: int = 257) -> tuple[dict[Part, DevicePool], dict[Part, HostPool], DeviceMover]:
    """Pools of random bytes on the GPU, pages of 16 tokens, 8 heads of 128, and host pools of twice the pages."""
    device, host = {}, {}
    for part in (FULL, SWA):
        spec = PoolSpec(
            layer_count=LAYERS.count(part), kv_head_count=8, head_size=128, page_size=16, page_count=page_count,
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        pool = device[part] = DevicePool(spec, load("cuda"))
        for lane in (*pool.k, *pool.v):
            lane.normal_()
        host[part] = HostPool(spec, 2 * page_count)
        assert host[part].tensor_PY.is_pinned()
    return device, host, DeviceMover(device, host, LAYERS)


def move(op: int, kind: MoveKind, part: Part, source: np.ndarray, target: np.ndarray) -> Move:
    return Move(op=op, kind=kind, part=part, source=source.astype(np.int32), target=target.astype(np.int32))


def test_pages_go_to_pinned_memory_and_come_back_elsewhere() -> None:
    device, host, mover = made()
    rng = np.random.default_rng(1)
    want, moves, loads = {}, [], []
    for part in (FULL, SWA):
        source = rng.permutation(np.arange(1, 257))[:100]
        middle = rng.permutation(np.arange(1, 514))[:100]
        middle[10:40] = np.arange(480, 510) if not set(range(480, 510)) & set(middle.tolist()) else middle[10:40]
        target = rng.permutation(np.arange(1, 257))[:100]
        want[part] = (target, device[part].read_pages(source))
        moves.append(move(1, MoveKind.BACKUP, part, source, middle))
        loads.append(move(2, MoveKind.LOAD, part, middle, target))
    mover.submit(moves)
    (done,) = mover.wait([1])
    assert done.ok, done.error
    for part in (FULL, SWA):
        assert np.array_equal(host[part].data_PY[moves[part].target], want[part][1])
        for lane in (*device[part].k, *device[part].v):
            lane.zero_()
    mover.submit(loads)
    (done,) = mover.wait([2])
    assert done.ok, done.error
    for part in (FULL, SWA):
        assert np.array_equal(device[part].read_pages(want[part][0]), want[part][1])
    mover.close()
    for pool in host.values():
        pool.close()


def test_the_compute_stream_waits_for_each_layer_and_the_host_does_not_copy_it() -> None:
    """Layers are read right behind the gate, on the compute stream, without any word to the host in between."""
    device, host, mover = made()
    gate = LayerGate(mover)
    pages = np.arange(1, 257)
    ids = torch.from_numpy(pages).cuda()
    for round_ in range(1, 9):
        for part in (FULL, SWA):
            host[part].tensor_PY.fill_(round_)
        mover.submit([move(round_, MoveKind.LOAD, part, pages, pages) for part in (FULL, SWA)])
        gate.before(None)
        seen = []
        inside = {FULL: 0, SWA: 0}
        for layer, part in enumerate(LAYERS):
            gate.before_layer(layer)
            for lane in device[part].layers[inside[part]]:
                seen.append(lane.view(torch.uint8)[ids].float().mean())
            inside[part] += 1
        gate.after(None)
        assert torch.stack(seen).tolist() == [float(round_)] * 12
        mover.wait([round_])
    mover.close()


def test_a_backup_reads_what_the_device_had_computed_when_it_was_submitted() -> None:
    device, host, mover = made()
    pages = np.arange(1, 257)
    work = torch.randn(4096, 4096, device="cuda")
    for round_ in range(1, 6):
        for _ in range(30):
            work = (work @ work).clamp(-1, 1)  # the compute stream is busy for a while
        for lane in (*device[FULL].k, *device[FULL].v):
            lane.view(torch.uint8).fill_(round_)
        mover.submit([move(round_, MoveKind.BACKUP, FULL, pages, pages)])
        (done,) = mover.wait([round_])
        assert done.ok, done.error
        assert set(np.unique(host[FULL].data_PY[1:257]).tolist()) == {round_}
    mover.close()


def held_up(stream: torch.cuda.Stream, cycles: int = 400_000_000) -> None:
    """Keep a stream busy for a fifth of a second."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def test_a_load_that_is_late_is_never_read_early_and_the_host_does_not_wait_for_it() -> None:
    device, host, mover = made()
    gate = LayerGate(mover)
    pages = np.arange(1, 257)
    ids = torch.from_numpy(pages).cuda()
    device[FULL].k[0].view(torch.uint8)[ids].float().mean()  # what is loaded at first use takes as long as the load
    for round_ in range(1, 4):
        for part in (FULL, SWA):
            host[part].tensor_PY.fill_(round_)
        held_up(mover.streams.of(MoveKind.LOAD)[0])
        mover.submit([move(round_, MoveKind.LOAD, part, pages, pages) for part in (FULL, SWA)])
        gate.before(None)
        seen = []
        inside = {FULL: 0, SWA: 0}
        for layer, part in enumerate(LAYERS):
            gate.before_layer(layer)
            seen += [lane.view(torch.uint8)[ids].float().mean() for lane in device[part].layers[inside[part]]]
            inside[part] += 1
        gate.after(None)
        assert mover.poll() == [], "the pass was queued while the load had not even begun"
        assert torch.stack(seen).tolist() == [float(round_)] * 12
        (done,) = mover.wait([round_])
        assert done.ok, done.error
    mover.close()


def test_a_backup_that_was_waited_for_has_every_byte_and_a_load_overtakes_it() -> None:
    device, host, mover = made()
    pages = np.arange(1, 129)
    for lane in (*device[FULL].k, *device[FULL].v):
        lane.view(torch.uint8).fill_(7)
    host[FULL].tensor_PY.fill_(3)
    held_up(mover.streams.of(MoveKind.BACKUP)[0])
    mover.submit([move(1, MoveKind.BACKUP, FULL, pages, pages)])
    mover.submit([move(2, MoveKind.LOAD, FULL, pages + 128, pages + 128)])
    (done,) = mover.wait([2])
    assert (done.op, done.ok) == (2, True)
    (done,) = mover.wait([1])
    assert (done.op, done.ok) == (1, True)
    assert set(np.unique(host[FULL].data_PY[1:129]).tolist()) == {7}
    assert set(np.unique(device[FULL].read_pages(pages + 128)).tolist()) == {3}
    mover.close()


def stamped() -> tuple[DevicePool, HostPool, DeviceMover]:
    """One part of three layers, with stamps."""
    spec = PoolSpec(
        layer_count=3, kv_head_count=2, head_size=64, page_size=16, page_count=65, dtype=torch.bfloat16, device="cuda",
        stamped=True,
    )  # fmt: skip
    pool, host = DevicePool(spec, load("cuda")), HostPool(spec, 65)
    return pool, host, DeviceMover({FULL: pool}, {FULL: host}, (FULL,) * 3)


def test_stamps_that_are_late_are_never_read_early_and_their_copy_has_not_ended() -> None:
    """They pass on a stream of their own."""
    pool, host, mover = stamped()
    gate, pages = LayerGate(mover), np.arange(1, 65)
    assert pool.stamps_LS4 is not None
    for round_ in range(1, 4):  # what is compiled at first use takes as long as the streams are held
        host.tensor_PY.fill_(round_)
        held_up(mover.streams.of(MoveKind.LOAD)[1])
        mover.submit([move(round_, MoveKind.LOAD, FULL, pages, pages)])
        gate.before(None)
        gate.before_layer(0)
        seen = pool.stamps_LS4.view(torch.uint8)[:, 16:].unique()
        gate.after(None)
        assert seen.tolist() == [round_]
        assert [done.ok for done in mover.wait([round_])] == [True]
        pool.stamps_LS4.view(torch.uint8).fill_(round_ + 10)
        held_up(mover.streams.of(MoveKind.BACKUP)[1])
        mover.submit([move(round_ + 10, MoveKind.BACKUP, FULL, pages, pages)])
        assert [done.ok for done in mover.wait([round_ + 10])] == [True]
        assert set(np.unique(host.data_PY[1:, pool.spec.kv_bytes :]).tolist()) == {round_ + 10}
    mover.close()
    host.close()


def test_stamps_go_with_their_pages() -> None:
    pool, host, mover = stamped()
    data = np.random.default_rng(5).integers(0, 256, (64, pool.page_bytes), np.uint8)
    pages, rows = (np.random.default_rng(seed).permutation(np.arange(1, 65)) for seed in (1, 2))
    pool.write_pages(pages, data)
    mover.submit([move(1, MoveKind.BACKUP, FULL, pages, rows)])
    assert [done.ok for done in mover.wait([1])] == [True]
    assert np.array_equal(host.data_PY[rows], data)
    pool.write_pages(pages, np.zeros_like(data))
    mover.submit([move(2, MoveKind.LOAD, FULL, rows, pages)])
    assert [done.ok for done in mover.wait([2])] == [True]
    assert np.array_equal(pool.read_pages(pages), data)
    mover.close()
    host.close()
