"""One engine of the world: the real scheduler, cache, role and handoff machine, on simulated ranks and wires.

A life begins with `boot` and ends with `kill`; the next one has a new incarnation and remembers nothing. Every turn
is what the real loop does in one: letters, handoffs, plan; the step takes its time, then it is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.cache import CacheGeometry, PartPages, PrefixCache
from serinus.cache.keys import HASH_BYTES
from serinus.core.errors import CapacityError, RequestError
from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.core.plan import SeqResult, StepPlan, StepResult
from serinus.core.request import FinishReason, Request, TokenDelta
from serinus.core.rng import Rng
from serinus.engine.decode_role import DecodeRole
from serinus.engine.prefill_role import PrefillRole
from serinus.parallel import DecisionKind, DecisionLog, StepHeader
from serinus.sched import SchedSettings, Scheduler
from serinus.sched.request_state import Phase
from serinus.testing.world.crew import SimCrew
from serinus.testing.world.guard import GuardedStore
from serinus.testing.world.line import RankLine
from serinus.testing.world.mover import SimMover
from serinus.testing.world.network import Network, SimChannel
from serinus.testing.world.options import EngineShape, Options, Shape
from serinus.testing.world.ports import Shared, SimDecodePort, SimPost, SimPrefillPort
from serinus.testing.world.ranks import Rank, RankPart
from serinus.testing.world.storage import SimStorage
from serinus.testing.world.timeline import Timeline
from serinus.testing.world.toy import Lanes, next_token

__all__ = ["ROWS", "Engine", "FlakyCache", "lanes_of"]

ROWS = 5
_STEP_S = 0.004
_IDLE_S = 0.5
"""An idle engine looks around this often."""
_QUEUE = {
    Phase.WAITING: "waiting",
    Phase.PREFILL: "running",
    Phase.DECODE: "running",
    Phase.PREALLOC: "prealloc",
    Phase.TRANSFER: "transfer",
    Phase.INFLIGHT: "inflight",
}


def lanes_of(world: Shape) -> Lanes:
    """Of its model."""
    return Lanes.of(world.layers, world.heads, world.context_length, world.slides, world.window)


def _stamped() -> Any:
    """The room's only file that needs torch."""
    from serinus.testing.world import stamped

    return stamped


class FlakyCache(PrefixCache):
    """A cache that sometimes has no room, though it has."""

    refuse: Callable[[], bool] = staticmethod(lambda: False)

    def allocate(self, rid: str, *args: Any, **more: Any) -> PartPages | None:
        return None if self.refuse() else super().allocate(rid, *args, **more)


