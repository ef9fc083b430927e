"""The settings of the KV canary, as core/settings.py has those of the other rooms. Import them from there."""

from __future__ import annotations

from dataclasses import dataclass

from serinus.core.errors import ConfigError
from serinus.core.setting import check_fields, setting, settings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySettings:
    """The KV canary: what is checked, how often, and which faults are planted to prove that it is."""

    kv_canary: str = setting(
        "heal",
        "what a violation does: log it; raise: fail the requests it touches; heal: compute them again from their last"
        " verified token; none = no canary",
        choices=("none", "log", "raise", "heal"),
    )
    kv_canary_real_data: str = setting(
        "all",
        "KV bytes that are digested: none, the first 16 of each layer's row, or all",
        choices=("none", "partial", "all"),
    )
    kv_canary_coverage: str = setting(
        "rotating:16",
        "full = every slot of a running request in every step; rotating:N = each at least once in N steps",
        metavar="full|rotating:N",
    )
    kv_canary_sweep_seconds: float = setting(
        3600.0,
        "every cached page that no request uses is verified at least once in so many seconds, a few a step, and while"
        " the engine is idle; 0 = never",
        low=0.0,
    )
    kv_canary_sweep_interval: int = setting(
        0,
        "steps between two sweeps of 4,096 slots of cached pages that no request uses, beside those by time; 0 = none",
        low=0,
    )
    kv_canary_stream: str = setting(
        "eager",
        "with heal, when a token of a stream leaves: eager = after the verdict of its step; confirmed = once all KV"
        " that it was computed on is verified (with rotating:N up to N-1 steps later); with log-probabilities always"
        " confirmed",
        choices=("eager", "confirmed"),
    )
    kv_canary_heals_max: int = setting(
        3, "with heal, how often one request is computed again; then it ends with the 500 of raise", low=0
    )
    kv_canary_heal_tokens_per_second: int = setting(
        16384,
        "with heal, tokens computed again per second, averaged over 10 s; beyond it requests end with the 500 of raise;"
        " 0 = no bound",
        low=0,
    )
    kv_canary_retire_max: int = setting(
        8,
        "pages whose KV was wrong twice are never used again; with more of them than so many, /health answers 503 and"
        " routers send nothing more",
        low=0,
    )
    kv_canary_stats_interval: int = setting(100, "steps between two lines of statistics; 0 = none", low=0)
    kv_canary_swa_divergence_interval: int = setting(
        0,
        "steps between two lines on how far sliding-window checks differ from full ones; 0 = none",
        low=0,
    )
    kv_canary_perturb: str = setting(
        "", "plant faults: NAME=PROBABILITY,... per step (a self-test, never in production)"
    )
    kv_canary_perturb_target: str = setting(
        "", "the part that is damaged; needed where a model has full and sliding layers",
        choices=("", "full", "swa", "latent"),
    )  # fmt: skip
    kv_canary_perturb_rank: int | None = setting(
        None, "with several ranks: the one whose KV is damaged; default: drawn from the seed", low=0
    )
    kv_canary_perturb_warmup_steps: int = setting(50, "steps before the first fault", low=0)
    kv_canary_perturb_seed: int = setting(0, "the same seed, the same faults", low=0)
    kv_canary_perturb_api: bool = setting(
        False, "let POST /canary/perturb plant faults while the engine runs (never in production)"
    )

    @property
    def fails(self) -> bool:
        """Whether a violation ends, or heals, the requests that it touches."""
        return self.kv_canary in ("raise", "heal")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kv_canary == "none":
            for item in settings_of(type(self)):
                if item.name != "kv_canary" and getattr(self, item.name) != item.default:
                    raise ConfigError(
                        f"config: {item.flag} is {getattr(self, item.name)!r} with --kv-canary none, expected"
                        f" --kv-canary log, raise or heal"
                    )
        for name in ("kv_canary_stream", "kv_canary_heals_max", "kv_canary_heal_tokens_per_second"):
            item = next(item for item in settings_of(type(self)) if item.name == name)
            if self.kv_canary != "heal" and getattr(self, name) != item.default:
                raise ConfigError(
                    f"config: {item.flag} is {getattr(self, name)!r} with --kv-canary {self.kv_canary}, expected"
                    f" --kv-canary heal"
                )
        if self.kv_canary_perturb_rank is not None and not self.kv_canary_perturb:
            raise ConfigError(
                f"config: --kv-canary-perturb-rank is {self.kv_canary_perturb_rank} without --kv-canary-perturb,"
                f" expected both or neither"
            )
        coverage_stride(self.kv_canary_coverage)


def coverage_stride(coverage: str) -> int:
    """In how many steps each slot is checked at least once: 1 for `full`, N for `rotating:N`. Raises ConfigError."""
    if coverage == "full":
        return 1
    word, _, number = coverage.partition(":")
    if word == "rotating" and number.isdecimal() and int(number) > 0:
        return int(number)
    raise ConfigError(f"config: --kv-canary-coverage is {coverage!r}, expected full or rotating:N with N > 0")
