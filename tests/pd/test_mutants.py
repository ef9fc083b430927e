"""The world would notice: each mutant breaks one rule of the protocol on purpose, and some order of events shows it."""

from __future__ import annotations

import pytest

from serinus.core.handoff import ChunkReady
from serinus.core.rng import Rng
from serinus.pd import DecodeEvent, PrefillEvent
from serinus.wire import PeerMessage
from serinus.wire.messages import Data, DataOk, Done, DoneOk, Fail
from tests.pd.tiny import PAGE_SIZE
from tests.pd.world import World


class Mutant(World):
    """A world whose machines can be told to misbehave."""

    def __init__(self, flaw: str) -> None:
        super().__init__(2, 2, pages=10, room=2)
        self.flaw = flaw

    def to_decode(self, d: int, event: DecodeEvent) -> None:
        message = event.message if isinstance(event, PeerMessage) else None
        if self.flaw == "believes any grant" and isinstance(event, PeerMessage) and isinstance(message, Data):
            handoff = self.decode[d]._table.of_xid(message.xid)
            if handoff is None and self.asked[d]:  # late data of a closed grant goes to another request
                self._write_anyway(d, message, event.peer)
        if self.flaw == "done loses a page" and isinstance(message, Done) and isinstance(event, PeerMessage):
            return super().to_decode(d, PeerMessage(peer=event.peer, incarnation=1, message=_short(message)))
        return super().to_decode(d, event)

    def to_prefill(self, p: int, event: PrefillEvent) -> None:
        message = event.message if isinstance(event, PeerMessage) else None
        if self.flaw == "ignores fail" and isinstance(message, Fail):
            return
        if self.flaw == "never unstages" and isinstance(message, DataOk):
            return
        if self.flaw == "never drains" and isinstance(message, DoneOk):
            return
        if self.flaw == "sources freed before drain" and isinstance(event, ChunkReady):
            self.prefill_pools[p].data[event.spans[0].pages] = 0xDD
        super().to_prefill(p, event)

    def _write_anyway(self, d: int, data: Data, peer: str) -> None:
        asked = next(iter(self.asked[d].values()))
        link = self._link(decode=(d, peer))
        rows = link.staging.get((data.xid, data.piece, 0)) if link is not None else None
        if rows is not None:
            self.pools[d].data[asked.pages[:1]] = rows[:1]


def _short(done: Done) -> Done:
    return Done(
        xid=done.xid,
        grant=done.grant,
        token=done.token,
        piece_count=done.piece_count,
        page_count=done.page_count - 1,
        byte_count=done.byte_count,
    )


def run(world: World, seed: int, steps: int = 120) -> None:
    """A random run of the world, then calm."""
    rng = Rng(seed)
    for _ in range(steps):
        links = [link for link in world.links if link.to_prefill or link.to_decode]
        jobs = [(p, xid) for p, jobs in enumerate(world.jobs) for xid in jobs]
        asked = [(d, rid) for d, asked in enumerate(world.asked) for rid in asked]
        roll = rng.random()
        if roll < 0.15:
            world.start(rng.randrange(2), rng.randrange(2), rng.randint(1, 5 * PAGE_SIZE), rng.randrange(3))
        elif roll < 0.6 and links:
            link = rng.choice(links)
            world.deliver_to_prefill(link)
            world.deliver_to_decode(link)
        elif roll < 0.85 and jobs:
            world.compute(*rng.choice(jobs), rng.randint(1, 4))
        elif roll < 0.93 and asked:
            world.cancel(*rng.choice(asked))
        elif roll < 0.95:
            world.tick(0.5)
    for _ in range(6):
        world.settle()
        world.tick(2.0)
    world.settle()
    world.assert_empty()
    assert world.over["landed"] == world.over.total() - world.over["cancelled"], (
        f"without faults all land: {world.over}"
    )


@pytest.mark.slow
def test_the_sound_protocol_passes() -> None:
    for seed in range(40):
        run(World(2, 2, pages=10, room=2), seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flaw",
    [
        "believes any grant",
        "done loses a page",
        "ignores fail",
        "never unstages",
        "never drains",
        "sources freed before drain",
    ],
)
def test_a_flaw_is_caught(flaw: str) -> None:
    for seed in range(200):
        try:
            run(Mutant(flaw), seed)
        except AssertionError:
            return
    pytest.fail(f"200 seeds did not show: {flaw}")