class Engine:
    """A decode or prefill engine that can die and come back."""

    def __init__(
        self, shape: EngineShape, world: Shape, *, timeline: Timeline, network: Network, shared: Shared,
        options: Options, rng: Rng, answer: Callable[[TokenDelta], None],
    ) -> None:  # fmt: skip
        self.shape = shape
        self.name = shape.name
        self.world = world
        self.address = f"sim://{shape.name}"
        self.timeline = timeline
        self.network = network
        self._shared = shared
        self.options = options
        self.rng = rng
        self._answer = answer
        self.life = 0
        self.alive = False
        self.paused_until = 0.0
        self.boot()

    # ---- life and death ---------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """A new process."""
        self.life += 1
        self.alive = True
        shape, world = self.shape, self.world
        self.incarnation = self._shared.incarnation(self.name, self.life)
        stamped = _stamped() if world.canary else None
        self.pages = {Part.FULL: shape.pages, **({Part.SWA: shape.swa_pages} if world.window else {})}
        """Of each part, the padding page included."""
        self.ranks = self._ranks(RankPart if stamped is None else stamped.StampedPart)
        self.mover = SimMover(self, shape.host_pages, self._copy_fails) if shape.host_pages else None
        self.storage = self._storage()
        self.cache = FlakyCache(
            CacheGeometry(
                page_size=shape.page_size, full_pages=shape.pages, swa_pages=shape.swa_pages,
                window=world.window or None, host_full_pages=shape.host_pages,
                host_swa_pages=shape.host_pages if world.window else 0, read_batch_pages=2,
            ),
            mover=self.mover, storage=self.storage, write_policy=shape.write_policy,
        )  # fmt: skip
        self.cache.refuse = self._refuses
        self.scheduler = Scheduler(
            SchedSettings(
                page_size=shape.page_size, context_length=world.context_length, rows=ROWS, vocab_size=world.vocab_size,
                max_running_requests=ROWS - 1, chunked_prefill_size=shape.chunk, growth_tokens=4,
                min_remote_tokens=2, eos_ids=(0,), prefetch_policy=shape.prefetch, prefetch_s_max=0.05,
            ),
            self.cache,
        )  # fmt: skip
        self.canaries = None if stamped is None else stamped.Canaries(self)
        self._old: list[tuple[RankPart, int, NDArray[np.uint8]]] = []
        """What pages held some time ago."""
        self.stores = [
            {part: GuardedStore(self, part, own) for part, own in rank.stores.items()} for rank in self.ranks
        ]  # fmt: skip
        self.epoch = 0
        """Times that everybody was cut off from our memory."""
        self.log = DecisionLog()
        self._queue_of: dict[str, str] = {}
        self._headers = 0
        self.metrics = Metrics(self.name, shape.role)
        self.inbox: deque[Request | str] = deque()
        self.turns = 0
        self._plan: StepPlan | None = None
        self._partials: dict[int, list[int]] = {}
        self._lines: list[RankLine] = [RankLine() for _ in self.ranks]
        self.crew: SimCrew | None = None
        self._wake_at = float("inf")
        listens = self.address if shape.role == "prefill" else ""
        self.channel = SimChannel(self.network, self.name, listens, self.wake)
        post = SimPost(self, self.channel)
        self.role: DecodeRole | PrefillRole
        self.port: SimDecodePort | SimPrefillPort
        if shape.role == "decode":
            port = SimDecodePort(self, post, self._shared)
            self.port = port
            self.role = DecodeRole(
                scheduler=self.scheduler, port=port, channels=(), metrics=self.metrics, clock=self.timeline,
                addresses=(), on_failure=world.on_failure, optimistic=world.optimistic, guard=self.canaries,
            )  # fmt: skip
        else:
            prefill = SimPrefillPort(self, post, self._shared)
            self.port = prefill
            self.role = PrefillRole(
                scheduler=self.scheduler, port=prefill, channels=(), metrics=self.metrics, clock=self.timeline
            )
        self.wake()

    def _ranks(self, kind: type[RankPart]) -> list[Rank]:
        shape, world = self.shape, self.world
        return [
            Rank(
                number, lanes=lanes_of(world), tp=shape.tp, pp=shape.pp, pages=self.pages, page_size=shape.page_size,
                rows=ROWS, context=world.context_length, kind=kind,
            )
            for number in range(shape.tp * shape.pp)
        ]  # fmt: skip

    def _storage(self) -> SimStorage | None:
        shape = self.shape
        if self.mover is None or shape.prefetch == "none":
            return None
        return SimStorage(
            self, self.mover, self._shared.folders.setdefault((shape.page_size, shape.tp, shape.pp), {})
        )  # fmt: skip

    def keep(self, prompt: tuple[int, ...], salt: str) -> None:
        """Its storage, where it has one, knows the whole pages of a prompt from an earlier day."""
        tokens = np.array(prompt[: len(prompt) // self.shape.page_size * self.shape.page_size], np.int32)
        if self.storage is not None and len(tokens) and self.canaries is None:
            names = self.cache.shelves.keys
            chained = names.chain(names.seed(salt.encode()), tokens.tobytes())
            self.storage.keep([chained[at : at + HASH_BYTES] for at in range(0, len(chained), HASH_BYTES)], tokens)

    def kill(self) -> None:
        """kill -9: nothing is said to anybody; the operating system closes the connections."""
        self.alive = False
        self.channel.close()
        self.port.close()

    def _refuses(self) -> bool:
        chance = self.options.allocation
        return bool(chance) and not self.network.calm and self.rng.random() < chance

    def _copy_fails(self) -> bool:
        chance = self.options.restore
        return bool(chance) and not self.network.calm and self.rng.random() < chance

    @property
    def calm(self) -> bool:
        """The adversary has stopped."""
        return self.network.calm

    # ---- turns ------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Look around soon."""
        self._wake(self.timeline.now_s)

    def _wake(self, at: float) -> None:
        at = max(at, self.paused_until)
        if at < self._wake_at and self.alive:
            self._wake_at = at
            self.timeline.at(at, self._woken, self.life, at)

    def _woken(self, life: int, at: float) -> None:
        if life != self.life or not self.alive or at != self._wake_at:
            return
        if self.timeline.now_s < self.paused_until:
            self._wake_at = float("inf")
            self._wake(self.paused_until)
            return
        self._wake_at = float("inf")
        self._take_inbox()
        if self._plan is None:
            self._turn()

    def _take_inbox(self) -> None:
        while self.inbox:
            item = self.inbox.popleft()
            if isinstance(item, Request):
                self._admit(item)
            else:
                self.role.aborted(item, self.timeline.now_s)
                delta = self.scheduler.abort(item, "the client left")
                if delta is not None:
                    self._answer(delta)

    def _admit(self, request: Request) -> None:
        try:
            self.role.admit(request)
        except (RequestError, CapacityError) as error:
            self._answer(TokenDelta(rid=request.rid, finish=FinishReason.ERROR, error=str(error), error_status=503))

    def _turn(self) -> None:
        now = self.timeline.now_s
        self.turns += 1
        for delta in self.role.turn(now, self.turns):
            self._answer(delta)
        plan = self.scheduler.plan(now)
        self._decide(plan)
        if plan is None:
            if self.canaries is not None:
                self.canaries.look_around()
            self._wake(now + _IDLE_S)
            return
        self._plan = plan

    # ---- ranks ------------------------------------------------------------------------------------------------------

    def _queues(self) -> dict[str, str]:
        states = self.scheduler._states
        queues = {rid: _QUEUE[state.phase] for rid, state in states.items()}
        if self.shape.role == "prefill":
            for xid in self.port.ungranted():
                queues[xid] = "bootstrap"
        return queues

    def _decide(self, plan: StepPlan | None) -> None:
        """Write what changed into the log and send it to all ranks, with the plan."""
        queues = self._queues()
        if queues != self._queue_of:
            for rid in self._queue_of:
                if rid not in queues:
                    self.log.decide(DecisionKind.DROP, rid)
            for rid, queue in queues.items():
                if self._queue_of.get(rid) != queue:
                    self.log.decide(DecisionKind.PLACE, rid, queue=queue)
            self._queue_of = queues
        if plan is not None:
            self.log.decide(DecisionKind.RUN, batch=[work.rid for work in plan.work])
        if not self.log.pending:
            return
        self._headers += 1
        header = self.log.header(self._headers)
        if plan is not None:
            self._partials = {}
        cost = _STEP_S if plan is not None else 0.0
        for rank in self.ranks:
            self.tell(rank, partial(self._heard, self.life, rank, header, plan), cost)

    def rank_delay(self) -> float:
        """How long a word between the leader and another rank takes this time."""
        slow = self.options.rank_delay_s if not self.network.calm else 0.0
        return self.rng.random() * slow if slow else 0.0

    def tell(self, rank: Rank, work: Callable[[], None], cost_s: float = 0.0) -> None:
        """Put work on the one ordered line of a rank: it is done there, some time later, after all that came before.
        The leader's own rank does at once what takes no time, if it has nothing else to do."""
        line = self._lines[rank.number]
        if not rank.number and not line.works and not cost_s:
            work()
            return
        delay = self.rank_delay() if rank.number else 0.0
        at, number = line.put(work, self.timeline.now_s + delay, cost_s)
        self.timeline.at(at, self._reached, self.life, rank, number)

    def _reached(self, life: int, rank: Rank, number: int) -> None:
        if life != self.life or not self.alive:
            return
        if self.timeline.now_s < self.paused_until:
            self.timeline.at(self.paused_until, self._reached, life, rank, number)
            return
        self._lines[rank.number].work_off(number)

    def settle(self) -> None:
        """The leader waits until every rank has done what it was told."""
        assert self._plan is None, "testing: the leader waits for its ranks in the middle of a step"
        for line in self._lines:
            line.work_off(line.last)

    def _heard(self, life: int, rank: Rank, header: StepHeader, plan: StepPlan | None) -> None:
        rank.hear(header)
        if plan is not None:
            if self.mover is not None:
                self.mover.gate(rank)
            rank.enter(plan)
            if self.canaries is not None:
                self._stray(rank)
                self.canaries.enter(rank, plan)
            self._partials[rank.number] = rank.compute(plan)
            if self.canaries is not None:
                self.canaries.leave(rank, plan)
            if len(self._partials) == len(self.ranks):
                self._commit(plan)

    def _stray(self, rank: Rank) -> None:
        """A write comes very late: a page holds again the KV, but not the stamps, that it held some time ago."""
        if self.calm or not self.options.stray:
            return
        for own in rank.stores.values():
            page = self.rng.randrange(1, own.page_count)
            self._old.append((own, page, own.take_pages(np.array([page]))))
        if self.rng.random() < self.options.stray:
            own, page, data = self._old.pop(self.rng.randrange(len(self._old)))
            now = own.take_pages(np.array([page]))
            now[:, : own.kv_bytes] = data[:, : own.kv_bytes]
            own.write_pages(np.array([page]), now)
            self.network.damaged += 1

    def _commit(self, plan: StepPlan) -> None:
        seqs = []
        for index, work in enumerate(plan.work):
            fold = 0
            for folds in self._partials.values():
                fold ^= folds[index]
            token = next_token(fold, self.world.vocab_size) if work.sample is not None else None
            seqs.append(SeqResult(token=token))
        self._plan = None
        now = self.timeline.now_s
        ended = self.canaries.convict() if self.canaries is not None else []
        for delta in ended if self.shape.role == "decode" else ():
            self._answer(delta)
        outcome = self.scheduler.commit(plan, StepResult(step=plan.step, seqs=tuple(seqs)), now)
        for delta in outcome.deltas:
            self._answer(delta)
        if outcome.chunks:
            self.role.computed(outcome.chunks, now)
        self.wake()

    # ---- questions --------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing under way, as far as it knows."""
        machine = self.port.machine
        quarantined = getattr(machine, "quarantined_pages", 0)
        return (
            not self.inbox
            and self._plan is None
            and self.scheduler.idle
            and not machine.handoff_count
            and not quarantined
            and not self.cache.busy()
            and not any(line.works for line in self._lines)
            and (self.crew is None or self.crew.idle)
        )

    def gauges(self) -> dict[str, int]:
        """Those of all ranks, added up."""
        total: dict[str, int] = {}
        for rank in self.ranks:
            for name, value in rank.table.gauges().items():
                total[name] = total.get(name, 0) + value
        return total

    def counts(self) -> dict[str, int]:
        """What happened in this life, for statistics."""
        stats = self.scheduler.stats()
        totals = stats.totals
        counts = {f"rejected {reason}": count for reason, count in self.port.rejects.items()}
        cache = self.cache.stats()
        counts["loaded tokens"], counts["failed copies"] = cache.loaded_tokens, cache.failed_copies
        counts["prefetched tokens"] = cache.prefetched_tokens
        counts["backed up tokens"] = cache.backup_tokens
        counts["recomputed"] = totals.recomputed
        counts["retracted"] = totals.retracted
        counts["computed tokens"] = totals.computed_tokens
        counts["frames sent again"] = self.port.resent_count
        counts["landed"] = self.metrics.count("kv_transfer_latency_ms")
        for (code,), count in self.metrics._values["num_transfer_failed_reqs"].items():
            counts[f"{self.shape.role} failed: {code}"] = int(count)
        return counts
