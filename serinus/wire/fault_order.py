"""FaultOrder: the body of `POST /canary/perturb`, which the front checks and passes on to the engine as it is."""

from __future__ import annotations

from typing import Final

import msgspec

from serinus.core.errors import BadRequest

COUNT_MAX: Final = 10_000
SECONDS_MAX: Final = 3600.0


class FaultOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults to plant on purpose, with a bound and an end (docs/CANARY.md). Raises BadRequest: a value out of range."""

    perturb: dict[str, float]
    """Probability in each step, by name; {} = none any more."""
    target: str = ""
    """full or swa; needed where a model has both."""
    rank: int | None = None
    """The rank whose KV is damaged; None = drawn from the seed."""
    seed: int = 0
    count: int = 1
    """Faults of each name at most."""
    steps: int | None = None
    """Steps of the engine after which no more are planted; None = no such end."""
    seconds: float = 60.0
    """Seconds after which no more are planted."""
    role: str = ""
    """Of a router: its prefill or its decode (unified) engines alone; default: all."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= COUNT_MAX:
            raise BadRequest("count", self.count, f"1 to {COUNT_MAX} faults of each name")
        if self.steps is not None and self.steps < 1:
            raise BadRequest("steps", self.steps, "at least 1 step")
        if not 0 < self.seconds <= SECONDS_MAX:
            raise BadRequest("seconds", self.seconds, f"more than 0, at most {SECONDS_MAX:g}")
        if self.seed < 0:
            raise BadRequest("seed", self.seed, "0 or more")

    @property
    def words(self) -> str:
        """Names and probabilities as `--kv-canary-perturb` has them: NAME=PROBABILITY,..."""
        return ",".join(f"{name}={chance!r}" for name, chance in self.perturb.items())
