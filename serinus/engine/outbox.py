"""Deltas on their way to the fronts, gathered by front during a turn; `stream_interval` kept.

Knows which front asked for which request. Forgets a request with its last delta.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from serinus.core.request import TokenDelta


@dataclass(slots=True)
class _Client:
    front: str
    held: TokenDelta | None = None
    """Tokens kept back until there are `stream_interval` of them."""
    sent: bool = False
    silent: bool = field(default=False)
    """The front wants to hear nothing more of this request."""


class Outbox:
    """Collects deltas during a turn; `take` empties it."""

    def __init__(self, *, stream_interval: int = 1) -> None:
        self._interval = stream_interval
        self._clients: dict[str, _Client] = {}
        self._ready: dict[str, list[TokenDelta]] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def expect(self, rid: str, front: str) -> None:
        """Deltas of `rid` go to `front`."""
        self._clients[rid] = _Client(front)

    def silence(self, rid: str) -> None:
        """Send nothing more of `rid`."""
        client = self._clients.get(rid)
        if client is not None:
            client.silent = True

    def forget(self, rid: str) -> None:
        """Nothing of `rid` will be sent any more, its last delta included."""
        self._clients.pop(rid, None)

    def owned_by(self, front: str) -> list[str]:
        """Requests whose deltas go to `front`."""
        return [rid for rid, client in self._clients.items() if client.front == front]

    def put(self, delta: TokenDelta) -> None:
        """One delta; those of unknown requests, and of silenced ones, end here."""
        client = self._clients.get(delta.rid)
        if client is None:
            return
        if delta.finish is not None:
            del self._clients[delta.rid]
        if client.silent:
            return
        if self._interval > 1:
            held = _joined(client.held, delta)
            client.held = held
            if client.sent and delta.finish is None and len(held.token_ids) < self._interval:
                return  # the first token is never kept back
            client.held, client.sent, delta = None, True, held
        self._ready.setdefault(client.front, []).append(delta)

    def take(self) -> list[tuple[str, tuple[TokenDelta, ...]]]:
        """(front, deltas) of this turn."""
        out = [(front, tuple(deltas)) for front, deltas in self._ready.items()]
        self._ready.clear()
        return out


def _joined(earlier: TokenDelta | None, later: TokenDelta) -> TokenDelta:
    if earlier is None:
        return later
    return replace(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        prompt_logprobs=earlier.prompt_logprobs or later.prompt_logprobs,
        usage=later.usage or earlier.usage,
    )
