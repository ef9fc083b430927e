"""The world would notice: each mutant breaks one rule of the protocol in memory, and a few seeds must show it.

    python -m tests.sim.mutants                  every mutant, at most 200 seeds each; exit code 1 = one survived
    python -m tests.sim.mutants "no tombstone"   only these

A mutant is a patch of the real code for as long as its `with` lasts. What it is caught by is printed: the seed (replay
it under the mutant with --seed) and the finding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from serinus.cache.ledger import FREE_OWNER
from serinus.cache.prefetch import Prefetches
from serinus.core.clock import WallClock
from serinus.core.rng import Rng
from serinus.pd import ForgetPrefill, PrefillSide
from serinus.pd.clients import Client
from serinus.pd.decode import DecodeSide
from serinus.pd.decode_ends import DecodeEnds
from serinus.pd.decode_port import DecodePort
from serinus.pd.dispatch import Dispatch
from serinus.pd.events import CancelHandoff, PeerFenced
from serinus.pd.landing import Landing
from serinus.pd.modes import Mode
from serinus.pd.ports import Port
from serinus.pd.prefill_ends import PrefillEnds
from serinus.sched import Scheduler
from serinus.sched.seats import Seats
from serinus.testing.world.engine import Engine
from serinus.testing.world.one_sided import SimOneSided
from serinus.testing.world.options import Cancel, EngineShape, Options, Scenario, Shape, Work
from serinus.testing.world.ports import Shared, SimPost
from serinus.wire import ReliableLink
from serinus.wire.messages import AbortGrant
from tests.sim import canary_mutants, window_mutants  # noqa: F401
from tests.sim.hunting import MUTANTS, SEEDS_MAX, Kill, Mutant, hunt, mutant, replaced

__all__ = ["MUTANTS", "SEEDS_MAX", "Kill", "Mutant", "hunt", "one_leaves_another_follows"]


# ---- PD.md: aborts and quarantine (push) --------------------------------------------------------------------------


@mutant("free at once on abort", "push", "pull")
def free_at_once() -> Iterator[None]:
    """A closed grant's pages are not put into quarantine."""
    with replaced(DecodeEnds, "_seclude", lambda self, handoff, now, out: False):
        yield


def _release(side: DecodeSide, now: float, out: list[Any], *, older_than_s: float = -1.0) -> None:
    for ward in side._quarantines:
        if ward.writers and now - ward.since > older_than_s:
            ward.writers.clear()
            side._quarantines._free_if_over(ward, now, out)


@mutant("notify only", "push")
def notify_only() -> Iterator[None]:
    """ABORT is sent, and the pages are free without waiting for the acknowledgement."""
    original = DecodeSide.handle

    def handle(self: DecodeSide, event: Any, now: float) -> list[Any]:
        out = original(self, event, now)
        _release(self, now, out)
        return out

    with replaced(DecodeSide, "handle", handle):
        yield


@mutant("ack or timeout", "push")
def ack_or_timeout() -> Iterator[None]:
    """Pages leave quarantine when the acknowledgement comes, or when it has not come for a second."""
    original = DecodeSide.handle

    def handle(self: DecodeSide, event: Any, now: float) -> list[Any]:
        out = original(self, event, now)
        _release(self, now, out, older_than_s=1.0)
        return out

    with replaced(DecodeSide, "handle", handle):
        yield


@mutant("no tombstone", "push")
def no_tombstone() -> Iterator[None]:
    """Prefill forgets an ABORT whose GRANT has not come yet."""
    with replaced(Client, "bury", lambda self, grant: None):
        yield


@mutant("check before count", "push")
def check_before_count() -> Iterator[None]:
    """A write counts as outstanding only when it is reported, not when it is begun."""
    move, written = Dispatch._move, PrefillSide._written

    def moved(self: Dispatch, order: Any, *rest: Any) -> None:
        before = order.outstanding
        move(self, order, *rest)
        order.outstanding = before

    def reported(self: PrefillSide, event: Any, now: float, out: list[Any]) -> None:
        order = self._orders.get(event.xid)
        if order is None:
            return  # nobody waits for it
        order.outstanding += 1
        written(self, event, now, out)

    with replaced(Dispatch, "_move", moved), replaced(PrefillSide, "_written", reported):
        yield


@mutant("ABORT sent once", "push")
def abort_sent_once() -> Iterator[None]:
    """ABORT is not repeated when it is lost: here, one in three is."""
    original, sent = SimPost.send, [0]

    def send(self: SimPost, peer: str, message: Any, payload: Any = b"") -> None:
        if isinstance(message, AbortGrant):
            sent[0] += 1
            if sent[0] % 3 == 0:
                return
        original(self, peer, message, payload)

    SimPost.send = send  # type: ignore[method-assign]
    try:
        yield
    finally:
        del SimPost.send  # type: ignore[misc]


