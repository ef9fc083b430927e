"""Fair shares: which API key's requests are due. Pure; knows a request by its share and its tokens alone.

Each share has a virtual time: the tokens of its work that went through the model, over its weight. The share with the
least is served next. One that had nothing in line comes in at the time of the one served last, so that none saves up
turns while it asks nothing, and none pays for what it got while it was alone.

So two shares that both have requests in line are served in the ratio of their weights, up to one request of each.
"""

from __future__ import annotations

from collections import Counter

from serinus.core.request import Share

_KEPT_MIN = 256
"""Below it, shares without a request in line are not worth a sweep."""


class FairShares:
    """The virtual times of the shares of one engine."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._now = 0.0
        """Virtual time of the share that was served last."""
        self._sweep_at = _KEPT_MIN

    @property
    def divided(self) -> bool:
        """Whether there is more than one."""
        return len(self._times) > 1

    def time_of(self, name: str) -> float:
        """The virtual time of a share."""
        return self._times.get(name, self._now)

    def waiting_of(self, name: str) -> int:
        """Its requests in line."""
        return self._waiting[name]

    def wait(self, share: Share) -> None:
        """One more request of it is in line."""
        name = share.name
        if not self._waiting[name]:
            self._times[name] = max(self.time_of(name), self._now)
            if len(self._times) >= self._sweep_at:
                self._sweep()
        self._waiting[name] += 1

    def leave(self, share: Share) -> None:
        """One of its requests is in line no more."""
        self._waiting[share.name] -= 1
        if not self._waiting[share.name]:
            del self._waiting[share.name]

    def serve(self, share: Share) -> None:
        """A request of it was taken out of the line to be computed."""
        self._now = max(self._now, self.time_of(share.name))

    def charge(self, share: Share, tokens: int) -> None:
        """So many of its tokens go through the model."""
        self._times[share.name] = self.time_of(share.name) + tokens / share.weight

    def _sweep(self) -> None:
        """Forget shares that would come in at the present time anyway."""
        self._times = {name: t for name, t in self._times.items() if t > self._now or self._waiting[name]}
        self._waiting = +self._waiting
        self._sweep_at = max(_KEPT_MIN, 2 * len(self._times))
