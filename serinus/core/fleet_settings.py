"""The settings of several engines: how many `serinus up` starts, how they differ by role, and which a router knows.

Plain data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from serinus.core.canary_settings import CanarySettings
from serinus.core.setting import Setting, check_fields, of_role, setting, settings_of
from serinus.core.settings import ParallelSettings

__all__ = ["POLICIES", "ROLES", "RouteSettings", "UpSettings", "role_settings"]

ROLES = ("prefill", "decode")
"""Of engines under `serinus up`; with `--prefill 0` those of `--decode` do both."""
POLICIES = ("cache_aware", "least_loaded", "round_robin")
"""Of a router, by which it chooses decode engines."""
_RANKS = ("tp_size", "pp_size")


@cache
def role_settings(role: str) -> tuple[Setting, ...]:
    """The settings that engines of one role may have otherwise than all: their ranks and their canary."""
    ranks = [item for item in settings_of(ParallelSettings) if item.name in _RANKS]
    return tuple(of_role(item, role) for item in (*ranks, *settings_of(CanarySettings)))


def _policy() -> Any:
    return setting(
        "cache_aware",
        "which decode engine of a model gets a request: cache_aware = that which had the longest beginning of its"
        " prompt, least_loaded, round_robin",
        choices=POLICIES,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """How many engines of which kind on this machine."""

    prefill: int = setting(1, "prefill engines; 0 = every engine does both", low=0, high=64, metavar="P")
    decode: int = setting(1, "decode engines", low=1, high=64, metavar="D")
    no_restart: bool = setting(False, "do not restart an engine that died")
    policy: str = _policy()
    ready_s_max: float = setting(300.0, "seconds all engines may take to be ready", flag="--ready-timeout", low=1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """Which engines stand behind a router."""

    decode_urls: tuple[str, ...] = setting(
        (),
        "decode (or unified) engines, which own requests; MODEL=http://host:port where requests call the model of an"
        " engine otherwise than it does itself",
        flag="--decode",
        metavar="[MODEL=]URL",
    )
    prefill_urls: tuple[str, ...] = setting((), "prefill engines, likewise", flag="--prefill", metavar="[MODEL=]URL")
    policy: str = _policy()
    retry_max_retries: int = setting(
        5, "further engines that a request is sent to where one has no room or cannot be reached", low=0
    )
    cb_failure_threshold: int = setting(
        5,
        "failures in a row (5xx, broken connections) after which an engine gets no requests for a while, if others take"
        " them; 0 = never",
        low=0,
    )
    poll_s: float = setting(1.0, "seconds between two looks at an engine", flag="--poll-interval", low=0.05)
    cluster_secret: str = setting(
        "",
        "that of decode engines on other machines: they hand over only to prefill engines that such a router names;"
        " better SERINUS_CLUSTER_SECRET than a flag that ps shows",
    )

    def __post_init__(self) -> None:
        check_fields(self)
