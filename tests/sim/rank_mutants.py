"""Mutants of ranks and their tiers: a rank that decides by itself, pages that move without a command of the line,
reports that are altered, files that are believed unchecked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from serinus.core.moves import MoveDone, StorageDone
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.pd import PAGE_COMMANDS
from serinus.ranks import RankBody, RankLoop, RunStep
from serinus.ranks.codec import encode_answers
from serinus.ranks.tiers import RankStorage
from serinus.sim import draw
from serinus.sim.engine import SimEngine
from serinus.sim.options import Cancel, EngineShape, Options, Scenario, Shape, Work
from tests.sim.hunting import mutant, replaced

__all__ = ["one_leaves_another_follows"]


@contextmanager
def _obeying(change: Callable[[SimEngine, int, object], object | None]) -> Iterator[None]:
    """Each command to a rank that does not lead goes through `change`; None = the rank does not obey it."""
    engines: dict[RankBody, SimEngine] = {}
    boot, obey = SimEngine.boot, RankBody.obey

    def booted(self: SimEngine) -> None:
        boot(self)
        engines.update({rank.body: self for rank in self.ranks[1:]})

    def obeyed(self: RankBody, commands: Sequence[object], *given: Any) -> list[object]:
        engine = engines.get(self)
        if engine is not None:
            changed = (change(engine, self.rank, command) for command in commands)
            commands = [command for command in changed if command is not None]
        return obey(self, commands, *given)

    with replaced(SimEngine, "boot", booted), replaced(RankBody, "obey", obeyed):
        yield


@contextmanager
def _hearing() -> Iterator[set[str]]:
    """The requests of which the client has left, as every rank hears it at once."""
    left: set[str] = set()
    cancel = SimEngine.cancel

    def cancelled(self: SimEngine, rid: str) -> None:
        left.add(rid)
        cancel(self, rid)

    with replaced(SimEngine, "cancel", cancelled):
        yield left


def stages(seed: int) -> Scenario:
    """A world in which decode engines have stages and hear their leader late, and clients leave."""
    scenario = draw(seed, backend="local", canary="")
    engines = tuple(replace(e, tp=1, pp=2) if e.role == "decode" else e for e in scenario.shape.engines)
    options = replace(scenario.options, rank_delay_s=0.02)
    faults = tuple(Cancel(rid=work.rid, at=work.at + 0.01 * (seed % 7 + 1)) for work in scenario.works)
    works = tuple(replace(work, prefill="") for work in scenario.works)
    shape = replace(scenario.shape, engines=engines)
    return replace(scenario, shape=shape, options=options, faults=faults, works=works)


def stored(seed: int) -> Scenario:
    """A world in which every engine has tiers and files that often fail, and the same prompts come again."""
    scenario = draw(seed, backend="local", canary="")
    engines = tuple(replace(e, host_pages=9, prefetch="wait_complete") for e in scenario.shape.engines)
    first = scenario.works[0]
    works = tuple(
        replace(w, prompt=first.prompt, salt=first.salt) if i % 2 else w for i, w in enumerate(scenario.works)
    )
    options = replace(scenario.options, restore=0.3)
    return replace(scenario, shape=replace(scenario.shape, engines=engines), options=options, works=works)


def left_while_reading(seed: int) -> Scenario:
    """A world of one engine with host pages for some prompts and slow files: a client leaves while its prompt is read
    from them, another prompt is backed up, driven from the device by others, and asked for again."""
    rng = Rng(seed).split("reading")

    def prompt(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1, 16) for _ in range(count))

    kept, again = prompt(20), prompt(16)
    prompts = (kept, again, prompt(17), prompt(18), prompt(17), again, again)
    works = tuple(
        Work(rid=f"r{i}", at=0.12 * i if i > 1 else 0.01 * i, prompt=tokens, new_tokens=2, decode="d0", prefill="")
        for i, tokens in enumerate(prompts)
    )
    engine = EngineShape(
        name="d0", role="decode", tp=1 + seed % 2, pages=8, chunk=8, host_pages=16 + seed % 4, prefetch="wait_complete"
    )
    return Scenario(
        seed=seed, shape=Shape(engines=(engine,)), options=Options(late_s=0.4), works=works,
        faults=(Cancel(rid="r0", at=0.01 + 0.01 * (seed % 40)),),
    )  # fmt: skip


@mutant("conditional collective", world=stages, says="I10:")
def conditional_collective() -> Iterator[None]:
    """A rank that sees an abort on its own does not enter the step."""
    with _hearing() as left:

        def change(engine: SimEngine, rank: int, command: object) -> object | None:
            gone = isinstance(command, RunStep) and any(work.rid in left for work in command.plan.work)
            return None if gone else command

        with _obeying(change):
            yield


@mutant("a rank acts on what it sees", world=stages, says="the result of step")
def rank_acts_alone() -> Iterator[None]:
    """A rank takes a request out of its batch, because it has heard that the client left."""
    with _hearing() as left:

        def change(engine: SimEngine, rank: int, command: object) -> object:
            if not isinstance(command, RunStep):
                return command
            work = tuple(work for work in command.plan.work if work.rid not in left)
            return RunStep(plan=replace(command.plan, work=work))

        with _obeying(change):
            yield


@dataclass(frozen=True, slots=True)
class _Late:
    """A command that was held back, and is obeyed now."""

    command: object


def one_leaves_another_follows(step: int) -> Scenario:
    """A client leaves at some step while ranks fill its pages; another prompt, computed here, waits for them."""
    rng = Rng(step).split("works")

    def work(rid: str, at: float, new_tokens: int, prefill: str) -> Work:
        prompt = tuple(rng.randrange(1, 16) for _ in range(20))
        return Work(rid=rid, at=at, prompt=prompt, new_tokens=new_tokens, decode="d0", prefill=prefill)

    engines = (
        EngineShape(name="p0", role="prefill", pages=17, chunk=8),
        EngineShape(name="d0", role="decode", tp=2, pages=8, chunk=8),
    )
    return Scenario(
        seed=step, shape=Shape(engines=engines), options=Options(rank_delay_s=0.02),
        works=(work("leaves", 0.0, 3, "p0"), work("follows", 0.001, 6, "")),
        faults=(Cancel(rid="leaves", step=step),),
    )  # fmt: skip


@mutant("a page worker is not on the line", world=one_leaves_another_follows, says="I6:")
def page_workers_off_the_line() -> Iterator[None]:
    """A rank moves pages for handoffs in an order of their own: plans and copies decided later may come before them."""
    last: dict[tuple[SimEngine, int], float] = {}

    def later(engine: SimEngine, rank: int, command: object) -> None:
        if answers := engine.ranks[rank].body.obey([_Late(command)]):
            engine.links.told(rank, encode_answers(answers))

    def change(engine: SimEngine, rank: int, command: object) -> object | None:
        if isinstance(command, _Late):
            return command.command
        if not isinstance(command, PAGE_COMMANDS):
            return command
        at = max(last.get((engine, rank), 0.0), engine.timeline.now_s + 0.5 * engine.rng.random())
        last[engine, rank] = at
        engine.process.at(at, later, engine, rank, command)
        return None

    with _obeying(change):
        yield


@mutant("a rank tells of a failed copy as a good one", world=stored, says="I6:")
def failed_copy_is_good() -> Iterator[None]:
    """A report is altered on its way to the leader."""
    original = RankLoop.answer

    def answer(self: RankLoop, answers: Sequence[object]) -> None:
        original(self, [replace(each, ok=True) if isinstance(each, MoveDone) else each for each in answers])

    with replaced(RankLoop, "answer", answer):
        yield


@contextmanager
def _reading() -> Iterator[dict[tuple[RankStorage, int], int]]:
    """Reads of storages, by number: how many pages each is to fill."""
    counts: dict[tuple[RankStorage, int], int] = {}
    read = RankStorage.read

    def reading(self: RankStorage, op: int, part: Part, keys: Sequence[bytes], *rest: Any) -> None:
        counts[self, op] = len(keys)
        read(self, op, part, keys, *rest)

    with replaced(RankStorage, "read", reading):
        yield counts


@mutant("what the storage did not bring is used", world=stored, says="I6:")
def storage_believed() -> Iterator[None]:
    """Pages that a read did not fill hang in the tree like those that it filled."""
    take = RankStorage.take
    with _reading() as counts:

        def believe(self: RankStorage, rank: int, done: StorageDone) -> None:
            take(self, rank, replace(done, good=counts.get((self, done.op), done.good)))

        with replaced(RankStorage, "take", believe):
            yield


@mutant("host pages are free while the storage fills them", world=left_while_reading, says="I6:")
def storage_pages_freed() -> Iterator[None]:
    """A read that is cancelled counts as ended, and ranks go on to fill its pages."""
    cancel, take = RankStorage.cancel, RankStorage.take
    over: set[tuple[RankStorage, int]] = set()
    told: set[tuple[RankStorage, int, int]] = set()
    with _reading() as counts:

        def end(self: RankStorage, op: int) -> None:
            if (self, op) not in counts:
                cancel(self, op)
                return
            for rank in count():
                if op not in self._folds.open:
                    break
                if (self, op, rank) not in told:
                    take(self, rank, StorageDone(op=op, good=0))
            over.add((self, op))

        def ignore(self: RankStorage, rank: int, done: StorageDone) -> None:
            told.add((self, done.op, rank))
            if (self, done.op) not in over:
                take(self, rank, done)

        with replaced(RankStorage, "cancel", end), replaced(RankStorage, "take", ignore):
            yield
