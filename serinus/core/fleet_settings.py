"""The settings of several engines: how many `serinus up` starts, and which a router knows. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from serinus.core.setting import check_fields, setting

__all__ = ["RouteSettings", "UpSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """How many engines of which kind on this machine, and of how many ranks each."""

    prefill: int = setting(1, "prefill engines; 0 = every engine does both", low=0, high=64, metavar="P")
    decode: int = setting(1, "decode engines", low=1, high=64, metavar="D")
    prefill_tp_size: int | None = setting(None, "--tp-size of prefill engines; default: that of all", low=1)
    prefill_pp_size: int | None = setting(None, "--pp-size of prefill engines; default: that of all", low=1)
    decode_tp_size: int | None = setting(None, "--tp-size of decode engines; default: that of all", low=1)
    decode_pp_size: int | None = setting(None, "--pp-size of decode engines; default: that of all", low=1)
    no_restart: bool = setting(False, "do not restart an engine that died")
    ready_s_max: float = setting(300.0, "seconds all engines may take to be ready", flag="--ready-timeout", low=1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """Which engines stand behind a router."""

    decode_urls: tuple[str, ...] = setting(
        (), "decode (or unified) engines; they own requests", flag="--decode", metavar="URL"
    )
    prefill_urls: tuple[str, ...] = setting((), "prefill engines", flag="--prefill", metavar="URL")
    poll_s: float = setting(1.0, "seconds between two looks at an engine", flag="--poll-interval", low=0.05)
    cluster_secret: str = setting(
        "",
        "that of decode engines on other machines: they hand over only to prefill engines that such a router names;"
        " better SERINUS_CLUSTER_SECRET than a flag that ps shows",
    )

    def __post_init__(self) -> None:
        check_fields(self)
