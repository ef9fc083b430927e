"""RankedRunner: all ranks of a mesh as threads of one process, driven by one plan after the other. For tests.

Each rank has its own model, pools and tables, as in an engine of processes; what is missing is the line that plans come
by. Put it in the place of a DirectEngine's runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from serinus.core.parts import Part
from serinus.core.plan import StepPlan, StepResult
from serinus.kernels import load
from serinus.models import ForwardHook, Model, load_model, load_spec
from serinus.parallel import Mesh, Shard
from serinus.parallel.comm import Comm
from serinus.parallel.thread_comm import ThreadComm
from serinus.pool import DevicePool, PoolSpec, RequestTable
from serinus.runner import Runner
from serinus.testing.direct import DirectEngine

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerRank:
    """One rank: everything it computes with."""

    shard: Shard
    comm: Comm
    model: Model
    pools: dict[Part, DevicePool]
    tables: dict[Part, RequestTable]
    runner: Runner

    @staticmethod
    def make(
        path: Path,
        shard: Shard,
        comm: Comm,
        dtype: torch.dtype,
        *,
        column: str = "auto",
        page_size: int = 8,
        page_count: int = 160,
        rows: int = 32,
        load_format: str = "auto",
        quantization: str = "auto",
        device: str = "cpu",
        hook: ForwardHook | None = None,
    ) -> RunnerRank:
        """Load this rank's share of the checkpoint at `path` and allocate its pools."""
        kernels = load(device, column)
        model = load_model(
            load_spec(path, quantization=quantization), path, dtype, kernels, load_format=load_format, device=device,
            shard=shard, comm=comm,
        )  # fmt: skip
        pools = {
            part: DevicePool(
                PoolSpec(
                    layer_count=len(model.spec.layers_of(part)),
                    kv_head_count=model.spec.kv_head_count,
                    head_size=model.spec.head_size,
                    page_size=page_size,
                    page_count=page_count,
                    dtype=dtype,
                    device=device,
                    halves=part.halves,
                ),
                kernels,
            )
            for part in model.spec.parts
        }
        tables = {part: RequestTable(rows, model.spec.context_length, device) for part in model.spec.parts}
        runner = Runner(model, pools, tables, kernels, hook=hook, comm=comm)
        return RunnerRank(shard=shard, comm=comm, model=model, pools=pools, tables=tables, runner=runner)


class RankedRunner:
    """Runs a plan on every rank at once. Close it: its threads wait for more."""

    def __init__(self, ranks: Callable[[Shard, Comm], RunnerRank], shards: Sequence[Shard], mesh: Mesh) -> None:
        """`ranks` makes one rank, in its thread."""
        self._threads = ThreadPoolExecutor(mesh.size)
        self._comms = ThreadComm.ranks_of(mesh)
        self._mesh = mesh
        self.ranks = self._each([partial(ranks, shard, comm) for shard, comm in zip(shards, self._comms, strict=True)])

    def run(self, plan: StepPlan) -> StepResult | None:
        """What the rank that samples found. Raises what the first rank that failed raised."""
        found = self._each([partial(rank.runner.run, plan) for rank in self.ranks])
        assert [i for i, result in enumerate(found) if result is not None] == [self._mesh.result_rank]
        return found[self._mesh.result_rank]

    def record(self, sizes: Sequence[int]) -> None:
        """All ranks record decode steps of these sizes, side by side."""
        self._each([partial(rank.runner.record, sizes) for rank in self.ranks])

    def close(self) -> None:
        """End the threads of all ranks."""
        for comm in self._comms:
            comm.close()
        self._threads.shutdown()

    def _each(self, works: Sequence[Callable[[], _T]]) -> list[_T]:
        def guarded(work: Callable[[], _T]) -> _T:
            try:
                return work()
            except BaseException:
                for comm in self._comms:  # no rank waits for one that failed
                    comm.close()
                raise

        futures = [self._threads.submit(guarded, work) for work in works]
        errors = [future.exception() for future in futures]
        for error in sorted((e for e in errors if e is not None), key=lambda e: type(e).__name__ == "PeerGone"):
            raise error
        return [future.result() for future in futures]


def ranked_engine(
    path: Path, mesh: Mesh, dtype: torch.dtype, *, partition: Sequence[int] = (), column: str = "auto",
    page_size: int = 8, page_count: int = 160, load_format: str = "auto", quantization: str = "auto",
) -> tuple[DirectEngine, RankedRunner]:  # fmt: skip
    """A DirectEngine that decides for all ranks of a mesh, and its runner, to be closed."""

    def rank(shard: Shard, comm: Comm) -> RunnerRank:
        return RunnerRank.make(
            path, shard, comm, dtype, column=column, page_size=page_size, page_count=page_count,
            load_format=load_format, quantization=quantization,
        )  # fmt: skip

    runner = RankedRunner(rank, load_spec(path).shards(mesh, partition), mesh)
    direct = DirectEngine(runner.ranks[0].model, load("cpu", column), page_size=page_size, page_count=page_count)
    direct.runner = runner
    return direct, runner
