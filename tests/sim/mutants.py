"""The world would notice: each mutant breaks one rule of the protocol in memory, and a few seeds must show it.

    python -m tests.sim.mutants                  every mutant, at most 200 seeds each; exit code 1 = one survived
    python -m tests.sim.mutants "no tombstone"   only these

A mutant is a patch of the real code for as long as its `with` lasts. What it is caught by is printed: the seed (replay
it under the mutant with --seed) and the finding.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from serinus.core.clock import WallClock
from serinus.pd import ForgetPrefill, PrefillSide, decode_table
from serinus.pd.actions import FencePeer, Quarantine, QuarantineOver, Send
from serinus.pd.arrival_account import ArrivalAccount
from serinus.pd.backends import OpState
from serinus.pd.clients import Client
from serinus.pd.decode import DecodeSide
from serinus.pd.events import CancelHandoff
from serinus.pd.one_sided_ops import OneSidedOps
from serinus.pd.pages import RankFenced
from serinus.pd.prefill_handoff import PrefillHandoff
from serinus.pd.prefill_table import PrefillTable
from serinus.sched import Scheduler
from serinus.sched.page_allocator import PageAllocator
from serinus.sim import draw
from serinus.sim.mailbox import SimMailbox
from serinus.sim.one_sided import Card, Fabric
from serinus.sim.options import Cancel, Scenario
from serinus.sim.ports import Shared
from serinus.sim.process import SimProcess
from serinus.wire import PeerMessage, ReliableLink
from serinus.wire.messages import AbortGrant, DataOk, Done, DoneOk, Expired, Fail
from tests.sim import backend_mutants, canary_mutants, line_mutants, order_mutants, rank_mutants, window_mutants  # noqa: F401
from tests.sim.hunting import MUTANTS, SEEDS_MAX, Kill, Mutant, hunt, mutant, replaced, unchecked

__all__ = ["MUTANTS", "SEEDS_MAX", "Kill", "Mutant", "hunt"]


# ---- PD.md: aborts and quarantine (push) --------------------------------------------------------------------------


@mutant("free at once on abort", "push", "pull", "ipc", says="I2:")
def free_at_once() -> Iterator[None]:
    """A closed grant's pages are not put into quarantine."""
    with replaced(decode_table, "entry_of", lambda handoff, now: None):
        yield


def _impatient(patience_s: float) -> Iterator[None]:
    """Pages leave quarantine after so long, whatever was acknowledged."""
    original = DecodeSide.handle
    held: dict[tuple[int, int], tuple[float, Quarantine]] = {}

    def handle(self: DecodeSide, event: Any, now: float) -> list[Any]:
        out: list[Any] = []
        for action in original(self, event, now):
            if isinstance(action, Quarantine):
                held[id(self), action.grant] = now, action
            if not isinstance(action, QuarantineOver) or held.pop((id(self), action.grant), None):
                out.append(action)
        for (side, grant), (since, action) in list(held.items()):
            if side == id(self) and now - since >= patience_s:
                del held[side, grant]
                out.append(QuarantineOver(grant=grant, spans=action.spans))
        return out

    with replaced(DecodeSide, "handle", handle):
        yield


@mutant("notify only", "push", says="I2:")
def notify_only() -> Iterator[None]:
    """ABORT is sent, and the pages are free without waiting for the acknowledgement."""
    yield from _impatient(0.0)


@mutant("ack or timeout", "push", says="I2:")
def ack_or_timeout() -> Iterator[None]:
    """Pages leave quarantine when the acknowledgement comes, or when it has not come for a second."""
    yield from _impatient(1.0)


def overtaken(seed: int) -> Scenario:
    """A world in which half of all messages that may be overtaken are, and clients leave early."""
    scenario = draw(seed, backend="push", canary="", ranked=False)
    leaving = tuple(Cancel(rid=work.rid, at=round(work.at + 0.01 * (seed % 9 + 1), 4)) for work in scenario.works[::2])
    options = replace(scenario.options, overtake=0.5, late_s=max(scenario.options.late_s, 0.3))
    return replace(scenario, options=options, faults=(*scenario.faults, *leaving))


@mutant("no tombstone", "push", world=overtaken, says="I2:")
def no_tombstone() -> Iterator[None]:
    """Prefill forgets an ABORT whose GRANT has not come yet."""
    with replaced(Client, "close_grant", lambda self, grant: None):
        yield


@mutant("check before count", "push", says="I4:")
def check_before_count() -> Iterator[None]:
    """Whether writes are outstanding is asked before they are counted: none ever is."""
    with replaced(PrefillHandoff, "outstanding", property(lambda self: 0, lambda self, count: None)):
        yield


