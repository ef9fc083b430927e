"""`serinus sim`: run the simulated cluster from seeds, and make what fails small and repeatable."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from serinus.cli.parser import Command, UsageProblem, make_parser
from serinus.cli.show import check_folder, console, write_json, write_text
from serinus.cli.sim_picture import draw_timeline
from serinus.core.clock import WallClock
from serinus.core.errors import ConfigError
from serinus.core.heap import settle_heap

if TYPE_CHECKING:
    from rich.console import Console

    from serinus.sim import Run, Scenario

_SHAPES: Mapping[str, tuple[bool | None, bool | None]] = {
    "": (None, None),
    "full": (False, False),
    "sliding": (True, None),
    "latent": (False, True),
}
"""What --shape says to `slides` and `latent` of the drawing."""
_BATCH = 25
"""Seeds that a worker takes at once."""


def run(command: Command, words: Sequence[str]) -> int:
    """Run the seeds that are asked for. 0 = nothing was found, 1 = something was."""
    arguments = _arguments(command, words)
    out = console(stderr=True)
    if arguments.scenario:
        return _replay(_read(arguments.scenario), arguments, out)
    if arguments.seed is not None:
        return _replay(_draw(arguments.seed, arguments.backend, arguments.shape), arguments, out)
    return _many(arguments, out)


def _arguments(command: Command, words: Sequence[str]) -> Any:
    parser = make_parser(command, settings=False)
    which = parser.add_argument_group("What to run")
    which.add_argument("--seed", type=int, metavar="N", help="one seed, in detail; a failure is shrunk and shown")
    which.add_argument("--seeds", metavar="A..B", help="seeds from A up to but not including B (default: 0..1000)")
    which.add_argument("--minutes", type=float, metavar="M", help="seeds from A (or 0) on until M minutes are over")
    which.add_argument("--scenario", metavar="FILE", help="a schedule that an earlier run wrote (JSON)")
    which.add_argument(
        "--backend",
        default="",
        metavar="NAME",
        help="how pages travel: local, shm, tcp, push, pull or ipc (default: drawn)",
    )
    which.add_argument(
        "--shape",
        default="",
        metavar="NAME",
        help="what layers have of a token: full, sliding (some of them) or latent (default: drawn)",
    )
    how = parser.add_argument_group("How to run it")
    how.add_argument("--workers", type=int, default=1, metavar="N", help="processes, one core each (default: 1)")
    how.add_argument("--no-shrink", action="store_true", help="show a failure as it came")
    how.add_argument("--json", metavar="FILE", help="write the result there (- is standard output)")
    how.add_argument("--timeline", metavar="FILE", help="draw the run of --seed or --scenario as a timeline (SVG)")
    arguments = parser.arguments(words)
    check_folder("--timeline", arguments.timeline)
    if arguments.timeline and arguments.seed is None and not arguments.scenario:
        raise UsageProblem("--timeline draws one run, expected --seed N or --scenario FILE beside it")
    if arguments.workers < 1:
        raise UsageProblem(f"--workers is {arguments.workers}, expected at least 1")
    if arguments.backend not in ("", "local", "shm", "tcp", "push", "pull", "ipc"):
        raise UsageProblem(f"--backend is {arguments.backend!r}, expected local, shm, tcp, push, pull or ipc")
    if arguments.shape not in _SHAPES:
        raise UsageProblem(f"--shape is {arguments.shape!r}, expected full, sliding or latent")
    return arguments


def _draw(seed: int, backend: str, shape: str) -> Scenario:
    from serinus.sim import draw

    slides, latent = _SHAPES[shape]
    return draw(seed, backend=backend, slides=slides, latent=latent)


def _read(path: str) -> Scenario:
    from serinus.sim import Scenario

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cli: cannot read the scenario {path}: {error.strerror}") from None
    return Scenario.from_json(text)


# ---- one run ------------------------------------------------------------------------------------------------------


def _replay(scenario: Scenario, arguments: Any, out: Console) -> int:
    from serinus.sim import Moment
    from serinus.sim import run as run_world

    moments: list[Moment] = []
    result = run_world(scenario, moments)
    if arguments.timeline:
        write_text(arguments.timeline, draw_timeline(scenario, result, moments))
    for line in scenario.describe():
        out.print(line, markup=False, highlight=False)
    _print_run(result, out)
    if result.finding is None:
        write_json(arguments.json, {"seeds": 1, "failed": [], "counts": result.counts, "ends": result.ends})
        return 0
    small = scenario if arguments.no_shrink else _shrunk(scenario, out)
    write_json(
        arguments.json,
        {"seeds": 1, "failed": [{"seed": scenario.seed, "finding": result.finding.text, "scenario": small.to_json()}]},
    )
    return 1


def _print_run(result: Run, out: Console) -> None:
    ends = ", ".join(f"{number} {end}" for end, number in sorted(result.ends.items()))
    out.print(
        f"\n{result.steps} events, {result.frames} frames, {result.seconds:.1f} s of virtual time; clients: {ends}",
        markup=False, highlight=False,
    )  # fmt: skip
    counts = ", ".join(f"{name} {number}" for name, number in sorted(result.counts.items()) if number)
    out.print(counts, markup=False, highlight=False)
    if result.finding is None:
        out.print("nothing was found", style="green")
    else:
        found = result.finding
        out.print(f"\nFOUND at {found.at:.3f} s, event {found.step}: {found.kind}", style="bold red")
        out.print(found.text, markup=False, highlight=False)


def _shrunk(scenario: Scenario, out: Console) -> Scenario:
    from serinus.sim import run as run_world
    from serinus.sim import shrink

    with out.status("shrinking") as status:
        small = shrink(
            scenario,
            progress=lambda runs, best: status.update(
                f"shrinking: {runs} runs, {len(best.works)} requests, {len(best.faults)} faults"
            ),
        )
    out.print("\nThe smallest schedule that still fails:", style="bold")
    for line in small.describe():
        out.print(f"  {line}", markup=False, highlight=False)
    finding = run_world(small).finding
    if finding is not None:
        out.print(f"  {finding.kind} at {finding.at:.3f} s: {finding.text}", markup=False, highlight=False)
    out.print(f"\nreplay:  serinus sim --seed {scenario.seed}", markup=False, highlight=False)
    out.print("or save the next line to a file and run  serinus sim --scenario FILE", markup=False, highlight=False)
    out.print(small.to_json(), markup=False, highlight=False, soft_wrap=True)
    return small


# ---- many runs ----------------------------------------------------------------------------------------------------


def _range(text: str | None, endless: bool) -> Iterator[int]:
    if text is None:
        return count() if endless else iter(range(1000))
    first, dots, last = text.partition("..")
    try:
        if endless and not dots:
            return count(int(first))
        seeds = range(int(first), int(last))
    except ValueError:
        raise UsageProblem(f"--seeds is {text!r}, expected A..B, for example 0..2000") from None
    if not seeds:
        raise UsageProblem(f"--seeds is {text!r}, which are none, expected A below B")
    return iter(seeds)


def _begin() -> None:
    """Import the simulation, and let the collector of garbage pass over what was imported: it is never garbage."""
    import serinus.sim  # noqa: F401

    settle_heap()


def _begin_worker() -> None:
    """The terminal sends Ctrl-C to workers too: it is the process that asked for them that ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _begin()


