"""The simulated parts under the real rooms: model and tensors under the runner, workers under the mover, the disk under
the page files."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from serinus.cache import CacheGeometry, PartGeometry, PrefixCache
from serinus.core.clock import ManualClock
from serinus.core.errors import InvariantError
from serinus.core.moves import Move, MoveKind
from serinus.core.parts import Part
from serinus.core.plan import StepResult
from serinus.core.request import Request
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.parallel import Mesh
from serinus.pool import DevicePool, HostPool, Mover, PoolSpec, RequestTable
from serinus.pool.storage import PageFiles
from serinus.runner import Runner
from serinus.sched import SchedSettings, Scheduler
from serinus.sim.comm import RankTensors, SimComm
from serinus.sim.damage import Damage
from serinus.sim.disk import Folders, SimDisk
from serinus.sim.model import HEAD_SIZE, SimModel, sim_spec
from serinus.sim.options import Options
from serinus.sim.toy import Lanes, expected_answer
from serinus.sim.workers import SimWorkers

PAGES, PAGE_SIZE, VOCAB, CONTEXT, NEW = 12, 4, 16, 48, 6


class Ranks:
    """The runners of one engine, each with its share of the model."""

    def __init__(self, mesh: Mesh, lanes: Lanes) -> None:
        self.mesh, self.lanes = mesh, lanes
        spec = sim_spec(lanes, VOCAB, CONTEXT)
        tensors = RankTensors(mesh, wait=self._wait, came=lambda rank: None)
        self.pools: list[dict[Part, DevicePool]] = []
        self.runners = [self._runner(spec, shard, SimComm(tensors, shard.rank)) for shard in spec.shards(mesh)]
        window = lanes.window
        parts = {Part.FULL: PartGeometry(pages=PAGES)}
        if window:
            parts[Part.SWA] = PartGeometry(pages=PAGES, window=window)
        if lanes.halves == 1:
            parts[Part.LATENT] = PartGeometry(pages=PAGES)
        geometry = CacheGeometry(page_size=PAGE_SIZE, parts=parts)
        settings = SchedSettings(
            page_size=PAGE_SIZE, context_length=CONTEXT, rows=5, vocab_size=VOCAB, max_running_requests=4,
            chunked_prefill_size=8, eos_ids=(0,),
        )  # fmt: skip
        self.scheduler = Scheduler(settings, PrefixCache(geometry))

    def _wait(self, holds: Callable[[], bool]) -> None:
        assert holds(), "a rank waits for a tensor that was not sent"

    def _runner(self, spec: object, shard: object, comm: SimComm) -> Runner:
        own = spec.on(shard)  # type: ignore[attr-defined]
        kernels = load("cpu")
        pools = {
            part: DevicePool(
                PoolSpec(
                    layer_count=len(own.layers_of(part)), kv_head_count=own.kv_head_count, head_size=HEAD_SIZE,
                    page_size=PAGE_SIZE, page_count=PAGES, dtype=torch.float32, halves=part.halves,
                ),
                kernels,
            )
            for part in own.parts
        }  # fmt: skip
        self.pools.append(pools)
        model = SimModel(spec, shard, self.lanes, pools, comm)  # type: ignore[arg-type]
        tables = {part: RequestTable(5, CONTEXT) for part in own.parts}
        return Runner(model, pools, tables, kernels, comm=comm)  # type: ignore[arg-type]

    def answers(self, damage: Callable[[int], None] = lambda step: None) -> tuple[dict[str, list[int]], ...]:
        """What six requests got, and what they should have got."""
        rng, got, expected, step = np.random.default_rng(1), {}, {}, 0
        for number in range(6):
            prompt = rng.integers(1, VOCAB, rng.integers(3, 20)).astype(np.int32)
            sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW)
            self.scheduler.add(Request(rid=f"r{number}", prompt=prompt, seed=0, sampling=sampling))
            got[f"r{number}"] = []
            expected[f"r{number}"] = expected_answer(self.lanes, VOCAB, prompt, NEW, stop=0)
        mesh = self.mesh
        order = [mesh.rank_of(tp_rank=tp, pp_rank=pp) for pp in range(mesh.pp) for tp in reversed(range(mesh.tp))]
        while not self.scheduler.idle:
            plan = self.scheduler.plan(0.0)
            assert plan is not None
            step += 1
            damage(step)
            results = {rank: self.runners[rank].run(plan) for rank in order}
            result = results[mesh.result_rank]
            assert isinstance(result, StepResult)
            for delta in self.scheduler.commit(plan, result, 0.0).deltas:
                got[delta.rid] += delta.token_ids
        return got, expected


@pytest.mark.parametrize("slides", ["", "FS", "SS", "LL"])
@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_ranks_of_the_simulated_model_give_the_tokens_of_the_oracle(mesh: tuple[int, int], slides: str) -> None:
    lanes = Lanes.of(2, 1 if slides == "LL" else 2, CONTEXT, slides, 5 if "S" in slides else 0)
    got, expected = Ranks(Mesh(tp=mesh[0], pp=mesh[1]), lanes).answers()
    assert got == expected


def test_one_wrong_word_on_one_rank_gives_wrong_tokens() -> None:
    ranks = Ranks(Mesh(tp=2, pp=2), Lanes.of(2, 2, CONTEXT))

    def damage(step: int) -> None:
        if step == 8:
            ranks.pools[3][Part.FULL].v[0][PAGE_SIZE:] += 1.0

    got, expected = ranks.answers(damage)
    assert got != expected


@pytest.mark.parametrize("undoes", [False, True])
def test_damage_puts_back_what_an_earlier_one_changed_only_where_each_step_would_see_it(undoes: bool) -> None:
    """A pool without a writer, struck 2,000 times: late KV and pages of earlier moments lie at hand in both runs."""
    kernels = load("cpu")
    spec = PoolSpec(
        layer_count=2, kv_head_count=1, head_size=HEAD_SIZE, page_size=2, page_count=5, dtype=torch.float32, halves=2,
        stamped=True,
    )  # fmt: skip
    pool, pages, rng = DevicePool(spec, kernels), np.arange(1, 5), Rng(7)
    pool.write_pages(pages, np.random.default_rng(3).integers(0, 256, (4, pool.page_bytes), np.uint8))
    options = Options(stray=0.5, page=0.5, bit=0.5, stamp=0.5)
    damage = Damage(
        options, {Part.FULL: pool}, {}, lambda chance: rng.random() < chance, rng, lambda kind: None, undoes=undoes
    )
    sound = pool.read_pages(pages).view(np.uint64)
    was_wrong, undone = np.zeros(sound.shape, bool), 0
    for _ in range(2000):
        damage.begin(object(), {})  # type: ignore[arg-type]
        wrong = pool.read_pages(pages).view(np.uint64) != sound
        undone += int((was_wrong & ~wrong).sum())
        was_wrong = wrong
    assert was_wrong.any()
    assert bool(undone) is undoes


def test_copies_of_a_mover_without_threads_are_done_when_the_timeline_says_so_or_when_they_are_waited_for() -> None:
    spec = PoolSpec(
        layer_count=1, kv_head_count=1, head_size=HEAD_SIZE, page_size=4, page_count=4, dtype=torch.float32
    )  # fmt: skip
    device, host = DevicePool(spec, load("cpu")), HostPool(spec, 4)
    device.k[0].fill_(7.0)
    due: list[Callable[[], None]] = []
    ended: list[bool] = []
    workers = SimWorkers(due.append, lambda: ended.append(True))
    mover = Mover({Part.FULL: device}, {Part.FULL: host}, (Part.FULL,), ManualClock(), workers)
    one, two = (np.array([page], np.int32) for page in (1, 2))
    for op, page in ((1, one), (2, two)):
        mover.submit([Move(op=op, kind=MoveKind.BACKUP, part=Part.FULL, source=page, target=page)])
    assert not mover.poll()
    due.pop(0)()
    assert [done.op for done in mover.poll()] == [1]
    assert ended == [True]
    assert [done.op for done in mover.wait([2])] == [2]
    assert np.array_equal(host.data_PY[2], device.read_pages(two)[0])
    with pytest.raises(InvariantError, match="nothing will ever end"):
        workers.wait_for(lambda: False)


def test_pages_on_the_simulated_disk_are_read_back_whole_or_counted_as_missing() -> None:
    clock, fails = ManualClock(), [False]
    folders = Folders(clock.now, Rng(1))

    def files(disk: SimDisk) -> PageFiles:
        return PageFiles("/d0", namespace="n", page_bytes={Part.FULL: 64}, byte_max=None, clock=clock, disk=disk)

    killed = SimDisk(folders, lambda: fails[0])
    first = files(killed)
    pages = {bytes([number]) * 16: np.full(64, number, np.uint8) for number in range(40)}
    for key, data in pages.items():
        first.save(Part.FULL, key, data)
    fails[0] = True
    with pytest.raises(OSError, match="cannot be written"):
        first.save(Part.FULL, b"x" * 16, np.zeros(64, np.uint8))
    with pytest.raises(OSError, match="cannot be read"):
        first.load(Part.FULL, bytes(16), np.empty(64, np.uint8))
    fails[0] = False
    killed.kill(torn=0.5)
    second, found, into = files(SimDisk(folders, lambda: False)), 0, np.empty(64, np.uint8)
    assert not any(path.endswith(".tmp") for path in folders.files), "leftovers of the killed process"
    for key, data in pages.items():
        if second.load(Part.FULL, key, into):
            found += 1
            assert np.array_equal(into, data)
    assert 0 < found < len(pages)
    assert found + folders.torn_count >= len(pages)
