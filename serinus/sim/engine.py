"""SimEngine: the driver of one engine of the simulated cluster. The engine itself is the product's.

From `boot` to `kill` it is one run of an engine's processes; the next one has a new incarnation and remembers nothing
but its files. Each turn is what the process loop does in one: messages in, the engine's turn, messages out, and the
line is flushed; the ranks that do not lead obey when the simulated line brings them their headers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from serinus.cache import CacheGeometry, PrefixCache
from serinus.cache.keys import HASH_BYTES, PageKeys
from serinus.core.clock import Clock
from serinus.core.handoff import Reservation
from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.core.request import Request, TokenDelta
from serinus.core.rng import Rng
from serinus.core.stamps import ChainHashes
from serinus.engine.build import LeadKinds, lead
from serinus.engine.handoffs import HandoffParts, MadeHandoffs, make_role
from serinus.engine.messages import FrontMessage
from serinus.engine.peers import Peers
from serinus.kernels import StampLane, stamp_lanes
from serinus.parallel import Mesh
from serinus.pd import HandoffPort
from serinus.pool import HostPool
from serinus.pool.storage import PageFiles
from serinus.ranks import RankLoop
from serinus.sched import SchedSettings
from serinus.sim.comm import RankTensors
from serinus.sim.damage import Damage
from serinus.sim.disk import SimDisk
from serinus.sim.links import STEP_S, SimLink, SimLinks
from serinus.sim.mailbox import SimMailbox
from serinus.sim.model import sim_spec
from serinus.sim.moments import Note
from serinus.sim.network import Network, SimChannel
from serinus.sim.options import EngineShape, Options, Shape
from serinus.sim.pools import PoolFaults, SimPool
from serinus.sim.ports import CheckedStore, Shared, Staging, WatchedPort, config_of
from serinus.sim.process import SimProcess
from serinus.sim.rank import build_sim_rank
from serinus.sim.recalled import SentPages
from serinus.sim.timeline import Timeline
from serinus.sim.toy import Lanes, expected_kv
from serinus.sim.watched import FlakyCache, PageWatch, WatchedLine, WatchedScheduler
from serinus.sim.workers import SimWorkers
from serinus.wire.messages import Abort

_IDLE_S = 0.5
"""An idle engine looks around this often."""
_FRONT = "clients"


def lanes_of(world: Shape) -> Lanes:
    """The lanes of the cluster's model."""
    return Lanes.of(world.layers, world.heads, world.context_length, world.slides, world.window)


class CountingMetrics(Metrics):
    """Counts in a dictionary what the product's metrics keep for a scrape: nothing scrapes a simulated engine, and to
    make the series of one takes a millisecond."""

    def __init__(self) -> None:
        self.counted: Counter[tuple[str, ...]] = Counter()
        """By name and labels."""
        self._registry, self._families = CollectorRegistry(), {}  # empty: of several ranks the others' stand beside it

    def set(self, name: str, value: float, *labels: str) -> None:
        self.counted[name, *labels] = int(value)

    def add(self, name: str, amount: float = 1.0, *labels: str) -> None:
        self.counted[name, *labels] += int(amount)

    def observe(self, name: str, value: float) -> None:
        self.counted[name,] += 1

    def count(self, name: str) -> int:
        return self.counted[name,]


