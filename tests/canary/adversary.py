"""An adversary that knows nothing of the canary: it has raw memory, files and the functions that copy, and chance.

    python -m tests.canary.adversary --faults 3000 --seed 1 [--mode heal --coverage full --world pair --site "kv bit"]
                                     [--copies 1]

A real engine (a toy checkpoint, of which every wrong KV byte makes wrong tokens; with --shape moe or mla a small
mixture of experts, or a model of latent attention) with host tier and files, and a pair that hands over through shared
memory, answer prompts that share prefixes. One fault a round, at a random moment, from another thread (from another
process in the shared segment): a bit, 64 bytes, pages exchanged, shifted or played back with their stamps, entries of
row tables, files, copies of the wrong page, late, twice or left out. It aims at pages that are of a request or of a
prefix, as the page map shows them; it does not use what canary, perturb or self-test choose their victims by. A fault
of what copies spoils all copies while it lasts, with `--copies N` so many. Right answers are computed apart
(testing/oracle.py; those of moe and mla by transformers).

Half of the prompts are streamed. After a fault every prompt is gone on with behind its answer, so that what is still
there is read: from the device, from the host, from the files. The engines are one with tiers, a pair, one of two slices
and one of two stages; a site of its own changes weights while the files stay (adversary_weights.py).

It prints site x moment x setting, and what became of the faults: `told`: a violation. `refused`: pages that came in
files or through shared memory were not believed, and computed anew. `unread`: neither, and every answer is right: what
was damaged was overwritten, freed or used up before anything read it (the toy's every byte makes its token).
`wrong`: answers that ended well and are wrong, and in mode `confirmed` wrong tokens of streams: each fails the run,
unless docs/CANARY.md lists its site and setting (`BLIND`): read and not found. `streamed`: answers that ended in an
error and had wrong tokens before it. `stopped`: the engine ended itself: fails the run too. `steps`: from the fault to
the first violation, median and maximum.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from serinus.core.request import FinishReason
from serinus.core.rng import Rng
from serinus.ranks.tier_parts import pause

from .adversary_sites import SITES, Act, Site
from .adversary_worlds import SHAPES, WORLDS, World, make_model

__all__ = ["BLIND", "Cell", "run", "table"]

_UNDONE = "With `rotating:N`, bytes that change and change back between two turns of their page."
BLIND = {("mover: twice", "rotating:16"): _UNDONE}
"""Sites and coverage under which faults of all copies may end in wrong answers, as one copy that comes twice undoes
another; what docs/CANARY.md, "What it cannot see", says."""
SETTINGS = [(mode, coverage) for mode in ("raise", "heal", "confirmed") for coverage in ("full", "rotating:16")]
"""`confirmed`: heal, with `--kv-canary-stream confirmed`."""
_ENDS_WELL = (FinishReason.LENGTH, FinishReason.STOP)
_ROUNDS_OF_A_WORLD = 40
_NEW_TOKENS = 10
_TOKENS_AGAIN = 2
_TURNS_MAX = 4000


@dataclass(slots=True)
class Cell:
    """What became of the faults of one site at one moment, under one setting."""

    world: str
    site: str
    moment: str
    mode: str
    coverage: str
    copies: int = 0
    """That a fault of what copies spoils; 0: all while it lasts."""
    faults: int = 0
    answers: int = 0
    """Asked for, before and after the faults."""
    told: int = 0
    refused: int = 0
    unread: int = 0
    wrong: int = 0
    streamed: int = 0
    healed: int = 0
    failed: int = 0
    stopped: int = 0
    steps: list[int] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)

    @property
    def is_blind(self) -> bool:
        """Wrong answers that no list allows, or an engine that ended."""
        is_listed = self.copies == 0 and (self.site, self.coverage) in BLIND
        return self.stopped > 0 or (self.wrong > 0 and not is_listed)

    def line(self) -> str:
        """One row of the matrix."""
        steps = f"{statistics.median(self.steps):.0f}/{max(self.steps)}" if self.steps else "-"
        counts = (
            self.faults, self.told, self.refused, self.unread, self.healed, self.failed, self.streamed, self.stopped,
            self.wrong,
        )  # fmt: skip
        name = f"{self.world:6} {self.site:15} {self.moment:8} {self.mode:9} {self.coverage:12}"
        return name + "".join(f"{count:9}" for count in counts) + f"{steps:>9}" + ("  BLIND" if self.is_blind else "")


def table(cells: Sequence[Cell]) -> str:
    """The matrix, in words."""
    heads = ("faults", "told", "refused", "unread", "healed", "failed", "streamed", "stopped", "wrong", "steps")
    lines = [f"{'world':6} {'site':15} {'moment':8} {'mode':9} {'coverage':12}" + "".join(f"{h:>9}" for h in heads)]
    lines += [cell.line() for cell in cells if cell.faults]
    for cell in cells:
        lines += [f"  {cell.world} {cell.site} {cell.moment} {cell.mode} {cell.coverage}: {t}" for t in cell.examples]
    return "\n".join(lines)


@dataclass(slots=True)
class _Asked:
    rid: str
    prompt: list[int]
    right: list[int]
    stream: bool


class _Round:
    """One fault: prompts before it, prompts after it, and what came of them."""

    def __init__(self, world: World, cell: Cell, rng: Rng, site: Site) -> None:
        self.world, self.cell, self.rng, self.site = world, cell, rng, site
        self.shared = [self._tokens(rng.choice((4, 17, 26))) for _ in range(2)]
        self.asked: list[_Asked] = []
        self.talks: list[_Asked] = []
        """Those of them that are gone on with."""

    def run(self) -> None:
        """Raises AssertionError: the world neither answers nor ends."""
        world, cell, rng = self.world, self.cell, self.rng
        self._phase(2)
        self._phase(2)
        act = self.site.draw(replace(world.targets(), copies=cell.copies), rng)
        if act is None:
            return
        cell.faults += 1
        world.shelve(self.site.depth)
        before, refused, step = world.told, world.refused, world.steps
        with _Opened(act.files) as opened:
            stopped = self._under_fire(act)
        told = world.told - before
        if told:
            cell.steps.append(max(0, world.told_first(before) - (act.step if act.step >= 0 else step)))
        self._count(bool(told), opened.count > 0 or world.refused > refused, stopped)

    def _under_fire(self, act: Act) -> str:
        """Why the engine ended itself; empty = it did not."""
        world, rng, wait = self.world, self.rng, 0.0
        if self.cell.moment == "running":
            wait = rng.uniform(0.0, 2 * world.phase_s) if not self.cell.site.startswith("mover") else 0.0
        thread = threading.Thread(target=self._strike, args=(act, wait))
        thread.start()
        try:
            if self.cell.moment == "asleep":
                thread.join()
            if self.cell.moment != "asleep":
                self._phase(3)
            for depth in (0, 1, 2) if world.has_tiers else (0, 0):  # what is cached is read where it is
                if depth > self.site.depth or depth == 0:
                    world.shelve(depth)
                    self._ask_again()
            world.settle()
        except AssertionError:
            raise
        except Exception as error:  # what an engine's process ends with
            return f"{type(error).__name__}: {error}"[:160]
        finally:
            thread.join()
            act.end()
        return ""

    def _strike(self, act: Act, wait: float) -> None:
        pause(wait)
        act.step, now = self.world.steps, None
        if wait and self.site.aims:
            now = self.site.draw(self.world.targets(), self.rng.split("strike"))
        (now or act).strike()

    def _phase(self, count: int) -> None:
        """Some prompts at once, to the end."""
        rng = self.rng
        prompts = [[*rng.choice(self.shared), *self._tokens(rng.randrange(1, 6))] for _ in range(count)]
        self.talks += self._ask(prompts, _NEW_TOKENS)

    def _ask_again(self) -> None:
        """Every prompt and its answer, gone on with, once: so all that is cached of them is read."""
        self._ask([[*each.prompt, *each.right, *self._tokens(1)] for each in self.talks], _TOKENS_AGAIN)

    def _ask(self, prompts: Sequence[list[int]], count: int) -> Sequence[_Asked]:
        begun, world, first = time.monotonic(), self.world, len(self.asked)
        for prompt in prompts:
            stream = self.rng.random() < 0.5
            while not (right := world.right(prompt, count)):
                prompt[-1:] = self._tokens(1)
            rid = world.ask(prompt, count, stream=stream)
            self.asked.append(_Asked(rid, prompt, right, stream))
        for _ in range(_TURNS_MAX):
            if all(world.finish(each.rid) is not None for each in self.asked) and world.idle:
                break
            world.turn()
        else:
            raise AssertionError(f"{self.cell.line()}: neither answered nor ended after {_TURNS_MAX} turns")
        world.took(time.monotonic() - begun)
        return self.asked[first:]

    def _count(self, told: bool, refused: bool, stopped: str) -> None:
        cell, world = self.cell, self.world
        ends = [(each, world.tokens(each.rid), world.finish(each.rid)) for each in self.asked]
        wrong = [each for each, got, end in ends if end in _ENDS_WELL and got != each.right]
        failed = sum(end is FinishReason.ERROR for _, _, end in ends)
        early = [each for each, got, end in ends if end not in _ENDS_WELL and got != each.right[: len(got)]]
        if cell.mode == "confirmed":
            wrong, early = wrong + early, []
        # What is not streamed is shown when it ends well.
        streamed = sum(each.stream for each in early)
        cell.answers += len(ends)
        cell.wrong += len(wrong)
        cell.failed += failed
        cell.streamed += streamed
        cell.stopped += bool(stopped)
        cell.told += bool(told or failed or stopped)
        cell.healed += bool(told and not (wrong or failed or stopped))
        cell.refused += refused and not told
        cell.unread += not (told or refused or wrong or failed or stopped)
        if stopped and len(cell.examples) < 2:
            cell.examples.append(f"stopped: {stopped}")
        if wrong and len(cell.examples) < 2:
            cell.examples.append(f"{len(wrong)} wrong answers, {'told' if told else 'silent'}")

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(5, self.world.spec.vocab_size) for _ in range(count)]


class _Opened:
    """Counts how often some files are opened by this process."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.count = 0
        self._names = {path.name for path in files}

    def __enter__(self) -> _Opened:
        if not _watching:
            sys.addaudithook(_hear)  # it cannot be taken away again
        _watching[:] = [self]
        return self

    def __exit__(self, *_: object) -> None:
        self._names = set()

    def hear(self, path: object) -> None:
        if self._names and isinstance(path, str | bytes | os.PathLike):
            self.count += os.path.basename(os.fsdecode(path)) in self._names


