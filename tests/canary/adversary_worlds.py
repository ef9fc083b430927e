"""The engines that the adversary attacks: one with a host tier and files, and a pair that hands over. Their models are
toys, of which every wrong KV byte makes wrong tokens, or small random ones of real families, with the answers of
transformers: a mixture of experts, and latent attention with experts."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.cache import PageState, Tier
from serinus.canary import CanaryLead, Violation
from serinus.core.clock import Clock, ManualClock, WallClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.private_folder import PrivateFolder
from serinus.core.request import FinishReason, Usage
from serinus.engine import build_engine
from serinus.engine.built import Built
from serinus.models import TOY_ARCHITECTURE, ModelSpec, load_spec, make_checkpoint
from serinus.pd import ShmBackend
from serinus.pool import DevicePool, HostPool, RequestTable
from serinus.ranks.thread_ranks import ThreadRanks
from serinus.ranks.tier_parts import pause
from serinus.selftest import CANARY_SHAPES, EngineDriver, EnginePair, make_canary_toy
from serinus.testing.oracle import toy_continue

from .adversary_sites import Targets

__all__ = ["SHAPES", "WORLDS", "Pair", "Tiered", "World", "make_model"]

_FAMILIES = {"moe": "qwen3_moe", "mla": "deepseek_v2_lite"}
SHAPES = (*CANARY_SHAPES, *_FAMILIES)
"""Models: toys, and small ones of real families."""

_SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "page_size": 4, "max_total_tokens": 256, "max_running_requests": 4,
    "chunked_prefill_size": 16, "decode_log_interval": 0, "kv_canary_real_data": "all", "kv_canary_stats_interval": 0,
    "kv_canary_sweep_interval": 0,
}  # fmt: skip
_TIERS: dict[str, Any] = {
    "enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_write_policy": "write_through",
    "hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete",
}  # fmt: skip
_WAIT_S = 0.0005
_NEAR = 1e-5
"""A token whose logit is so near to the best one's may be the best of an engine that sums in another order."""
_IN_USE = (PageState.REQUEST, PageState.TREE)


class World(Protocol):
    """What a round needs of its engines."""

    phase_s: float
    """Seconds that some requests take, about."""
    spec: ModelSpec
    has_tiers: bool

    def right(self, prompt: list[int], count: int) -> list[int]:
        """The answer, computed apart; empty: it hangs on rounding."""
        ...

    def ask(self, prompt: list[int], count: int, *, stream: bool) -> str: ...
    def turn(self) -> None: ...
    @property
    def idle(self) -> bool: ...
    def finish(self, rid: str) -> FinishReason | None: ...
    def tokens(self, rid: str) -> list[int]: ...
    def took(self, seconds: float) -> None: ...
    def targets(self) -> Targets: ...
    def shelve(self, depth: int) -> None:
        """What is cached goes down to the host (1), or to the files (2)."""
        ...

    def settle(self) -> None:
        """Wait for copies, and take a last turn for what they tell."""
        ...

    def rest(self) -> None:
        """Forget what is cached."""
        ...

    def close(self) -> None: ...
    @property
    def steps(self) -> int: ...
    @property
    def told(self) -> int:
        """Violations that its canaries have found so far."""
        ...

    def told_first(self, after: int) -> int:
        """The step that found violation number `after`."""
        ...

    @property
    def refused(self) -> int:
        """Prompts whose pages were not believed when they came, and were computed here."""
        ...


class _Base:
    def __init__(self, engines: list[Built], memory: _Memory) -> None:
        self._engines, self._memory = engines, memory
        self.phase_s = 0.03
        self.spec = engines[0].spec
        self.has_tiers = engines[0].tiers is not None
        self._found: list[int] = []
        self._asked = 0
        for lead in self._leads():
            lead.listeners.append(self._hear)

    def right(self, prompt: list[int], count: int) -> list[int]:
        if self.spec.architecture == TOY_ARCHITECTURE:
            return toy_continue(self.spec, prompt, count)
        return _greedy(self.spec.path, prompt, count)

    def _leads(self) -> list[CanaryLead]:
        leads = [built.engine.canary for built in self._engines]
        return [lead for lead in leads if lead is not None]

    def _hear(self, finding: object) -> None:
        if isinstance(finding, Violation):
            self._found.append(self.steps)

    @property
    def steps(self) -> int:
        return sum(lead.steps for lead in self._leads())

    @property
    def told(self) -> int:
        return len(self._found)

    def told_first(self, after: int) -> int:
        return self._found[after]

    @property
    def refused(self) -> int:
        series = [built.metrics.by_labels("num_recomputed_requests") for built in self._engines]
        return int(sum(sum(each.values()) for each in series))

    def took(self, seconds: float) -> None:
        self.phase_s = 0.8 * self.phase_s + 0.2 * min(seconds, 1.0)

    def rest(self) -> None:
        """The memory is then as it was in the beginning: what the next fault hits was written for its own round."""
        self.settle()
        for built in self._engines:
            built.cache.reset()
        found = self.targets()
        for area in (*found.kv, *found.stamps, *found.host, *found.tables):
            area[:] = 0

    def settle(self) -> None:
        """Wait for copies, where there are any; see World."""

    def targets(self) -> Targets:
        """Raw memory, whatever it is for."""
        return self._memory.targets(self._engines)