@mutant("no incarnation", "push")
def no_incarnation() -> Iterator[None]:
    """A restarted engine is taken for the one that was there before: its memory is reached over old connections."""
    with (
        replaced(Shared, "incarnation", lambda self, name, life: sum(name.encode()) + 1),
        replaced(SimOneSided, "_stands", lambda self, tie: not tie.cut and tie.target.alive),
        replaced(SimOneSided, "close", lambda self: None),
    ):
        yield


@mutant("fence that frees without cutting", "push")
def fence_without_cutting() -> Iterator[None]:
    """A peer that does not answer is declared dead, and can still write."""

    def fence(self: DecodePort, action: Any) -> PeerFenced:
        self._fences.pop(action.peer, 0)
        return PeerFenced(peer=action.peer, everybody=False, endpoints=None)

    with replaced(DecodePort, "_fence", fence):
        yield


# ---- PD.md: pull, sources, snapshots, counts, ranks ---------------------------------------------------------------


@mutant("confirm skipped", "pull")
def confirm_skipped() -> Iterator[None]:
    """Decode commits what it has read without asking whether the source was there all the time."""
    original = DecodeEnds._land_if_whole

    def land(self: DecodeSide, handoff: Any, now: float, out: list[Any]) -> None:
        mode = handoff.mode
        if mode is Mode.PULL:
            handoff.mode = Mode.RECEIVER_CHECKED
        original(self, handoff, now, out)
        handoff.mode = mode

    with replaced(DecodeEnds, "_land_if_whole", land):
        yield


@mutant("sources freed before drain", "local", "push", "pull")
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


