"""What the canary costs a rank: the 221M model and the shape of Qwen3-0.6B with and without it, decode at batch 16 and
a prefill chunk, in one run.

Goals, of decode time: `partial` + rotating:16 <= 1 %, `all` + rotating:16, the default, <= 1.5 %, `all` + full
<= 15 %; digests of pages that arrive >= 15 GB/s. Ceiling of a digest: a plain sum over as many bytes. Every mode has an
engine of its own; they take turns step by step, and how much longer a step is than the plain one of its turn counts: of
each of 16 phases of the rotation the median of the rounds, and the mean of these. Where the pages of a pool lie makes
an engine a percent or two faster or slower than another one, so all are made anew `--draws` times: `decode_overhead` is
the mean of what the draws found, `spread` its standard error.

`fixed`: CPU time of the canary's own calls in a step of the whole engine as it is by default, leader and rank, on one
thread: what a step pays whatever its weights are. What attention and stores digest is not in it. 1.5 % of a step of 17
to 20 ms are 255 to 300 us.

    python benchmarks/canary.py [--rounds 5] [--draws 12] [--threads 2] [--dtype auto] [--checkpoint DIR] [--larger DIR]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import checkpoint, checkpoint_221m
from report import bandwidth, emit, mean_error
from torch import Tensor

import serinus.ranks.line
from serinus.canary import CanaryRank, CheckSettings
from serinus.canary.commands import CheckRows, RowPages
from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.parts import PageSpan, Part
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.core.stamps import digest_coefficients
from serinus.engine import build_engine
from serinus.kernels import Kernels, load, prefer_huge_pages
from serinus.models import Model, choose_dtype, load_model, load_spec
from serinus.selftest import EngineDriver
from serinus.testing.direct import DirectEngine, DirectSeq

BATCH, PROMPT, CHUNK, PAGE, STRIDE = 16, 256, 512, 16, 16
MODES = {
    "partial_rotating": ("partial", STRIDE),
    "all_rotating": ("all", STRIDE),
    "all_full": ("all", 1),
    "none": None,
}
"""The pools of the first keep stamps."""
GOALS = {"partial_rotating": 0.01, "all_rotating": 0.015, "all_full": 0.15}
GOAL_FIXED_US = 300
GOAL_GB_S = 15.0
DIGEST_SHAPES = ((1024, 12), (256, 24))
"""16-bit lanes of a row, layers."""
CLOCK = WallClock()


def engine_of(model: Model, kernels: Kernels, mode: str, steps: int, beside: DirectEngine | None) -> DirectEngine:
    """An engine under the canary of that mode; the first one's pools have pages for all, each for its batch and one
    chunk: where they lie in memory is then the same for all."""
    pages = len(MODES) * (BATCH * -(-(PROMPT + steps + 1) // PAGE) + CHUNK // PAGE + 2)
    choice = MODES[mode]

    def canary(engine: DirectEngine) -> CanaryRank:
        assert choice is not None
        settings = CheckSettings(page_size=PAGE, real_data=choice[0], stride=choice[1])
        layers = {part: model.spec.layers_of(part) for part in model.spec.parts}
        return CanaryRank(settings, engine.pools, engine.tables, layers, load("cpu"))

    return DirectEngine(
        model, kernels, page_size=PAGE, page_count=pages, canary=None if choice is None else canary, beside=beside
    )


def start(engine: DirectEngine, length: int, tokens: int, seed: int) -> DirectSeq:
    rng = Rng(seed)
    prompt = [rng.randrange(5, 32000) for _ in range(length)]
    return engine.start(prompt, SamplingParams(temperature=0.0), tokens=tokens, seed=seed)


def seconds(job: Callable[[], object]) -> float:
    begin = CLOCK.now()
    job()
    return CLOCK.now() - begin


def decode_seconds(engines: dict[str, DirectEngine], rounds: int) -> dict[str, list[float]]:
    """Decode steps of the batch, in turns of another order each, as an engine's step is slower behind some than behind
    others; whole rotations."""
    batches: dict[str, list[DirectSeq]] = {}
    for mode, engine in engines.items():
        batches[mode] = [start(engine, PROMPT, (rounds + 1) * STRIDE, i) for i in range(BATCH)]
        for seq in batches[mode]:
            engine.step([(seq, PROMPT)])
    jobs = {mode: partial(engine.step, [(seq, 1) for seq in batches[mode]]) for mode, engine in engines.items()}
    spent = in_turns(jobs, (rounds + 1) * STRIDE - 1, 1)
    return {mode: steps[STRIDE - 1 :] for mode, steps in spent.items()}


def in_turns(jobs: dict[str, Callable[[], object]], steps: int, seed: int) -> dict[str, list[float]]:
    """Seconds of so many calls of each job, in turns of another order each."""
    order, spent = np.random.default_rng(seed), {name: list[float]() for name in jobs}
    for _ in range(steps):
        for name in order.permutation(list(jobs)).tolist():
            spent[name].append(seconds(jobs[name]))
    return spent


def overhead(steps: list[float], plain: list[float]) -> float:
    """How much longer steps are than plain ones of the same turns: of each phase of the rotation the median, and of
    these the mean."""
    ratios = np.array(steps).reshape(-1, STRIDE) / np.array(plain).reshape(-1, STRIDE) - 1
    return float(np.median(ratios, 0).mean())


def told(shares: list[float], goal: float) -> dict[str, Any]:
    """What draws found: the mean and its standard error."""
    mean, error = mean_error(shares)
    return {
        "decode_overhead": round(mean, 4),
        "spread": round(error, 4),
        "draws": [round(share, 4) for share in shares],
        "goal": goal,
    }


def end_seconds(engine: DirectEngine, rounds: int) -> float:
    """The check of all KV of one request at the end of its answer, CHUNK tokens: the median."""
    assert engine.canary is not None
    seq = start(engine, CHUNK + 1, 0, 999)
    engine.step([(seq, CHUNK)])
    span = PageSpan(part=Part.FULL, first=0, pages=(seq.slots[:CHUNK:PAGE] // PAGE).astype(np.int32))
    row = RowPages(rid="end", spans=(span,), tokens=seq.prompt[:CHUNK], row=seq.row)
    spent = []
    for number in range(10 * rounds):
        begin = CLOCK.now()
        (answer,) = engine.canary.obey(CheckRows(number=number, rows=(row,)))
        spent.append(CLOCK.now() - begin)
        assert not answer.violations, "a violation, expected none"
    engine.finish(seq)
    return statistics.median(spent)


def prefill_seconds(engines: dict[str, DirectEngine], rounds: int) -> dict[str, float]:
    """One chunk of a new prompt."""
    best = dict.fromkeys(engines, float("inf"))
    for turn in range(rounds):
        for mode, engine in engines.items():
            seq = start(engine, CHUNK + 1, 0, 1000 + turn)
            best[mode] = min(best[mode], seconds(lambda e=engine, s=seq: e.step([(s, CHUNK)])))  # type: ignore[misc]
            engine.finish(seq)
    return best


def costs(path: Path, dtype_name: str, rounds: int, draws: int) -> dict[str, Any]:
    """What every mode costs one model, by so many engines of each."""
    kernels, spec = load("cpu"), load_spec(path)
    dtype = choose_dtype(spec, dtype_name)
    model = load_model(spec, path, dtype, kernels)
    found: dict[str, list[float]] = {mode: [] for mode in GOALS}
    plain: list[float] = []
    engines: dict[str, DirectEngine] = {}
    for _ in range(draws):
        check(engines)
        engines.clear()
        for mode in MODES:
            engines[mode] = engine_of(model, kernels, mode, (rounds + 1) * STRIDE, next(iter(engines.values()), None))
        decode = decode_seconds(engines, rounds)
        plain += decode["none"]
        for mode, shares in found.items():
            shares.append(overhead(decode[mode], decode["none"]))
    prefill = prefill_seconds(engines, rounds)
    end = end_seconds(engines["all_rotating"], rounds)
    check(engines)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "decode_step_ms": round(statistics.median(plain) * 1e3, 2),
        "prefill_chunk_ms": round(prefill["none"] * 1e3, 1),
        "modes": {
            mode: {
                **told(shares, GOALS[mode]),
                "prefill_overhead": round(prefill[mode] / prefill["none"] - 1, 4),
            }
            for mode, shares in found.items()
        },
        "end_of_answer": {"tokens": CHUNK, "ms": round(end * 1e3, 2), "of_prefill": round(end / prefill["none"], 4)},
    }


def check(engines: dict[str, DirectEngine]) -> None:
    """Raises AssertionError: an engine found a violation."""
    assert not any(engine.violations for engine in engines.values()), "a violation, expected none"


class Spent:
    """CPU time of some calls of this thread, by name; what one of them calls of the others counts there alone."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = {}
        self._inner: list[int] = []

    def watch(self, name: str, owner: Any, calls: tuple[str, ...]) -> None:
        """Count these calls of an object under a name."""
        for call in calls:
            setattr(owner, call, self._counted(name, getattr(owner, call)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            begin = time.thread_time_ns()
            self._inner.append(0)
            try:
                return call(*given, **named)
            finally:
                spent = time.thread_time_ns() - begin
                self.ns[name] = self.ns.get(name, 0) + spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        return counted


def decoding(path: Path, steps: int, **named: Any) -> EngineDriver:
    """A whole engine that decodes its batch, for so many steps and more; all that is not named is as by default."""
    given = {"model_path": str(path), "max_total_tokens": 8192, "context_length": 1024, "max_step_ms": 0}
    config = from_names(ServeConfig, {**given, "decode_log_interval": 0, **named})
    driver = EngineDriver(build_engine(config, CLOCK))
    for index in range(BATCH):
        rng = Rng(index)
        prompt = [rng.randrange(5, 32000) for _ in range(PROMPT)]
        driver.add(str(index), prompt, steps + 2 * STRIDE, seed=index, stream=True)
    while not all(driver.deltas.values()):
        driver.turn()
    return driver


def fixed_us(path: Path, dtype: str, rounds: int) -> dict[str, float]:
    """Microseconds of CPU time of the canary's own calls in a decode step, by part: medians over steps."""
    steps = (rounds + 1) * STRIDE
    driver = decoding(path, steps, threads=1, dtype=dtype)
    built = driver.built
    spent, lead, rank = Spent(), built.engine.canary, built.canary
    assert lead is not None, "the canary is not on by default"
    assert rank is not None, "the canary has no rank here"
    spent.watch("leader", lead, ("begin", "judge"))
    spent.watch("leader", serinus.ranks.line, ("slots_checked",))
    spent.watch("what_is_due", rank, ("begin",))
    spent.watch("read_rings", rank, ("returned", "mark", "found", "checked"))
    spent.watch("before_layers", rank.hook, ("can_replay", "stage", "before", "before_layer"))
    spent.watch("layers_are_told", rank.hook, ("writes", "reads", "layer_digests"))
    spent.watch("after_layers", rank.hook, ("after",))
    found: list[dict[str, int]] = []
    while len(found) < steps:
        assert not built.engine.idle, f"the engine is done after {len(found)} whole steps, expected {steps}"
        spent.ns.clear()
        if len(driver.turn()) == BATCH:
            found.append(dict(spent.ns))
    parts = {name: round(statistics.median(each[name] for each in found[STRIDE:]) / 1e3, 1) for name in found[-1]}
    return {**parts, "sum": round(statistics.median(sum(each.values()) for each in found[STRIDE:]) / 1e3, 1)}


class Pages:
    """Pools far larger than the caches, with slots on shuffled pages: a piece of 6 MB of them at each turn."""

    def __init__(self, lanes: int, layers: int) -> None:
        count = (512 << 20) // (layers * 4 * lanes) // PAGE * PAGE
        words = torch.empty((layers * 2, count * lanes), dtype=torch.int16)
        prefer_huge_pages(words.data_ptr(), words.nbytes)
        noise = torch.randint(-30000, 30000, (count * lanes,), dtype=torch.int16)
        for i in range(layers * 2):
            words[i] = noise
        pools = [row.view(torch.bfloat16).view(count, 1, lanes) for row in words]
        self.kv = list(zip(pools[::2], pools[1::2], strict=True))
        order = torch.randperm(count // PAGE - 1) + 1
        self.slots = (order[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)
        self.size = (6 << 20) // (layers * 4 * lanes) // PAGE * PAGE
        self.bytes = self.size * layers * 4 * lanes
        self._turn = itertools.count()

    def piece(self) -> Tensor:
        at = next(self._turn) % (len(self.slots) // self.size)
        return self.slots[at * self.size : (at + 1) * self.size]


def digest_rates(ops: Kernels, lanes: int, layers: int, threads: int, rounds: int) -> dict[str, float]:
    """GB/s of a digest and of a plain sum, by turns; ns a line of a partial digest."""
    torch.set_num_threads(threads)
    pages = Pages(lanes, layers)
    plain = torch.ones(100_000_000)
    step, turn = pages.bytes // 4, itertools.count()
    factors, few = (
        torch.from_numpy(digest_coefficients(range(layers), range(1), lanes, 2, partial=p)) for p in (False, True)
    )

    def add() -> None:
        at = next(turn) % (len(plain) // step)
        plain[at * step : (at + 1) * step].sum()

    jobs = {
        "sum": add,
        "all": lambda: ops.canary_digest(pages.kv, pages.piece(), factors),
        "partial": lambda: ops.canary_digest(pages.kv, pages.piece(), few),
    }
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(20 * rounds):
        for name, job in jobs.items():
            best[name] = min(best[name], seconds(job))
    return {
        "digest_gb_s": round(pages.bytes / best["all"] / 1e9, 1),
        "sum_gb_s": round(pages.bytes / best["sum"] / 1e9, 1),
        "of_sum": round(best["sum"] / best["all"], 2),
        "partial_ns_a_line": round(best["partial"] / (pages.size * layers * 2) * 1e9, 1),
    }


def parser(words: str | None, draws: int) -> argparse.ArgumentParser:
    """Of what the benchmarks of the canary's cost take."""
    arguments = argparse.ArgumentParser(description=words)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--draws", type=int, default=draws, help="times that all engines are made anew, at least 2")
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--checkpoint", default="", help="directory of the 221M model, to use or to make")
    arguments.add_argument("--larger", default="", help="directory for 0.6b, to use or to make; none: it is made anew")
    return arguments


def main() -> None:
    arguments = parser(__doc__, draws=12)
    arguments.add_argument("--dtype", default="auto", help="as `serve` takes it; auto = what this CPU computes in")
    args = arguments.parse_args()
    kernels = load("cpu")
    path = checkpoint_221m(args.checkpoint)
    fixed = fixed_us(path, args.dtype, args.rounds)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as made:
        larger = costs(checkpoint("0.6b", Path(args.larger or made)), args.dtype, args.rounds, args.draws)
    smaller = costs(path, args.dtype, args.rounds, args.draws)
    shapes = {
        f"{lanes}x{layers}": {
            f"threads_{count}": digest_rates(kernels, lanes, layers, count, args.rounds) for count in (1, args.threads)
        }
        for lanes, layers in DIGEST_SHAPES
    }
    emit(
        "canary",
        fixed_us=fixed,
        goal_fixed_us=GOAL_FIXED_US,
        **smaller,
        qwen3_0_6b=larger,
        digest=shapes["1024x12"][f"threads_{args.threads}"],
        shapes=shapes,
        goal_gb_s=GOAL_GB_S,
        bandwidth_gb_s=round(bandwidth(kernels, getattr(torch, smaller["dtype"])) / 1e9, 1),
    )


if __name__ == "__main__":
    main()