def make_model(folder: Path, shape: str) -> Path:
    """A checkpoint of one of SHAPES."""
    if shape not in _FAMILIES:
        return make_canary_toy(folder, shape)
    return make_checkpoint(folder, _FAMILIES[shape], seed=3, layers=3, spread=1.5, tokenizer=False)


@cache
def _by_transformers(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def _greedy(path: str, prompt: list[int], count: int) -> list[int]:
    """transformers' greedy answer; empty: two tokens are as good somewhere."""
    answer = list[int]()
    with torch.no_grad():
        for _ in range(count):
            best = _by_transformers(path)(torch.tensor([prompt + answer])).logits[0, -1].topk(2)
            if float(best.values[0] - best.values[1]) < _NEAR:
                return []
            answer.append(int(best.indices[0]))
    return answer


class _Memory:
    """The pools and tables that came into this process while `found` was filled, of all ranks of all engines."""

    def __init__(self) -> None:
        self._others = {id(each) for each in _of_process()}
        self._pools: list[DevicePool] = []
        self._host: list[HostPool] = []
        self._tables: list[RequestTable] = []

    def take(self) -> None:
        """The engines are built."""
        for each in _of_process():
            if id(each) in self._others:
                continue
            if isinstance(each, DevicePool):
                self._pools.append(each)
            elif isinstance(each, HostPool):
                self._host.append(each)
            else:
                self._tables.append(each)

    def targets(self, engines: list[Built]) -> Targets:
        """What of it is in use, these engines know."""
        found = Targets(host=[pool.data_PY for pool in self._host if pool.page_bytes])
        for host in self._host:
            of = [each for each in engines if each.tiers is not None and host in each.tiers.host.values()] or engines
            found.used[host.data_PY.ctypes.data, host.page_count] = partial(_used, of, Tier.HOST, host.page_count, 1)
        for pool in self._pools:
            lanes = [_raw(half) for pair in pool.layers for half in pair]
            if not lanes:
                continue
            found.kv += lanes
            stamps = [] if pool.stamps_LS4 is None else [_raw(lane) for lane in pool.stamps_LS4]
            found.stamps += stamps
            pages, size = pool.spec.page_count, pool.spec.page_size
            found.pages.append([lane.reshape(pages, -1) for lane in (*lanes, *stamps)])
            found.pools.append(pool)
            of = [each for each in engines if pool in each.pools.values()] or engines
            for lane in (*lanes, *stamps):
                found.used[lane.ctypes.data, len(lane)] = partial(_used, of, Tier.DEVICE, pages, size)
                found.used[lane.ctypes.data, pages] = partial(_used, of, Tier.DEVICE, pages, 1)
        found.tables = [table.table.numpy() for table in self._tables]
        return found


def _used(engines: list[Built], tier: Tier, page_count: int, page_rows: int) -> NDArray[np.int64]:
    """Rows of pages that are of a request or of a prefix, in a pool of so many pages."""
    ledgers = [ledger for each in engines for (of, _), ledger in each.cache.ledgers.items() if of is tier]
    owners = [ledger.owner_P & 7 for ledger in ledgers if ledger.page_count == page_count]
    pages = np.flatnonzero(np.logical_or.reduce([np.isin(each, _IN_USE) for each in owners]))
    return (pages[:, None] * page_rows + np.arange(page_rows)).reshape(-1)


def _of_process() -> list[DevicePool | HostPool | RequestTable]:
    return [each for each in gc.get_objects() if type(each) in (DevicePool, HostPool, RequestTable)]


def _raw(tensor: Any) -> NDArray[np.uint8]:
    """The bytes of a tensor, to be written."""
    return tensor.view(torch.uint8).reshape(len(tensor), -1).numpy()


class Tiered(_Base):
    """One engine with a host tier and files, of one rank or several."""

    def __init__(self, checkpoint: Path, files: Path, mode: str, coverage: str, **ranks: int) -> None:
        names = {**_names(checkpoint, mode, coverage), **_TIERS, **ranks, "model_path": str(checkpoint),
                 "hicache_storage_dir": str(files)}  # fmt: skip
        config, memory = from_names(ServeConfig, names), _Memory()
        self._files = files
        self._clock: Clock = WallClock() if ranks else ManualClock()
        with ExitStack() as undo:
            starter = None
            if ranks:
                starter = ThreadRanks(config, undo.enter_context(PrivateFolder()), self._clock)
                undo.callback(starter.close)
            self._built = build_engine(config, self._clock, starter)
            undo.callback(self._built.close)
            self._ends = undo.pop_all()
        memory.take()
        self._driver = EngineDriver(self._built)
        super().__init__([self._built], memory)

    def ask(self, prompt: list[int], count: int, *, stream: bool) -> str:
        self._asked += 1
        self._driver.add(f"r{self._asked}", prompt, count, stream=stream)
        return f"r{self._asked}"

    def turn(self) -> None:
        if isinstance(self._clock, ManualClock):
            self._clock.advance(0.01)
        if not self._driver.turn():
            self._driver.wait()

    @property
    def idle(self) -> bool:
        return self._built.engine.idle

    def finish(self, rid: str) -> FinishReason | None:
        return self._driver.finish(rid)

    def tokens(self, rid: str) -> list[int]:
        return self._driver.tokens(rid)

    def usage(self, rid: str) -> Usage | None:
        """What a request that ended cost, with its receipt."""
        return self._driver.deltas[rid][-1].usage

    def targets(self) -> Targets:
        found = super().targets()
        found.files = partial(_files_of, self._files)
        return found

    def shelve(self, depth: int) -> None:
        self.settle()
        for tier in (Tier.DEVICE, Tier.HOST)[:depth]:
            for part in self._built.pools:
                self._built.cache.evict(1 << 20, tier, part)

    def settle(self) -> None:
        for _ in range(200):
            self.turn()
            if not self._built.cache.poll().in_flight:
                return
            pause(_WAIT_S)

    def close(self) -> None:
        self._ends.close()


class Pair(_Base):
    """A prefill and a decode engine; KV goes through shared memory."""

    def __init__(self, checkpoint: Path, files: Path, mode: str, coverage: str, **more: Any) -> None:
        names = {**_names(checkpoint, mode, coverage), **more}
        self._files = files
        self._others, memory = set(_segments()), _Memory()
        self.pair = EnginePair(checkpoint, backend=ShmBackend(1 << 18), **names)
        memory.take()
        super().__init__([self.pair.prefill.built, self.pair.decode.built], memory)

    def ask(self, prompt: list[int], count: int, *, stream: bool) -> str:
        self._asked += 1
        self.pair.add(f"r{self._asked}", prompt, count, stream=stream)
        return f"r{self._asked}"

    def turn(self) -> None:
        self.pair.turn_prefill()
        self.pair.turn_decode()

    @property
    def idle(self) -> bool:
        return self.pair.idle

    def finish(self, rid: str) -> FinishReason | None:
        return self.pair.decode.finish(rid)

    def tokens(self, rid: str) -> list[int]:
        return self.pair.tokens(rid)

    def targets(self) -> Targets:
        found = super().targets()
        found.files = partial(_files_of, self._files)
        found.segments = [link for link in _segments() if link not in self._others]
        return found

    def shelve(self, depth: int) -> None:
        """There is no tier below."""

    def settle(self) -> None:
        for _ in range(3):
            self.turn()

    def close(self) -> None:
        self.pair.close()


def _files_of(folder: Path | str) -> list[str]:
    """Their paths. Cost: about 1 us each."""
    found = []
    for entry in os.scandir(folder):
        found += _files_of(entry.path) if entry.is_dir() else (entry.path,)
    return found


def _segments() -> list[Path]:
    """Memory of this process that others can map, by the system's own names."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:" in str(link.readlink()):
                found.append(link)
        except OSError:  # the listing itself
            continue
    return found


def _names(checkpoint: Path, mode: str, coverage: str) -> dict[str, Any]:
    """Settings of a mode; `confirmed`: heal, with streams of verified tokens alone. Families compute in fp32 on every
    CPU, as transformers does for what is right."""
    of_mode = {"kv_canary": "heal", "kv_canary_stream": mode} if mode == "confirmed" else {"kv_canary": mode}
    dtype = "auto" if load_spec(checkpoint).architecture == TOY_ARCHITECTURE else "float32"
    return {**_SETTINGS, **of_mode, "kv_canary_coverage": coverage, "dtype": dtype}


WORLDS: dict[str, Callable[[Path, Path, str, str], World]] = {
    "tiers": Tiered,
    "pair": Pair,
    "tp2": partial(Tiered, tp_size=2),
    "pp2": partial(Tiered, pp_size=2),
}
"""By the names that the matrix has."""
