"""The page worker of a rank, which obeys the commands of handoffs down the same line as plans and copies.

So a rank that is busy with a step obeys them after it: what a plan wrote is staged whole, and a page that changed hands
on the leader changes hands there in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serinus.core.clock import Clock
from serinus.core.parts import PageStore, Part
from serinus.pd import (
    PAGE_COMMANDS,
    AnyBackend,
    PageAnswer,
    PageCommand,
    PageWorker,
    RankLayout,
)
from serinus.ranks.body import RankBody
from serinus.ranks.layouts import HasPools, layout_of

STAGING_PIECES = 8
"""Pieces of one rank that may be asked to be staged and not be reported yet: a rank hears of them between two steps and
should find enough to do then."""


def attach_page_worker(
    body: RankBody,
    parts: HasPools,
    clock: Clock,
    stores: Mapping[Part, PageStore],
    backends: Sequence[AnyBackend],
) -> None:
    """Give a rank its page worker; no effect where the engine hands nothing over.

    `stores`: the pools as they are to be read and written by it. `backends`: how pages travel between engines.
    """
    if parts.config.role == "unified":
        return
    layout = RankLayout(layout_of(parts))
    if any(backend.capabilities.slices for backend in backends):
        for pool in parts.pools.values():
            pool.warm_stamps()
    own = {part: store for part, store in stores.items() if store.page_bytes}
    worker = PageWorker(body.rank, layout=layout, stores=own, backends=backends, clock=clock)

    def obey(command: PageCommand) -> tuple[PageAnswer, ...]:
        answer = worker.obey(command)
        return () if answer is None else (answer,)

    for kind in PAGE_COMMANDS:
        body.on(kind, obey)
    body.attend(_Source(worker))
    body.at_end(worker.close)


class _Source:
    """What a page worker holds, for the gauges of its rank, and the answers that come later than their command."""

    def __init__(self, worker: PageWorker) -> None:
        self._worker = worker

    @property
    def busy(self) -> bool:
        return self._worker.busy

    @property
    def holdings(self) -> Mapping[str, int]:
        return {"rank_staged_pieces": self._worker.staged_count}

    def answers(self) -> Sequence[object]:
        return self._worker.answers()
