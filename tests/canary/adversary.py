"""An adversary that knows nothing of the canary: it has raw memory, files and the functions that copy, and chance.

    python -m tests.canary.adversary --faults 3000 --seed 1

A real engine (a toy checkpoint, of which every wrong KV byte makes wrong tokens) with host tier and files, and a pair
that hands over through shared memory, answer prompts that share prefixes. One fault a round, at a random moment, from
another thread (from another process in the shared segment): a bit, 64 bytes, pages exchanged, shifted or played back
with their stamps, entries of row tables, files, copies of the wrong page, late, twice or left out. It does not use what
canary, perturb or self-test choose their victims by. Right answers are computed apart (testing/oracle.py).

It prints site x moment x setting. `unread`: nothing was told and every answer is right (the place was not read again,
or a copy was made good). `wrong`: answers that ended well and are wrong: each fails the run, unless docs/CANARY.md
lists its site and setting (`BLIND`). `streamed`: wrong tokens of answers that ended in an error.
`stopped`: the engine ended itself. `steps`: from the fault to the first violation, median and maximum.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serinus.core.request import FinishReason
from serinus.core.rng import Rng
from serinus.models import ModelSpec
from serinus.ranks.tier_parts import pause
from serinus.selftest import make_canary_toy
from serinus.testing.oracle import toy_continue

from .adversary_sites import SITES, Act, Site
from .adversary_worlds import WORLDS, World

__all__ = ["BLIND", "Cell", "run", "table"]

_UNDONE = "With `rotating:N`, bytes that change and change back between two turns of their page."
BLIND = {("mover: twice", "rotating:16"): _UNDONE}
"""Sites and coverage under which faults may end in wrong answers; what docs/CANARY.md, "What it cannot see", says."""
SETTINGS = [(mode, coverage) for mode in ("raise", "heal") for coverage in ("full", "rotating:16")]
_ENDS_WELL = (FinishReason.LENGTH, FinishReason.STOP)
_ROUNDS_OF_A_WORLD = 40
_NEW_TOKENS = 10
_TURNS_MAX = 4000


@dataclass(slots=True)
class Cell:
    """What became of the faults of one site at one moment, under one setting."""

    world: str
    site: str
    moment: str
    mode: str
    coverage: str
    faults: int = 0
    told: int = 0
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
        """Wrong answers that no list allows."""
        return self.wrong > 0 and (self.site, self.coverage) not in BLIND

    def line(self) -> str:
        """One row of the matrix."""
        steps = f"{statistics.median(self.steps):.0f}/{max(self.steps)}" if self.steps else "-"
        counts = (
            self.faults, self.told, self.unread, self.healed, self.failed, self.streamed, self.stopped, self.wrong,
        )  # fmt: skip
        name = f"{self.world:6} {self.site:15} {self.moment:8} {self.mode:6} {self.coverage:12}"
        return name + "".join(f"{count:9}" for count in counts) + f"{steps:>9}" + ("  BLIND" if self.is_blind else "")


def table(cells: Sequence[Cell]) -> str:
    """The matrix, in words."""
    heads = ("faults", "told", "unread", "healed", "failed", "streamed", "stopped", "wrong", "steps")
    lines = [f"{'world':6} {'site':15} {'moment':8} {'mode':6} {'coverage':12}" + "".join(f"{h:>9}" for h in heads)]
    lines += [cell.line() for cell in cells if cell.faults]
    for cell in cells:
        lines += [f"  {cell.world} {cell.site} {cell.moment} {cell.mode} {cell.coverage}: {t}" for t in cell.examples]
    return "\n".join(lines)


@dataclass(slots=True)
class _Asked:
    rid: str
    right: list[int]


class _Round:
    """One fault: prompts before it, prompts after it, and what came of them."""

    def __init__(self, world: World, cell: Cell, rng: Rng, site: Site) -> None:
        self.world, self.cell, self.rng, self.site = world, cell, rng, site
        self.shared = [self._tokens(rng.choice((4, 17, 26))) for _ in range(2)]
        self.asked: list[_Asked] = []

    def run(self) -> None:
        """Raises AssertionError: the world neither answers nor ends."""
        world, cell, rng = self.world, self.cell, self.rng
        self._phase(2)
        self._phase(2)
        act = self.site.draw(world.targets(), rng)
        if act is None:
            return
        cell.faults += 1
        if cell.moment == "asleep" or rng.random() < 0.5:
            world.shelve(rng)
        before, step = world.told, world.steps
        stopped = self._under_fire(act)
        told = world.told - before
        if told:
            cell.steps.append(max(0, world.told_first(before) - (act.step if act.step >= 0 else step)))
        self._count(bool(told), stopped)

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
            for _ in range(3):
                self._phase(3)
                if rng.random() < 0.5:
                    world.shelve(rng)
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
        act.step = self.world.steps
        act.strike()

    def _phase(self, count: int) -> None:
        """Some prompts at once, to the end."""
        begun = time.monotonic()
        for _ in range(count):
            prompt = [*self.rng.choice(self.shared), *self._tokens(self.rng.randrange(1, 6))]
            rid = self.world.ask(prompt, _NEW_TOKENS)
            self.asked.append(_Asked(rid, _right(self.world.spec, prompt)))
        for _ in range(_TURNS_MAX):
            if all(self.world.finish(each.rid) is not None for each in self.asked) and self.world.idle:
                break
            self.world.turn()
        else:
            raise AssertionError(f"{self.cell.line()}: neither answered nor ended after {_TURNS_MAX} turns")
        self.world.took(time.monotonic() - begun)

    def _count(self, told: bool, stopped: str) -> None:
        cell, world = self.cell, self.world
        ends = [(each, world.tokens(each.rid), world.finish(each.rid)) for each in self.asked]
        wrong = [each for each, got, end in ends if end in _ENDS_WELL and got != each.right]
        failed = sum(end is FinishReason.ERROR for _, _, end in ends)
        streamed = sum(got != each.right[: len(got)] for each, got, end in ends if end not in _ENDS_WELL)
        cell.wrong += len(wrong)
        cell.failed += failed
        cell.streamed += streamed
        cell.stopped += bool(stopped)
        cell.told += bool(told or failed or stopped)
        cell.healed += bool(told and not (wrong or failed or stopped))
        cell.unread += not (told or wrong or failed or stopped)
        if stopped and len(cell.examples) < 2:
            cell.examples.append(f"stopped: {stopped}")
        if wrong and len(cell.examples) < 2:
            cell.examples.append(f"{len(wrong)} wrong answers, {'told' if told else 'silent'}")

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(5, self.world.spec.vocab_size) for _ in range(count)]


def _right(spec: ModelSpec, prompt: list[int]) -> list[int]:
    return toy_continue(spec, prompt, _NEW_TOKENS)


def run(
    faults: int, seed: int, home: Path, *, worlds: Sequence[str] = tuple(WORLDS), sites: Sequence[str] = tuple(SITES),
    settings: Sequence[tuple[str, str]] = tuple(SETTINGS), say: Callable[[str], None] = lambda line: None,
) -> list[Cell]:  # fmt: skip
    """So many faults, spread evenly over all cells; the matrix. Cost: about 0.3 s of CPU a fault."""
    rng = Rng(seed)
    toys = {shape: make_canary_toy(home / shape, shape) for shape in ("full", "both")}
    cells = [
        Cell(world, site, moment, mode, coverage)
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
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as home:
        cells = run(
            options.faults, options.seed, Path(home), worlds=options.world or tuple(WORLDS),
            sites=options.site or tuple(SITES), say=lambda line: print(line, flush=True),
        )  # fmt: skip
    print(table(cells))
    blind = [cell for cell in cells if cell.is_blind]
    print(f"{sum(cell.faults for cell in cells)} faults, {sum(cell.wrong for cell in cells)} wrong answers, "
          f"{len(blind)} cells blind that no list allows")  # fmt: skip
    return int(bool(blind))


if __name__ == "__main__":
    sys.exit(main())