_watching: list[_Opened] = []


def _hear(event: str, args: tuple[object, ...]) -> None:
    if event == "open":
        _watching[0].hear(args[0])


def run(
    faults: int, seed: int, home: Path, *, worlds: Sequence[str] = tuple(WORLDS), sites: Sequence[str] = tuple(SITES),
    settings: Sequence[tuple[str, str]] = tuple(SETTINGS), shapes: Sequence[str] = ("full", "both"),
    copies: int = 0, say: Callable[[str], None] = lambda line: None,
) -> list[Cell]:  # fmt: skip
    """So many faults, spread evenly over all cells; the matrix. Cost: about 0.3 s of CPU a fault."""
    rng = Rng(seed)
    toys = {shape: make_model(home / shape, shape) for shape in shapes}
    cells = [
        Cell(world, site, moment, mode, coverage, copies)
        for world in worlds for mode, coverage in settings for site in sites if world in SITES[site].worlds
        for moment in SITES[site].moments
    ]  # fmt: skip
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.world, cell.mode, cell.coverage), []).append(cell)
    done = 0
    for at, ((name, mode, coverage), group) in enumerate(groups.items()):
        until = faults * (at + 1) // len(groups)
        tries, world = 0, None
        while done < until and tries < 10 * faults:
            if world is None or tries % _ROUNDS_OF_A_WORLD == 0:
                if world is not None:
                    world.close()
                shape = rng.choice(tuple(toys))
                world = WORLDS[name](toys[shape], home / f"files{at}-{tries}", mode, coverage)
            cell = group[tries % len(group)]
            had = cell.faults, cell.stopped
            _Round(world, cell, rng.split(f"{at}/{tries}"), SITES[cell.site]).run()
            done += cell.faults - had[0]
            tries += 1
            if cell.stopped > had[1]:
                world.close()
                world = None
            else:
                world.rest()
        if world is not None:
            world.close()
        say(f"{name} {mode} {coverage}: {sum(cell.faults for cell in group)} faults")
    return cells


