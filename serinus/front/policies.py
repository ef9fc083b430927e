"""Policies: which of the engines that are alive gets a request. Knows nothing of how requests travel."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import xxhash

from serinus.core.fleet_settings import POLICIES

_PROMPT_KEYS: Final = (b'"messages"', b'"prompt"', b'"text"', b'"input_ids"', b'"input"')
_KEY_BYTES_MAX: Final = 4096
"""The prompt of a body begins within these, or is taken to be the whole body."""
_BLOCK_BYTES: Final = 128
"""Prompts that share a whole block of their bodies may share KV: some thirty tokens, or more than a page."""
_BLOCKS_MAX: Final = 512
"""Of the beginning of one prompt: 64 KiB. What lies behind is not compared."""
_BLOCKS_KEPT: Final = 1 << 16
"""Of all prompts together, the ones used last: some ten megabytes."""
_BALANCE_REL: Final = 1.5
"""An engine has too much to do where it has so many times as much as the least loaded one, and `slack` more."""


class Candidate(Protocol):
    """An engine, as far as policies look."""

    @property
    def url(self) -> str: ...

    @property
    def load(self) -> int: ...  # requests, or bytes of prompts that wait

    turn: int
    """When it was chosen last, in choices."""
    life: int
    """Another number once its cache is empty: it died, or was flushed."""


_EngineT = TypeVar("_EngineT", bound=Candidate)


class Policy(Generic[_EngineT]):
    """The engine with the fewest requests; of equals, the one that was chosen longest ago."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, body: bytes, engines: Sequence[_EngineT]) -> _EngineT:
        """One of `engines` (at least one) for a request with this body."""
        chosen = self._choose(body, engines)
        self._turn += 1
        chosen.turn = self._turn
        return chosen

    def _choose(self, body: bytes, engines: Sequence[_EngineT]) -> _EngineT:
        return min(engines, key=lambda engine: (engine.load, engine.turn))


class RoundRobin(Policy[_EngineT]):
    """All in turn, however loaded they are."""

    def _choose(self, body: bytes, engines: Sequence[_EngineT]) -> _EngineT:
        return min(engines, key=lambda engine: engine.turn)


class CacheAware(Policy[_EngineT]):
    """The engine that was sent the longest beginning of this prompt before, unless it has too much to do already."""

    def __init__(self, slack: int) -> None:
        """`slack`: how much more load than the least is not too much."""
        super().__init__()
        self._slack = slack
        self._seen: OrderedDict[int, dict[str, int]] = OrderedDict()
        """By the hash of a prompt up to the end of a block: the engines that had it, and in which life."""

    def _choose(self, body: bytes, engines: Sequence[_EngineT]) -> _EngineT:
        least = super()._choose(body, engines)
        if len(engines) == 1:
            return least
        blocks = _blocks(body)
        best = least
        for hashed in reversed(blocks):
            had = self._seen.get(hashed)
            knows = [] if had is None else [engine for engine in engines if had.get(engine.url) == engine.life]
            if knows:
                best = super()._choose(body, knows)
                break
        if best.load > least.load + self._slack and best.load > least.load * _BALANCE_REL:
            best = least
        for hashed in blocks:
            self._seen.setdefault(hashed, {})[best.url] = best.life
            self._seen.move_to_end(hashed)
        while len(self._seen) > _BLOCKS_KEPT:
            self._seen.popitem(last=False)
        return best


def _blocks(body: bytes) -> list[int]:
    """Hashes of the beginnings of the prompt in a body, each one block longer than the one before."""
    start = next((at for key in _PROMPT_KEYS if (at := body.find(key, 0, _KEY_BYTES_MAX)) >= 0), 0)
    hashed = xxhash.xxh3_64()
    found: list[int] = []
    for at in range(start, min(len(body), start + _BLOCKS_MAX * _BLOCK_BYTES) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        hashed.update(body[at : at + _BLOCK_BYTES])
        found.append(hashed.intdigest())
    return found


def make_policy(name: str, *, slack: int) -> Policy[_EngineT]:
    """The policy of that name; `slack` of CacheAware."""
    made: Mapping[str, Callable[[], Policy[_EngineT]]] = {
        "cache_aware": partial(CacheAware, slack),
        "least_loaded": Policy,
        "round_robin": RoundRobin,
    }
    assert made.keys() == set(POLICIES), f"front: policies {sorted(made)}, expected {POLICIES}"
    return made[name]()
