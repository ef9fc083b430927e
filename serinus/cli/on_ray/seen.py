"""From what routers and engines say of themselves to what the planner sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from serinus.scale import RoleSeen, Seen


class Watched(Protocol):
    """An engine of the group."""

    @property
    def kind(self) -> str:
        """Its role for the planner, prefill or decode."""

    @property
    def stays(self) -> bool:
        """Whether it is not on its way out."""

    url: str
    state: Any


class Looks:
    """One look after the other: the share of time in steps is that between two of them."""

    def __init__(self) -> None:
        self._steps: dict[str, tuple[float, float]] = {}
        """URL -> when its steps were counted last, and their seconds since its start."""

    def look(self, now: float, engines: Sequence[Watched], infos: Sequence[Mapping[str, Any]]) -> Seen:
        """`infos`: `engines` of a router's /server_info."""
        told = {info["url"]: info["server_info"] for info in infos if info["alive"]}
        busy = {url: self._busy(now, url, float(info["load"].get("busy_seconds", 0.0))) for url, info in told.items()}
        self._steps = {url: step for url, step in self._steps.items() if url in told}

        def role(kind: str) -> RoleSeen:
            own = [each for each in engines if each.kind == kind and each.stays]
            ready = [each.url for each in own if each.url in told]
            loads = [told[url]["load"] for url in ready]
            full = [_fullness(told[url]) for url in ready]
            return RoleSeen(
                wanted=len(own),
                ready=len(ready),
                running_reqs=sum(_of(load, "num_running_reqs", "num_decode_transfer_queue_reqs") for load in loads),
                queue_reqs=sum(_of(load, "num_queue_reqs", "num_decode_prealloc_queue_reqs") for load in loads),
                usage=sum(full) / max(1, len(full)),
                busy=sum(busy[url] for url in ready) / max(1, len(ready)),
                unplaced=sum(each.state == "waits for room" for each in own),
            )

        return Seen(at_s=now, prefill=role("prefill"), decode=role("decode"))

    def _busy(self, now: float, url: str, seconds: float) -> float:
        at, before = self._steps.get(url, (now, seconds))
        self._steps[url] = (now, seconds)
        return min(1.0, max(0.0, (seconds - before) / (now - at))) if now > at else 0.0


def _of(load: Mapping[str, Any], *names: str) -> int:
    return sum(int(load.get(name, 0)) for name in names)


def _fullness(info: Mapping[str, Any]) -> float:
    """KV or request slots, whichever is fuller; 1 where the engine has not said."""
    load = info["load"]
    if "token_usage" not in load:
        return 1.0
    slots = int(info["info"].get("max_running_requests", 0))
    running = _of(load, "num_running_reqs", "num_decode_transfer_queue_reqs")
    return min(1.0, max(float(load["token_usage"]), running / slots if slots else 0.0))
