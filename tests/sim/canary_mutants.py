"""Mutants of the canary and of the stamps it reads: only worlds with a canary can notice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from serinus.canary import Verdict
from serinus.core.config import ServeConfig
from serinus.core.parts import Part
from serinus.sim import Scenario, draw
from serinus.sim.options import DAMAGES, Crash, Partition
from tests.sim.hunting import mutant, replaced

__all__ = ["damaged", "sound"]


def sound(seed: int) -> Scenario:
    """A world in which nothing is damaged: every canary must be silent."""
    return draw(seed, canary="sound")


def damaged(seed: int) -> Scenario:
    """A world in which KV is damaged behind every digest: canaries must keep wrong tokens from leaving."""
    return draw(seed, canary="damaged")


def sliding(seed: int) -> Scenario:
    """A damaged world with windows, in which pages often are another prompt's, and answers are long enough to pass
    through them."""
    scenario = draw(seed, slides=True, canary="damaged")
    works = tuple(replace(work, new_tokens=work.new_tokens + 14) for work in scenario.works)
    scenario = replace(scenario, shape=replace(scenario.shape, coverage="rotating:16"), works=works)
    return _only(scenario, page=0.3)


def copied(seed: int) -> Scenario:
    """A damaged world with copies of all on the host, which often are wrong, and so is what they were copied from."""
    scenario = draw(seed, canary="damaged")
    engines = tuple(
        replace(engine, host_pages=2 * max(engine.pages, engine.swa_pages), write_policy="write_through")
        for engine in scenario.shape.engines
    )
    return _only(replace(scenario, shape=replace(scenario.shape, engines=engines)), host=0.5)


def sent(seed: int) -> Scenario:
    """A damaged world in which engines reach each other all the time."""
    scenario = draw(seed, canary="damaged")
    kept = tuple(fault for fault in scenario.faults if not isinstance(fault, Crash | Partition))
    return replace(scenario, faults=kept)


def _only(scenario: Scenario, **damage: float) -> Scenario:
    """With this damage and no other."""
    return replace(scenario, options=replace(scenario.options, **{**dict.fromkeys(DAMAGES, 0.0), **damage}))


@mutant("stamps vouch for bytes that went elsewhere", world=sound, says="nothing was damaged")
def others_not_taken_off() -> Iterator[None]:
    """A page that was cut anew keeps the digest of all that its source rank held."""
    import serinus.pd.stamps as stamps

    with replaced(stamps, "digest_difference", lambda whole, part: whole):
        yield


@mutant("stamps of several source ranks are not added", world=sound, says="nothing was damaged")
def terms_not_added() -> Iterator[None]:
    """A page that was put together has the digest of what came last."""
    import serinus.pd.stamps as stamps

    with replaced(stamps, "digest_sum", lambda one, other: one):
        yield


@mutant("what has arrived is not verified", world=damaged, says="I23:")
def arrivals_not_verified() -> Iterator[None]:
    """Pages are used as they came."""
    from serinus.canary import ArrivalVerdict, CanaryLead

    with replaced(CanaryLead, "arrived", lambda self, rid, own: ArrivalVerdict()):
        yield


@mutant("no request is failed for what the canary found", world=damaged, says="I6:")
def none_failed() -> Iterator[None]:
    """It is logged, and the request goes on."""
    from serinus.canary import CanaryLead

    original = CanaryLead.judge

    def judge(self: CanaryLead, findings: Iterable[tuple[int, object]]) -> tuple[Verdict, ...]:
        original(self, findings)
        return ()

    with replaced(CanaryLead, "judge", judge):
        yield


@mutant("a digest that differs is no violation", world=damaged, says="I6:")
def digest_not_compared() -> Iterator[None]:
    """KV is taken for what its stamp says."""
    import serinus.ranks.build as ranks

    make = ranks.make_canary_rank

    def made(config: ServeConfig, *rest: Any, **more: Any) -> Any:
        settings = replace(config.canary, kv_canary_real_data="none")
        return make(replace(config, canary=settings), *rest, **more)

    with replaced(ranks, "make_canary_rank", made):
        yield


@mutant("the sweep does nothing", world=damaged, says="I20:")
def nothing_swept() -> Iterator[None]:
    """Its turns come, and no slot is looked at."""
    from serinus.canary import CanaryRank

    with replaced(CanaryRank, "_sweep", lambda self, command: None):
        yield


@mutant("no sequence is verified as a whole", world=damaged, says="I23:")
def nothing_whole() -> Iterator[None]:
    """A sequence that just came waits for its turns like all others."""
    from serinus.canary import rank

    original = rank.reads_of

    def reads_of(rows: Any, starts: Any, wholes: Any, chains: Any, **more: Any) -> Any:
        return original(rows, starts, [False] * len(wholes), chains, **more)

    with replaced(rank, "reads_of", reads_of):
        yield


@mutant("condemned pages stay in the tree", world=damaged, says="I20:")
def condemned_not_cut() -> Iterator[None]:
    """They are in quarantine, and found all the same."""
    from serinus.cache.quarantine import PageQuarantine

    with replaced(PageQuarantine, "_condemn_below", lambda self, top, gone, *rest: []):
        yield


@mutant("copies that stay are not verified", world=copied, says="I7:")
def copies_not_verified() -> Iterator[None]:
    """What the host has of a condemned page is taken for right."""
    from serinus.canary.copies import CopyCheck

    def verified(self: CopyCheck, part: Part, page: int) -> Any:
        copies = self._cache.tiers.quarantine.copies.behind(part, page, 1 << 20)
        return {copy.node: {span.part: len(span.pages) for span in copy.spans} for copy in copies}

    with replaced(CopyCheck, "verified", verified):
        yield


@mutant("a slot that leaves a window is verified alone", world=sliding, says="I23:")
def leaves_alone() -> Iterator[None]:
    """Without the slot behind it, which tells whether it is of the same prompt."""
    from serinus.canary import rank

    original = rank.due_pages

    def due_pages(canary_due: Any, reads_6B: Any, page_size: int, window: int | None) -> Any:
        def due(reads: Any, size: int) -> Any:
            if reads is not reads_6B:
                reads[3] = reads[2] + 1
            return canary_due(reads, size)

        return original(due, reads_6B, page_size, window)

    with replaced(rank, "due_pages", due_pages):
        yield


@mutant("what a peer condemned is not condemned here", world=sent, says="I24:")
def recalls_ignored() -> Iterator[None]:
    """It is told, and stays in the cache of the engine that sent it."""
    from serinus.canary.recalls import Recalls

    with replaced(Recalls, "heard", lambda self, finding: ([], [])):
        yield


@mutant("no peer is told what was condemned", world=sent, says="I24:")
def recalls_not_told() -> Iterator[None]:
    """The engine that sent it goes on with it."""
    from serinus.canary.recalls import Recalls

    with replaced(Recalls, "told", lambda self, violation, condemned: []):
        yield
