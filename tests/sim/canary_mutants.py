"""Mutants of the canary and of the stamps it reads: only worlds with a canary can notice."""

from __future__ import annotations

from collections.abc import Iterator

from serinus.testing.world import Scenario, draw
from tests.sim.hunting import mutant, replaced

__all__ = ["damaged", "sound"]


def sound(seed: int) -> Scenario:
    """A world in which nothing is damaged: every canary must be silent."""
    return draw(seed, canary="sound")


def damaged(seed: int) -> Scenario:
    """A world in which KV is damaged behind every digest: canaries must keep wrong tokens from leaving."""
    return draw(seed, canary="damaged")


@mutant("stamps vouch for bytes that went elsewhere", world=sound)
def others_not_taken_off() -> Iterator[None]:
    """A page that was cut anew keeps the digest of all that its source rank held."""
    import serinus.pd.stamps as stamps

    with replaced(stamps, "digest_difference", lambda whole, part: whole):
        yield


@mutant("stamps of several source ranks are not added", world=sound)
def terms_not_added() -> Iterator[None]:
    """A page that was put together has the digest of what came last."""
    import serinus.pd.stamps as stamps

    with replaced(stamps, "digest_sum", lambda one, other: one):
        yield


@mutant("what has arrived is not verified", world=damaged)
def arrivals_not_verified() -> Iterator[None]:
    """Pages are used as they came."""
    from serinus.canary import Canary

    with replaced(Canary, "arrived", lambda self, *rest: []):
        yield


@mutant("nobody is ended for what the canary found", world=damaged)
def nobody_ended() -> Iterator[None]:
    """It is logged, and the request goes on."""
    from serinus.engine.judge import Judge

    with replaced(Judge, "sentence", lambda self, violations: ()):
        yield


@mutant("a digest that differs is no violation", world=damaged)
def digest_not_compared() -> Iterator[None]:
    """KV is taken for what its stamp says."""
    from serinus.canary import Canary
    from serinus.kernels.canary import Reason

    original = Canary.take

    def take(self: Canary, *, wait: bool = False) -> list[object]:
        return [v for v in original(self, wait=wait) if v.reasons != Reason.VERIFY_REAL_KV_HASH]

    with replaced(Canary, "take", take):
        yield
