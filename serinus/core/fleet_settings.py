"""The settings of several engines: how many `serinus up` starts, how they differ by role, and which a router knows.

Plain data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from serinus.core.canary_settings import CanarySettings
from serinus.core.errors import ConfigError
from serinus.core.setting import Setting, check_fields, of_role, setting, settings_of
from serinus.core.settings import MemorySettings, ModelSettings, ParallelSettings, ScheduleSettings

ROLES = ("prefill", "decode")
"""Of engines under `serinus up`; with `--prefill 0` those of `--decode` do both."""
POLICIES = ("cache_aware", "least_loaded", "round_robin")
"""Of a router, by which it chooses decode engines."""
_OF_ROLES = {
    ModelSettings: ("device",),
    MemorySettings: ("page_size", "max_total_tokens", "mem_fraction_static"),
    ScheduleSettings: ("max_running_requests", "chunked_prefill_size"),
    ParallelSettings: ("tp_size", "pp_size", "ep_size"),
    CanarySettings: tuple(item.name for item in settings_of(CanarySettings)),
}


def side_of(role: str) -> str:
    """Which of ROLES has the settings of an engine of this role: one that does both has those of decode."""
    return "prefill" if role == "prefill" else "decode"


@cache
def role_settings(role: str) -> tuple[Setting, ...]:
    """The settings that engines of one role may have otherwise than all: device, pages, sizes, ranks, canary."""
    own = (item for group, names in _OF_ROLES.items() for item in settings_of(group) if item.name in names)
    return tuple(of_role(item, role) for item in own)


def _policy() -> Any:
    return setting(
        "cache_aware",
        "which decode engine of a model gets a request: cache_aware = that which had the longest beginning of its"
        " prompt, least_loaded, round_robin",
        choices=POLICIES,
    )


def _gpus(role: str) -> Any:
    return setting(
        "",
        f"GPUs of this machine that ranks of {role} engines take, by number: each engine those behind the one before"
        " it, and from the first again when all are taken; default: each engine those from 0 on",
        metavar="N,N,...",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """How many engines of which kind on this machine."""

    prefill: int = setting(1, "prefill engines; 0 = every engine does both", low=0, high=64, metavar="P")
    decode: int = setting(1, "decode engines", low=1, high=64, metavar="D")
    no_restart: bool = setting(False, "do not restart an engine that died")
    prefill_gpus: str = _gpus("prefill")
    decode_gpus: str = _gpus("decode")
    policy: str = _policy()
    ready_s_max: float = setting(300.0, "seconds all engines may take to be ready", flag="--ready-timeout", low=1)

    def __post_init__(self) -> None:
        check_fields(self)
        self.gpus_of("prefill")
        self.gpus_of("decode")

    def gpus_of(self, role: str) -> tuple[int, ...]:
        """The GPUs of engines of this role; empty = not said. Raises ConfigError."""
        side = side_of(role)
        given = self.prefill_gpus if side == "prefill" else self.decode_gpus
        words = [word.strip() for word in given.split(",")] if given else []
        if not all(word.isascii() and word.isdigit() for word in words) or len({*map(int, words)}) < len(words):
            raise ConfigError(f"config: --{side}-gpus is {given!r}, expected different numbers, e.g. 0,1")
        return tuple(map(int, words))


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Engines on the nodes of a Ray cluster, and between which numbers they scale."""

    ray: bool = setting(False, "place engines and routers on the nodes of a Ray cluster (pip install -e '.[ray]')")
    ray_address: str = setting(
        "auto", "host:port of the cluster's head; auto = the one that this machine belongs to", metavar="ADDRESS"
    )
    ray_namespace: str = setting("serinus", "where the actors of this group have their names; one group in each")
    min_prefill: int | None = setting(None, "with --ray: scale down to so many prefill engines", low=1, high=1024)
    max_prefill: int | None = setting(None, "with --ray: scale up to so many prefill engines", low=1, high=1024)
    min_decode: int | None = setting(None, "with --ray: scale down to so many decode engines", low=1, high=1024)
    max_decode: int | None = setting(None, "with --ray: scale up to so many decode engines", low=1, high=1024)
    scale_up_s: float = setting(
        10.0, "seconds for which more engines must be needed before they are added", flag="--scale-up-after", low=1
    )
    scale_down_s: float = setting(
        300.0, "seconds for which fewer must do before one is drained", flag="--scale-down-after", low=1
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for item in settings_of(type(self)):
            value = getattr(self, item.name)
            if not self.ray and value != item.default:
                raise ConfigError(f"config: {item.flag} is {value!r} without --ray, expected it too")
        if self.ray_address.startswith("ray://"):
            raise ConfigError(
                f"config: --ray-address is {self.ray_address!r}, expected auto or host:port: run this command on a node"
                f" of the cluster, not as a Ray client"
            )

    @property
    def scales(self) -> bool:
        """Whether a number of engines may change."""
        return any(n is not None for n in (self.min_prefill, self.max_prefill, self.min_decode, self.max_decode))

    def between(self, role: str, count: int) -> tuple[int, int]:
        """The fewest and the most engines of a role that starts with `count`. Raises ConfigError."""
        low, high = getattr(self, f"min_{role}"), getattr(self, f"max_{role}")
        low, high = count if low is None else low, count if high is None else high
        if not low <= count <= high or high > count == 0:  # engines of --prefill 0 do both
            raise ConfigError(f"config: --{role} is {count}, expected --min-{role} to --max-{role}: {low} to {high}")
        return low, high


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
        5, "further tries of a request where an engine has no room or cannot be reached: others first, then, after"
        " pauses, all again", low=0,
    )  # fmt: skip
    retry_most_ms: int = setting(
        2000, "milliseconds of the longest such pause; the first is of 50", flag="--retry-max-backoff-ms", low=1
    )
    cb_failure_threshold: int = setting(
        5,
        "failures in a row (5xx but 503 and 504, broken connections) after which an engine gets no requests for a"
        " while, if others take them; 0 = never",
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