@mutant("ABORT sent once", "push", world=overtaken, says="I16:")
def abort_sent_once() -> Iterator[None]:
    """ABORT is not repeated when it is lost: here, the first of a world is, and one in three from there on."""
    original, sent = SimMailbox.send, [0]

    def send(self: SimMailbox, peer: str, message: Any, payload: Any = b"") -> None:
        if isinstance(message, AbortGrant):
            sent[0] += 1
            if sent[0] % 3 == 1:
                return
        original(self, peer, message, payload)

    SimMailbox.send = send  # type: ignore[method-assign]
    try:
        yield
    finally:
        del SimMailbox.send  # type: ignore[misc]


@mutant("no incarnation", "push", says="I2:")
def no_incarnation() -> Iterator[None]:
    """A restarted engine is taken for the one that was there before: its memory is reached over old connections."""
    made: Counter[SimProcess] = Counter()

    def card(self: Fabric, engine: Any, rank: int, name: str) -> Card:
        made[engine.process] += 1
        return Card(self, engine, rank, f"{name}:{made[engine.process]}")

    with (
        replaced(Shared, "incarnation", lambda self, name, life: sum(name.encode()) + 1),
        replaced(Fabric, "card", card),
    ):
        yield


@mutant("fence that frees without cutting", "push", says="I2:")
def fence_without_cutting() -> Iterator[None]:
    """A peer that does not answer is declared dead, and can still write."""

    def fence(self: Any, command: FencePeer) -> RankFenced:
        return RankFenced(peer=command.peer, backend=command.backend, all_peers=False, endpoint=b"")

    with replaced(OneSidedOps, "fence", fence):
        yield


# ---- PD.md: pull, sources, snapshots, counts, ranks ---------------------------------------------------------------


@mutant("pages are given up while their hold stands", "ipc", says="I6:")
def lease_ignored() -> Iterator[None]:
    """Prefill gives pages to others when their lease is over, here at once; decode compares no sums."""
    original = PrefillSide.handle

    def handle(self: PrefillSide, event: Any, now: float) -> list[Any]:
        for handoff in self._table.under_way.values():
            handoff.lease_until = 0.0
        out = [action for action in original(self, event, now) if not _is_expired(action)]
        for handoff in list(self._table.draining.values()):
            self._table.abort_if_drained(handoff, out)
        return out

    with replaced(PrefillSide, "handle", handle), unchecked():
        yield


def _is_expired(action: Any) -> bool:
    return isinstance(action, Send) and isinstance(action.message, Expired)


@mutant("sources freed before drain", "local", "push", "pull", "ipc", says="I4:")
def sources_freed() -> Iterator[None]:
    """The hold of a chunk is dropped as soon as it is announced."""
    original = Scheduler.commit

    def commit(self: Scheduler, *rest: Any) -> Any:
        outcome = original(self, *rest)
        for chunk in outcome.chunks:
            self.chunk_drained(chunk.rid, chunk.spans)
        return outcome

    with replaced(Scheduler, "commit", commit):
        yield