class SimEngine:
    """A decode or prefill engine that can be killed and started again."""

    def __init__(
        self, shape: EngineShape, world: Shape, *, timeline: Timeline, network: Network, shared: Shared,
        sent: SentPages, options: Options, rng: Rng, answer: Callable[[TokenDelta], None], note: Note,
    ) -> None:  # fmt: skip
        self.shape, self.world = shape, world
        self.name = shape.name
        self.address = f"sim://{shape.name}"
        self.timeline, self.network = timeline, network
        self.options, self.rng = options, rng
        self.shared, self._sent, self._answer, self._note = shared, sent, answer, note
        self.config = config_of(shape, world)
        self.pages = {Part.FULL: shape.pages, **({Part.SWA: shape.swa_pages} if world.window else {})}
        self.pages |= {Part.LATENT: shape.pages} if "L" in world.slides else {}
        """Of each part, the padding page included."""
        self.life = 0
        """Runs of its processes so far."""
        self.boot()

    # ---- start and end ----------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start its processes anew."""
        self._note("up", self.name)
        self.life += 1
        self.checked_turns = 0
        """Turns of this run that were over when it was checked last."""
        self.inbox: list[FrontMessage] = []
        self.process = SimProcess(self.timeline, self._turn)
        self.incarnation = self.shared.incarnation(self.name, self.life)
        self.metrics = CountingMetrics()
        self._build_ranks()
        self._build_leader()
        self.process.wake()

    def _build_ranks(self) -> None:
        world, mesh = self.world, Mesh(tp=self.shape.tp, pp=self.shape.pp)
        self.lanes = lanes_of(world)
        self.spec = sim_spec(self.lanes, world.vocab_size, world.context_length)
        self.tensors = RankTensors(
            mesh, wait=lambda holds: self.links.wait(holds), came=lambda rank: self.links.came(rank)
        )  # fmt: skip
        self.links = SimLinks(self.process, self.tensors, self._rank_delay)
        self.disk = SimDisk(self.shared.folders, self._fails) if self._stores_files else None
        self.faults = PoolFaults(self._fails, self._errs, self._flips, self.rng)
        self.ends = self.shared.ends(self)
        self.ranks = [build_sim_rank(self, rank) for rank in range(mesh.size)]
        ends = [SimLink(self.links, rank) for rank in range(1, mesh.size)]
        self.loops = [RankLoop(rank.body, end) for rank, end in zip(self.ranks[1:], ends, strict=True)]
        self.links.attach(self.loops, ends)

    def _build_leader(self) -> None:
        shape, parts = self.shape, self.ranks[0].parts
        links = self.links if parts.mesh.size > 1 else None
        self.line = WatchedLine(
            self.ranks[0].body, parts.mesh, self.timeline, links, whole=bool(self.world.canary)
        )  # fmt: skip
        listens = self.address if shape.role == "prefill" else ""
        self.channel = SimChannel(self.network, self.name, listens, self.process.wake)
        self.mailbox = SimMailbox(self, self.channel, self.incarnation)
        kinds = LeadKinds(
            cache=self._make_cache, scheduler=self._make_scheduler, metrics=lambda **labels: self.metrics,
            incarnation=lambda: self.incarnation,
        )  # fmt: skip
        self.built = lead(parts, self.line, self.timeline, self._make_handoffs, backends=self.ends[0], kinds=kinds)
        self.engine, self.canary = self.built.engine, self.built.engine.canary
        if self.canary is not None:
            self._sent.watch(self.name, self.canary, self.cache)

    def _make_cache(self, geometry: CacheGeometry, **more: Any) -> FlakyCache:
        self.cache = FlakyCache(replace(geometry, read_batch_pages=2), **more)
        self.cache.refuse, self.cache.traced = self._refuses, self._sent.traced
        return self.cache

    def _make_scheduler(
        self, settings: SchedSettings, cache: PrefixCache, chain_hashes: ChainHashes | None
    ) -> WatchedScheduler:
        self.scheduler = WatchedScheduler(
            replace(settings, growth_tokens=4, overlaps=self.shape.overlaps), cache, chain_hashes
        )
        self.scheduler.watch(self._check_landed, partial(self._note, engine=self.name))
        self.watch = self.line.watch = PageWatch(self.name, cache, self.scheduler)
        self.stores = [
            {
                part: CheckedStore(pool, part, self.watch, is_source=self.shape.role == "prefill")
                for part, pool in rank.stores.items()
            }
            for rank in self.ranks
        ]
        """For one-sided backends, by rank."""
        return self.scheduler

    def _make_handoffs(self, parts: HandoffParts, clock: Clock) -> MadeHandoffs:
        role = make_role(parts, clock.now(), port=partial(WatchedPort, self))
        self.port: HandoffPort[Any] = role.port
        return MadeHandoffs(role=role, peers=Peers(self.mailbox))

    def kill(self) -> None:
        """kill -9: no peer is told; the operating system closes the connections and frees the locks."""
        self._note("down", self.name)
        self.process.alive = False
        self.channel.close()
        self.shared.fabric.kill(self)
        self.shared.machine.kill(self.name)
        for backend in self.ends[0]:
            if isinstance(backend, Staging):
                backend.kill()
        if self.disk is not None:
            self.disk.kill(0.0 if self.calm else self.options.restore)

    @property
    def alive(self) -> bool:
        """Whether its processes run."""
        return self.process.alive

    @property
    def folder(self) -> str:
        """Of its files; engines that are cut alike share it."""
        return f"/pages-{self.shape.page_size}-tp{self.shape.tp}-pp{self.shape.pp}"

    @property
    def _stores_files(self) -> bool:
        return bool(self.shape.host_pages) and self.shape.prefetch != "none"

    def keep(self, prompt: tuple[int, ...], salt: str) -> None:
        """Its files, where it has some, know the whole pages of a prompt from an earlier day."""
        size = self.shape.page_size
        tokens = np.array(prompt[: len(prompt) // size * size], np.int32)
        if not self._stores_files or self.world.canary or not len(tokens):
            return
        names = PageKeys(self.ranks[0].parts.namespace, size)
        chained = names.seed(salt.encode())
        chained += names.chain(chained, tokens.tobytes())
        keys = [chained[at : at + HASH_BYTES] for at in range(0, len(chained), HASH_BYTES)]
        for number, rank in enumerate(self.ranks):
            page_bytes = {part: pool.page_bytes for part, pool in rank.pools.items()}
            files = PageFiles(
                f"{self.folder}/rank{number}", namespace="simulated", page_bytes=page_bytes, byte_max=None,
                clock=self.timeline, disk=SimDisk(self.shared.folders, lambda: False),
            )  # fmt: skip
            for part in rank.pools:
                own = rank.model.kv.get(part)
                pages = np.empty((len(keys), 0), np.uint8) if own is None else own.pages_of(tokens, size)
                for before, key, page in zip(keys, keys[1:], pages, strict=False):
                    files.save(part, key, page, before)
            files.close()

    # ---- faults -----------------------------------------------------------------------------------------------------

    @property
    def calm(self) -> bool:
        """The adversary has stopped."""
        return self.network.calm

    def _chance(self, probability: float) -> bool:
        return bool(probability) and not self.calm and self.rng.random() < probability

    def _refuses(self) -> bool:
        return self._chance(self.options.allocation)

    def _fails(self) -> bool:
        return self._chance(self.options.restore)

    def _flips(self) -> bool:
        flips = self.shape.role == "prefill" and self._chance(self.options.flip)
        if flips:
            self._struck("flip")
        return flips

    def _errs(self) -> bool:
        errs = self._chance(self.options.copy)
        if errs:
            self._struck("copy")
        return errs

    def damage(self, pools: Mapping[Part, SimPool], host: Mapping[Part, HostPool]) -> Damage:
        """What happens to the memory of a rank."""
        full = self.world.coverage == "full"
        return Damage(self.options, pools, host, self._chance, self.rng, self._struck, undoes=full)

    def _struck(self, kind: str) -> None:
        self.network.damaged[kind] += 1

    def _rank_delay(self) -> float:
        slow = 0.0 if self.calm else self.options.rank_delay_s
        return self.rng.random() * slow if slow else 0.0

    def workers(self, rank: int, least_s: float, late: float) -> SimWorkers:
        """What copies pages of a rank, beside its steps."""
        process = self.process

        def later(act: Callable[[], None]) -> None:
            late_s = 0.0 if self.calm else self.options.late_s * late
            process.at(self.timeline.now_s + least_s + (self.rng.random() * late_s if late_s else 0.0), act)

        return SimWorkers(later, (lambda: self.links.look(rank)) if rank else process.wake)

    # ---- turns ------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """A client asks for an answer."""
        self.inbox.append(FrontMessage(front=_FRONT, message=request))
        self.process.wake()

    def cancel(self, rid: str) -> None:
        """The client of a request has left."""
        self.inbox.append(FrontMessage(front=_FRONT, message=Abort(rid=rid, reason="the client left")))
        self.process.wake()

    def _turn(self) -> None:
        engine, now = self.engine, self.timeline.now_s
        events, self.inbox = self.inbox, []
        body = self.ranks[0].body
        steps = body.steps
        output = self.built.turn(events)
        for _, deltas in output.deltas:
            for delta in deltas:
                self._answer(delta)
        engine.line.flush()
        self.scheduler.check_deadlines(now)
        self._check_canary()
        if body.steps > steps:
            self._note("step", self.name, until=now + STEP_S)
            self.process.busy_until = now + STEP_S
        self.process.wake(_IDLE_S if engine.wait_s else 0.0)

    def _check_canary(self) -> None:
        if self.canary is not None and self.canary.violations.total and not self.options.damages:
            lines = "; ".join(violation.line() for violation in list(self.canary.violations)[:2])
            raise AssertionError(f"sim: canary: nothing was damaged in {self.name}, but it says {lines}")

    def _check_landed(self, reservation: Reservation) -> None:
        """I6, before the request runs: its pages hold the KV of its prompt, the part it had here itself included."""
        rid, prompt = reservation.rid, reservation.prompt
        own = self.scheduler.prompt_pages(rid)
        assert own is not None, f"sim: {rid} has landed in {self.name}, which does not know it"
        size = self.shape.page_size
        for span in own.spans:
            first = max(0, len(prompt) + 1 - self.world.window) if span.part is Part.SWA else 0
            assert span.first * size <= first, f"sim: I6: {rid} has {span.part.name} pages from {span.first} on only"
            slots = (span.pages[:, None] * size + np.arange(size)).reshape(-1)
            slots = slots[first - span.first * size : len(prompt) - span.first * size]
            for number, rank in enumerate(self.ranks):
                kv = rank.model.kv.get(span.part)
                if kv is None:
                    continue
                expected = expected_kv(self.lanes, prompt, kv.which)[first:]
                wrong = np.flatnonzero((kv.read(slots) != expected).any(axis=1)) + first
                silent = ", and the canary is silent" if self.canary is not None else ""
                assert not len(wrong), (
                    f"sim: I6: {rid} has landed in {self.name}, but positions {wrong.tolist()} of part"
                    f" {span.part.name} on rank {number} hold other KV (held {reservation.held}){silent}"
                )

    def wrong_pages(self, lanes: Sequence[StampLane], prompts: Sequence[tuple[int, ...]] | None = None) -> list[str]:
        """Cached pages of the device, in words: those with KV, or stamps in some lanes, that are not of their tokens.
        `prompts`: only pages that a hit of one of these reads, and of sliding ones the stamps in its window."""
        size, found = self.shape.page_size, list[str]()
        for node in self.cache.tree.nodes():
            path = [node]
            while path[-1].parent is not None:
                path.append(path[-1].parent)
            tokens = np.frombuffer(b"".join(each.tokens for each in reversed(path[:-1])), np.int32)
            for part in self.pages:
                pages = node.device[part] if part < len(node.device) else ()
                unread = 0 if prompts is None or part is not Part.SWA else max(0, size + 1 - self.world.window)
                for at, page in enumerate(pages):
                    first = node.start + at * size
                    path_tokens = tuple(tokens[: first + size].tolist())
                    if prompts is not None and not any(
                        path_tokens == prompt[: first + size] and first + size < len(prompt) for prompt in prompts
                    ):
                        continue
                    span, slots = slice(first, first + size), slice(page * size, page * size + size)
                    for number, rank in enumerate(self.ranks):
                        kv, pool = rank.model.kv.get(part), rank.pools[part]
                        if kv is None or pool.stamps_LS4 is None:
                            continue
                        words = expected_kv(self.lanes, tokens[: span.stop], kv.which)[span]
                        those = [at for at, lane in enumerate(stamp_lanes(part)) if lane in lanes]
                        stamps = pool.stamps_LS4[those, slots, :2].numpy()
                        own = np.stack((tokens[span], np.arange(span.start, span.stop)), axis=1)
                        odd = (stamps != own)[:, unread:].any()
                        if odd or (kv.read(np.arange(slots.start, slots.stop)) != words).any():
                            found.append(f"{part.name} page {page} (position {first}) on rank {number} of {self.name}")
        return found

    # ---- questions --------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing under way, as far as it knows."""
        machine = self.port.machine
        return (
            not self.inbox
            and self.engine.idle
            and not machine.handoff_count
            and not getattr(machine, "quarantined_pages", 0)
            and not self.cache.busy()
            and not self.line.under_way
            and not self.line.has_news
            and self.links.idle
            and not any(rank.body.busy for rank in self.ranks)
        )

    def leftovers(self) -> dict[str, int]:
        """What its ranks still hold, by gauge, and the requests that still wait, as far as it is not 0."""
        stats = self.scheduler.stats()
        found = {
            "running": stats.num_running_reqs, "queue": stats.num_queue_reqs,
            "prealloc": stats.num_decode_prealloc_queue_reqs, "transfer": stats.num_decode_transfer_queue_reqs,
            "inflight": stats.num_prefill_inflight_queue_reqs,
        }  # fmt: skip
        for rank, holdings in enumerate(self.line.rank_holdings):
            found.update({f"{name} of rank {rank}": count for name, count in holdings.items()})
        return {name: count for name, count in found.items() if count}

    def counts(self) -> dict[str, int]:
        """What happened in this run, for statistics."""
        totals, cache = self.scheduler.stats().totals, self.cache.stats()
        counts = Counter(self.port.machine.rejects) + Counter(self.mailbox.rejects)
        found = {f"rejected {reason}": count for reason, count in counts.items()}
        found["loaded tokens"], found["failed copies"] = cache.loaded_tokens, cache.failed_copies
        found["prefetched tokens"], found["backed up tokens"] = cache.prefetched_tokens, cache.backup_tokens
        found["recomputed"], found["retracted"] = totals.recomputed, totals.retracted
        found["computed tokens"], found["chunks ahead"] = totals.computed_tokens, self.scheduler.chunks_ahead
        found["frames sent again"] = self.mailbox.resent_count
        found["landed"] = self.metrics.count("kv_transfer_latency_ms")
        found["violations"] = 0 if self.canary is None else self.canary.violations.total
        for (name, *labels), count in self.metrics.counted.items():
            if name == "num_transfer_failed_reqs":
                found[f"{self.shape.role} failed: {labels[0]}"] = count
        return found