def run_batch(seeds: Sequence[int], backend: str, shape: str) -> list[tuple[int, str, int, dict[str, int]]]:
    """(seed, what was found or empty, events, counts) of each; what a worker process does."""
    from serinus.sim import run as run_world

    found = []
    for seed in seeds:
        result = run_world(_draw(seed, backend, shape))
        text = "" if result.finding is None else f"{result.finding.kind}: {result.finding.text}"
        found.append((seed, text, result.steps, {**result.counts, **{f"end {e}": n for e, n in result.ends.items()}}))
    return found


def _many(arguments: Any, out: Console) -> int:
    clock = WallClock()
    start = clock.now()
    endless = arguments.minutes is not None
    seeds = _range(arguments.seeds, endless)
    until = start + 60 * arguments.minutes if endless else float("inf")
    listed = [] if endless else list(seeds)
    batches: Iterator[list[int]] = _batches(seeds if endless else iter(listed))
    failed: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    done = events = 0
    interrupt: KeyboardInterrupt | None = None
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[found]}"),
    )  # fmt: skip
    with Progress(*columns, console=out, disable=not out.is_terminal) as progress:
        task = progress.add_task("seeds", total=None if endless else len(listed), found="")
        try:
            for batch in _run_all(batches, arguments, clock, until):
                for seed, text, steps, tally in batch:
                    done, events = done + 1, events + steps
                    counts.update(tally)
                    if text:
                        failed.append({"seed": seed, "finding": text})
                        out.print(f"seed {seed}: {text}", style="red", markup=False, highlight=False)
                progress.update(task, completed=done, found=f"{len(failed)} found" if failed else "nothing found")
        except KeyboardInterrupt as error:
            interrupt = error
    seconds = clock.now() - start
    rate = 60 * done / seconds if seconds > 0 else 0.0
    write_json(
        arguments.json,
        {
            "seeds": done, "events": events, "seconds": round(seconds, 1), "seeds_per_minute": round(rate),
            "workers": arguments.workers, "failed": failed, "counts": dict(sorted(counts.items())),
        },
    )  # fmt: skip
    out.print(f"{done} seeds, {events} events in {seconds:.1f} s: {rate:.0f} seeds a minute; {len(failed)} failed")
    if interrupt is not None:
        raise interrupt  # the summary so far is out
    if failed:
        first = min(item["seed"] for item in failed)
        out.print(f"replay:  serinus sim --seed {first}", style="bold", highlight=False)
        if not arguments.no_shrink:
            _shrunk(_draw(first, arguments.backend, arguments.shape), out)
    return 1 if failed else 0


def _batches(seeds: Iterator[int]) -> Iterator[list[int]]:
    while batch := list(islice(seeds, _BATCH)):
        yield batch


def _run_all(
    batches: Iterator[list[int]], arguments: Any, clock: WallClock, until: float
) -> Iterator[list[tuple[int, str, int, dict[str, int]]]]:
    workers, backend, shape = arguments.workers, arguments.backend, arguments.shape
    if workers == 1:
        _begin()
        for batch in batches:
            yield run_batch(batch, backend, shape)
            if clock.now() >= until:
                return
        return
    try:
        with ProcessPoolExecutor(workers, initializer=_begin_worker) as pool:
            waiting = [pool.submit(run_batch, batch, backend, shape) for batch in islice(batches, 2 * workers)]
            try:
                while waiting:
                    yield waiting.pop(0).result()
                    if clock.now() < until:
                        waiting += [pool.submit(run_batch, batch, backend, shape) for batch in islice(batches, 1)]
            finally:
                pool.shutdown(cancel_futures=True)
    except BrokenProcessPool:
        raise ConfigError("cli: a worker process died (out of memory?), expected all to finish") from None