@mutant("snapshot before dedup", "local", "push", says="expected an owner to hold it")
def snapshot_before_dedup() -> Iterator[None]:
    """Page ids for the transfer are those from before publication: duplicates that went back."""
    publish, spans = PageAllocator.publish, PageAllocator.spans
    before: dict[str, dict[int, int]] = {}

    def publishing(self: PageAllocator, state: Any) -> None:
        own = before.setdefault(state.rid, {}) if state.handoff is not None else {}
        for index in range(state.published // self.page_size, state.computed // self.page_size):
            own[index] = int(state.full.pages[index])
        publish(self, state)

    def snapped(self: PageAllocator, state: Any, first: int, end: int) -> Any:
        full, *windows = spans(self, state, first, end)
        own = before.get(state.rid, {}) if state.handoff is not None else {}
        pages = [own.get(first + index, page) for index, page in enumerate(full.pages.tolist())]
        return (replace(full, pages=np.array(pages, np.int32)), *windows)

    with replaced(PageAllocator, "publish", publishing), replaced(PageAllocator, "spans", snapped):
        yield


@mutant("page-count check off", "local", "pull", "ipc", says="I6:")
def page_count_off() -> Iterator[None]:
    """What was granted, sent and landed may differ."""

    def fault(self: ArrivalAccount, data: Any) -> str:
        self.due[next(key for key in self.due if key[1] == data.rank)] = data.first
        return ""

    with replaced(ArrivalAccount, "done_fault", lambda self, done: ""), replaced(ArrivalAccount, "fault", fault):
        yield


# ---- more of the same kind ----------------------------------------------------------------------------------------


@mutant("digest not looked at", "tcp", says="I6:")
def no_digest() -> Iterator[None]:
    """Bytes that changed on the way are taken."""
    with unchecked():
        yield


def _deaf(kind: type) -> Iterator[None]:
    """Prefill does not hear one kind of message."""
    original = PrefillSide.handle

    def handle(self: PrefillSide, event: Any, now: float) -> list[Any]:
        heard = not (isinstance(event, PeerMessage) and isinstance(event.message, kind))
        return original(self, event, now) if heard else []

    with replaced(PrefillSide, "handle", handle):
        yield


for _kind, _says in ((Fail, "I16:"), (DataOk, "I10:"), (DoneOk, "I16:")):
    mutant(f"prefill does not hear {_kind.__name__}", "local", says=_says)(partial(_deaf, _kind))


@mutant("DONE counts a page less", "local", says="I16:")
def done_counts_less() -> Iterator[None]:
    """What prefill says that it sent is not what decode got."""
    original = DecodeSide.handle

    def handle(self: DecodeSide, event: Any, now: float) -> list[Any]:
        if isinstance(event, PeerMessage) and isinstance(event.message, Done):
            event = replace(
                event, message=msgspec.structs.replace(event.message, page_count=event.message.page_count - 1)
            )
        return original(self, event, now)

    with replaced(DecodeSide, "handle", handle):
        yield


@mutant("repeated frames are delivered again", says="I16:")
def frames_delivered_again() -> Iterator[None]:
    """The link does not notice that it had a frame already."""
    original = ReliableLink.receive

    def receive(self: Any, seq: int, ack: int, item: Any, byte_count: int = 0) -> list[Any]:
        repeated = 0 < seq <= self.received
        out = original(self, seq, ack, item, byte_count)
        return [item] if repeated else out

    with replaced(ReliableLink, "receive", receive):
        yield


@mutant("nothing is sent again", says="I16:")
def nothing_sent_again() -> Iterator[None]:
    """A lost frame is lost."""
    original = ReliableLink.due

    def due(self: Any, now: float, limit: int = 64) -> list[Any]:
        return [frame for frame in original(self, now, limit) if frame.item is None]

    with replaced(ReliableLink, "due", due):
        yield


@mutant("late data is copied", "local", says="I2:")
def late_data_copied() -> Iterator[None]:
    """A handoff that was cancelled is not closed."""
    original = DecodeSide.handle

    def handle(self: DecodeSide, event: Any, now: float) -> list[Any]:
        return [] if isinstance(event, CancelHandoff) else original(self, event, now)

    with replaced(DecodeSide, "handle", handle):
        yield


@mutant("pages kept after the end", "local", says="I10:")
def pages_kept() -> Iterator[None]:
    """The hold of the last chunk of a handoff is not dropped."""
    original = Scheduler.handoff_drained
    with replaced(Scheduler, "handoff_drained", lambda self, rid: True if rid else original(self, rid)):
        yield


@mutant("a lost operation is a failed one", "push", says="I2:")
def lost_is_failed() -> Iterator[None]:
    """No peer is given up or fenced for it: its pages are free while it may still move bytes."""
    original = OneSidedOps.poll

    def poll(self: Any) -> list[Any]:
        return [
            (token, replace(result, state=OpState.FAILED) if result.state is OpState.LOST else result)
            for token, result in original(self)
        ]

    with replaced(OneSidedOps, "poll", poll):
        yield


@mutant("parked pages are sent after they were given up", "local", says="I4:")
def parked_sent() -> Iterator[None]:
    """What was computed before the grant is announced when it comes, though its pages went back."""

    def give_up(self: PrefillTable, order: Any, out: list[Any]) -> None:
        out.append(ForgetPrefill(xid=order.xid))

    with replaced(PrefillTable, "give_up_pages", give_up):
        yield


# ---- hunting ------------------------------------------------------------------------------------------------------


def main(words: list[str]) -> int:
    """Hunt them all; 0 = all were caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description="Hunt mutants in the world.")
    parser.add_argument("names", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX, help=f"seeds for each (default: {SEEDS_MAX})")
    parser.add_argument("--seed", type=int, help="one seed only")
    arguments = parser.parse_args(words)
    chosen = [m for m in MUTANTS if not arguments.names or any(name in m.name for name in arguments.names)]
    seeds = range(arguments.seeds) if arguments.seed is None else range(arguments.seed, arguments.seed + 1)
    clock, survived = WallClock(), []
    for item in chosen:
        start = clock.now()
        kill = hunt(item, seeds)
        took = clock.now() - start
        if kill is None:
            survived.append(item.name)
            print(f"SURVIVED  {item.name:<38} {len(seeds)} seeds, {took:.1f} s", flush=True)
        else:
            print(f"caught    {item.name:<38} seed {kill.seed:<4} {took:5.1f} s  {kill.finding[:140]}", flush=True)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutants caught")
    return 1 if survived or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