def main() -> int:
    """0: no wrong answer but of blind cells that are listed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", choices=tuple(WORLDS), action="append")
    parser.add_argument("--site", choices=tuple(SITES), action="append")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="of the models: full, both")
    parser.add_argument("--mode", choices=sorted({mode for mode, _ in SETTINGS}), action="append")
    parser.add_argument("--coverage", choices=sorted({coverage for _, coverage in SETTINGS}), action="append")
    parser.add_argument("--copies", type=int, default=0, help="that a fault of a mover spoils; 0 = all while it lasts")
    options = parser.parse_args()
    settings = [
        (mode, coverage) for mode, coverage in SETTINGS
        if mode in (options.mode or mode) and coverage in (options.coverage or coverage)
    ]  # fmt: skip
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as home:
        cells = run(
            options.faults, options.seed, Path(home), worlds=options.world or tuple(WORLDS),
            sites=options.site or tuple(SITES), settings=settings,
            shapes=options.shape or ("full", "both"), copies=options.copies, say=lambda line: print(line, flush=True),
        )  # fmt: skip
    print(table(cells))
    blind = [cell for cell in cells if cell.is_blind]
    names = ("faults", "unread", "answers", "failed", "wrong")
    faults, unread, answers, failed, wrong = (sum(getattr(cell, name) for cell in cells) for name in names)
    print(f"{faults} faults, {faults - unread} of them ({(faults - unread) / max(faults, 1):.0%}) in what was read,"
          f" {answers} answers, {failed} of them errors, {wrong} wrong, "
          f"{len(blind)} cells blind that no list allows")  # fmt: skip
    return int(bool(blind))


if __name__ == "__main__":
    sys.exit(main())
