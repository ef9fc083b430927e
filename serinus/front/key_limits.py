"""What each API key has now of what it may have: requests at once, requests and tokens a minute. Pure: time is given.

How many tokens a request costs is known at its end. Until then it holds an estimate by the length of its body; what it
really cost takes the place of that, so a key may end up in debt and waits until that is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serinus.core.errors import RateLimited
from serinus.front.key_file import ApiKey

_BYTES_PER_TOKEN = 4
_MINUTE_S = 60.0


class LimitReached(RateLimited):
    """A limit of an API key; `limit` is its name."""

    def __init__(self, key: ApiKey, limit: str, has: str, retry_s: float) -> None:
        super().__init__(
            f"front: the API key {key.name!r} {has}, expected at most {limit} = {getattr(key, limit)};"
            f" try again in {max(1, round(retry_s))} s",
            retry_s,
        )
        self.limit = limit


@dataclass(slots=True)
class _Bucket:
    """Fills by so much a minute, up to that much; may be in debt. It is full where there was no limit before."""

    level: float = 0.0
    at: float = 0.0
    per_minute: int = 0
    """The limit when it was filled last; 0 = there was none."""

    def fill(self, per_minute: int, now: float) -> None:
        filled = self.level + (now - self.at) * per_minute / _MINUTE_S
        self.level = min(per_minute, filled) if self.per_minute else per_minute
        self.at, self.per_minute = now, per_minute

    def wait_s(self, per_minute: int, wanted: float) -> float:
        """Seconds until so much is there; 0 = it is."""
        return max(0.0, wanted - self.level) * _MINUTE_S / per_minute


@dataclass(slots=True)
class _Used:
    """What one key has."""

    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)
    running: int = 0


class KeyLimits:
    """The limits of all keys of one server. What a key has goes by its name, so it survives another file."""

    def __init__(self) -> None:
        self._used: dict[str, _Used] = {}

    def running_of(self, name: str) -> int:
        """Requests of a key that are being answered."""
        return self._used[name].running if name in self._used else 0

    def begin(self, key: ApiKey, body_bytes: int, now: float) -> int:
        """A request comes; the tokens that it holds, to be given to `end`. Raises LimitReached."""
        used = self._used.setdefault(key.name, _Used())
        if 0 < key.max_concurrent_requests <= used.running:
            raise LimitReached(key, "max_concurrent_requests", f"has {used.running} requests being answered", 1.0)
        used.requests.fill(key.requests_per_minute, now)
        used.tokens.fill(key.tokens_per_minute, now)
        if key.requests_per_minute and (wait_s := used.requests.wait_s(key.requests_per_minute, 1.0)):
            raise LimitReached(key, "requests_per_minute", "has used up its requests of this minute", wait_s)
        if key.tokens_per_minute and (wait_s := used.tokens.wait_s(key.tokens_per_minute, 1.0)):
            raise LimitReached(key, "tokens_per_minute", "has used up its tokens of this minute", wait_s)
        held = body_bytes // _BYTES_PER_TOKEN
        used.requests.level -= 1
        used.tokens.level -= held
        used.running += 1
        return held

    def end(self, key: ApiKey, held: int, tokens: int | None) -> None:
        """A request has ended and cost so many tokens (None = that is not known: what it held stays taken)."""
        used = self._used[key.name]
        used.running -= 1
        if tokens is not None:
            used.tokens.level += held - tokens
