"""What a mutant is, and the hunt for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from serinus.pd import arrival_account, page_worker
from serinus.sim import Scenario, draw, run

__all__ = ["MUTANTS", "SEEDS_MAX", "Kill", "Mutant", "hunt", "mutant", "replaced", "unchecked"]

SEEDS_MAX = 200
_OWN_FAULTS = ("AttributeError", "NameError", "TypeError")
"""What a patch raises that names something which the product does not have any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One rule that is broken on purpose."""

    name: str
    backend: str
    """How pages travel in the worlds that must catch it; empty = as drawn."""
    apply: Callable[[], Any]
    """A context manager, in which the rule is broken."""
    world: Callable[[int], Scenario] | None = None
    """The worlds that must catch it, where those of `draw` seldom come near it."""
    says: str
    """What the finding must say: that of another rule proves nothing of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """How a mutant was caught."""

    seed: int
    finding: str


MUTANTS: list[Mutant] = []


def mutant(
    name: str, *backends: str, says: str, world: Callable[[int], Scenario] | None = None
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    """Register a patch, for worlds with each of these backends."""

    def register(patch: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        for backend in backends or ("",):
            suffix = f" ({backend})" if len(backends) > 1 else ""
            MUTANTS.append(
                Mutant(name=name + suffix, backend=backend, apply=contextmanager(patch), world=world, says=says)
            )
        return patch

    return register


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """`owner.name` is `value` for a while; gives what it was."""
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)


@contextmanager
def unchecked() -> Iterator[None]:
    """Nothing compares what was read with what was sent, neither where it is read nor when DONE comes."""
    with (
        replaced(page_worker, "check_digests", lambda *rest: None),
        replaced(arrival_account, "check_digests", lambda *rest: None),
    ):
        yield


def hunt(item: Mutant, seeds: range = range(SEEDS_MAX)) -> Kill | None:
    """Run seeds under a mutant until one shows it, and says what it must; None = it survived.

    Raises AssertionError: the mutant itself does not work any more.
    """
    for seed in seeds:
        scenario = draw(seed, backend=item.backend) if item.world is None else item.world(seed)
        with item.apply():  # anew: a mutant that acts once does so in each world
            finding = run(scenario).finding
        assert finding is None or finding.kind not in _OWN_FAULTS, f"{item.name} is broken itself: {finding}"
        if finding is not None and item.says in finding.text:
            return Kill(seed=seed, finding=f"{finding.kind}: {finding.text}")
    return None
