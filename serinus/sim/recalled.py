"""I24: what an engine condemned, and had from another one, that one gives up too.

A page came from engine E by a handoff, and is condemned where it came to, at position p. Once all is at rest E has no
cached page of that prefix from p on that it had at the moment when the pages landed: it is what E sent, or was computed
of that. What E computed since is its own. Nothing here asks what engines tell each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from serinus.cache import Condemned, PrefixCache, Tier
from serinus.cache.node import TOKEN_BYTES
from serinus.canary import CanaryLead, Violation
from serinus.core.handoff import PageTrace
from serinus.core.parts import Part

Moment = Mapping[Part, int]
"""The operation of an engine's ledgers, by part: pages handed out from there on are newer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """KV that was condemned where it had come to."""

    source: str
    """The engine that it came from..."""
    life: int
    """...in this life of it."""
    by: str
    """The engine that condemned it."""
    salt: str
    tokens: bytes
    """Int32, from position 0 through the page."""
    position: int
    """Of its first token."""
    before: Moment
    """When its handoff had landed, at the source."""


class SentPages:
    """What all engines of a world had from each other and condemned."""

    def __init__(self, source: Callable[[str], tuple[int, PrefixCache]]) -> None:
        """`source`: an engine's life and cache now, by its name."""
        self._source = source
        self._landed: dict[str, tuple[int, Moment]] = {}
        """By handoff, the source's life and moment."""
        self.condemned: list[Sent] = []

    def traced(self, traces: Iterable[PageTrace]) -> None:
        """A handoff is about to land."""
        for trace in traces:
            if trace.arrived:
                life, cache = self._source(trace.engine)
                ledgers = {part: ledger for (tier, part), ledger in cache.ledgers.items() if tier is Tier.DEVICE}
                self._landed[trace.xid] = life, {part: ledger.operation for part, ledger in ledgers.items()}

    def watch(self, name: str, lead: CanaryLead, cache: PrefixCache) -> None:
        """Be told of all that this engine condemns."""
        judge: Any = lead._judgement
        told = judge._condemned

        def condemned(violation: Violation, gone: Condemned) -> None:
            traces = cache.ledgers[Tier.DEVICE, violation.part].traces_of(np.array([violation.page], np.int32))
            for trace in traces if gone.prefix else ():  # else nothing was cached that could be named by its tokens
                if trace.arrived and trace.xid in self._landed:
                    life, before = self._landed[trace.xid]
                    size = cache.page_size
                    self.condemned.append(
                        Sent(
                            source=trace.engine, life=life, by=name, salt=gone.salt, tokens=gone.prefix,
                            position=violation.position // size * size, before=before,
                        )
                    )  # fmt: skip
            told(violation, gone)

        judge._condemned = condemned

    def kept(self) -> Iterator[str]:
        """What its source still has of it, in words."""
        for sent in self.condemned:
            life, cache = self._source(sent.source)
            if life == sent.life:
                yield from (f"{place} of {sent.source}, which {sent.by} condemned" for place in _kept(cache, sent))


def _kept(cache: PrefixCache, sent: Sent) -> Iterator[str]:
    """The pages from its position on that are of these tokens, or behind them, and older than its moment."""
    size, root = cache.page_size, cache.tree.roots.get(sent.salt)
    first = sent.position // size * size
    wanted = sent.tokens[: (first + size) * TOKEN_BYTES]
    nodes = [] if root is None else [(root, b"")]
    while nodes:
        node, before = nodes.pop()
        path = (before + node.tokens)[: len(wanted)]
        if path != wanted[: len(path)]:
            continue
        nodes += [(child, path) for child in node.children.values()]
        for part, operation in sent.before.items():
            pages = node.device[part] if part < len(node.device) else ()
            for at in range(max(0, first - node.start) // size, len(pages)):
                if 0 < cache.ledgers[Tier.DEVICE, part].taken_at(int(pages[at])) < operation:
                    yield f"{part.name} page {int(pages[at])} (position {node.start + at * size})"