@mutant("snapshot before dedup", "local", "push")
def snapshot_before_dedup() -> Iterator[None]:
    """Page ids for the transfer are those from before publication: duplicates that went back."""
    insert, spans = Seats._insert, Seats.spans
    before: dict[str, dict[int, int]] = {}

    def inserting(self: Seats, state: Any, end: int) -> None:
        own = before.setdefault(state.rid, {}) if state.handoff is not None else {}
        for index in range(state.published // self.page_size, end // self.page_size):
            own[index] = int(state.full.pages[index])
        insert(self, state, end)

    def snapped(self: Seats, state: Any, first: int, end: int) -> Any:
        full = spans(self, state, first, end)[0]
        own = before.get(state.rid, {}) if state.handoff is not None else {}
        pages = [own.get(first + index, page) for index, page in enumerate(full.pages.tolist())]
        return (replace(full, pages=np.array(pages, np.int32)),)

    with replaced(Seats, "_insert", inserting), replaced(Seats, "spans", snapped):
        yield


@mutant("page-count check off", "local", "pull")
def page_count_off() -> Iterator[None]:
    """What was granted, sent and landed may differ."""

    def fault(self: Landing, data: Any) -> str:
        self.due[next(key for key in self.due if key[1] == data.rank)] = data.first
        return ""

    with replaced(Landing, "done_fault", lambda self, done: ""), replaced(Landing, "fault", fault):
        yield


def _ended(engine: Engine, plan: Any) -> set[str]:
    """Requests of a plan whose client has left since it was made."""
    states = engine.scheduler._states
    return {w.rid for w in (plan.work if plan is not None else ()) if w.rid not in states or states[w.rid].doomed}


@mutant("conditional collective")
def conditional_collective() -> Iterator[None]:
    """A rank that sees an abort on its own does not enter the step."""
    original = Engine._heard

    def heard(self: Engine, life: int, rank: Any, header: Any, plan: Any) -> None:
        if not (rank.number and _ended(self, plan)):
            original(self, life, rank, header, plan)

    with replaced(Engine, "_heard", heard):
        yield


# ---- more of the same kind ----------------------------------------------------------------------------------------


@mutant("a rank acts on what it sees")
def rank_acts_alone() -> Iterator[None]:
    """A rank takes a request out of its batch, because it has heard that the client left."""
    original = Engine._heard

    def heard(self: Engine, life: int, rank: Any, header: Any, plan: Any) -> None:
        gone = _ended(self, plan)
        if rank.number and gone:
            rank.table.take_batch = lambda: tuple(w.rid for w in plan.work if w.rid not in gone)
        original(self, life, rank, header, plan)

    with replaced(Engine, "_heard", heard):
        yield


def one_leaves_another_follows(step: int) -> Scenario:
    """A client leaves at some step while ranks fill its pages; another prompt, computed here, waits for them."""
    rng = Rng(step).split("works")

    def work(rid: str, at: float, new_tokens: int, prefill: str) -> Work:
        prompt = tuple(rng.randrange(1, 16) for _ in range(20))
        return Work(rid=rid, at=at, prompt=prompt, new_tokens=new_tokens, decode="d0", prefill=prefill)

    engines = (
        EngineShape(name="p0", role="prefill", pages=17, chunk=8),
        EngineShape(name="d0", role="decode", tp=2, pages=8, chunk=8),
    )
    return Scenario(
        seed=step, shape=Shape(engines=engines), options=Options(rank_delay_s=0.02),
        works=(work("leaves", 0.0, 3, "p0"), work("follows", 0.001, 6, "")),
        faults=(Cancel(rid="leaves", step=step),),
    )  # fmt: skip


@mutant("a hand is not on the line", world=one_leaves_another_follows)
def hand_off_the_line() -> Iterator[None]:
    """A rank moves pages for handoffs in an order of their own: plans and copies decided later may come before them."""
    original, last = Engine.tell, dict[Any, float]()

    def tell(self: Engine, rank: Any, work: Any, cost_s: float = 0.0) -> None:
        if not rank.number or getattr(getattr(work, "func", None), "__name__", "") != "_obey":
            original(self, rank, work, cost_s)
            return
        life = self.life
        at = max(last.get(rank, 0.0), self.timeline.now_s + 0.5 * self.rng.random())
        last[rank] = at
        self.timeline.at(at, lambda: work() if self.alive and self.life == life else None)

    with replaced(Engine, "tell", tell):
        yield


@mutant("digest not looked at", "tcp")
def no_digest() -> Iterator[None]:
    """Bytes that changed on the way are taken."""
    import serinus.pd.hand as hand

    with replaced(hand, "check_digests", lambda *rest: None):
        yield


@mutant("repeated frames are delivered again")
def frames_delivered_again() -> Iterator[None]:
    """The link does not notice that it had a frame already."""
    original = ReliableLink.receive

    def receive(self: Any, seq: int, ack: int, item: Any, byte_count: int = 0) -> list[Any]:
        repeated = 0 < seq <= self._received
        out = original(self, seq, ack, item, byte_count)
        return [item] if repeated else out

    with replaced(ReliableLink, "receive", receive):
        yield


@mutant("nothing is sent again")
def nothing_sent_again() -> Iterator[None]:
    """A lost frame is lost."""
    with replaced(ReliableLink, "_overdue", lambda self, now, limit: []):
        yield


@mutant("late data is copied", "local")
def late_data_copied() -> Iterator[None]:
    """A handoff that was cancelled is not closed."""
    original = DecodeSide.handle

    def handle(self: DecodeSide, event: Any, now: float) -> list[Any]:
        return [] if isinstance(event, CancelHandoff) else original(self, event, now)

    with replaced(DecodeSide, "handle", handle):
        yield


@mutant("pages kept after the end", "local")
def pages_kept() -> Iterator[None]:
    """The hold of the last chunk of a handoff is not dropped."""
    original = Scheduler.handoff_drained
    with replaced(Scheduler, "handoff_drained", lambda self, rid: True if rid else original(self, rid)):
        yield


@mutant("a lost operation is a failed one", "push", "pull")
def lost_is_failed() -> Iterator[None]:
    """Nobody is given up or fenced for it: its pages are free while it may still move bytes."""
    with (
        replaced(Port, "_lost", lambda self, peer, error, out: None),
        replaced(DecodePort, "_lost", lambda self, peer, error, out: None),
    ):
        yield


@mutant("parked pages are sent after they were given up", "local")
def parked_sent() -> Iterator[None]:
    """What was computed before the grant is announced when it comes, though its pages went back."""

    def give_up(self: PrefillSide, order: Any, out: list[Any]) -> None:
        out.append(ForgetPrefill(xid=order.xid))

    with replaced(PrefillEnds, "_give_up_pages", give_up):
        yield


@mutant("what the storage did not bring is used")
def storage_believed() -> Iterator[None]:
    """Pages that a read did not fill hang in the tree like those that it filled."""
    original = Prefetches.done

    def done(self: Prefetches, done: Any) -> bool:
        prefetch = self._by_op.get(done.op)
        if prefetch is not None and done.op in prefetch.batches:
            done = replace(done, good=len(prefetch.batches[done.op].pages))
        return original(self, done)

    with replaced(Prefetches, "done", done):
        yield


@mutant("host pages are free while the storage fills them")
def storage_pages_freed() -> Iterator[None]:
    """The request went away, and its prefetch's pages with it, before the reader said that it had ended."""
    original = Prefetches._abandon

    def abandon(self: Prefetches, prefetch: Any) -> None:
        original(self, prefetch)
        ledger = self._host_shelf.ledger
        for batch in prefetch.batches.values():
            if batch.good < 0:
                ledger.move(batch.pages, prefetch.owner, FREE_OWNER, "too early")

    with replaced(Prefetches, "_abandon", abandon):
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
