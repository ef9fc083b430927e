"""Clients, router, engines and an adversary in one thread: first work and faults, then calm, then the account.

`run(scenario)` returns what happened; it raises nothing for what it finds: a Finding says what broke, and when.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from serinus.cache import Tier
from serinus.core.errors import SerinusError
from serinus.core.request import FinishReason, Request, TokenDelta
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.kernels import StampLane
from serinus.sim.engine import SimEngine, lanes_of
from serinus.sim.moments import Moment, noting, silent
from serinus.sim.network import Network
from serinus.sim.one_sided import Fabric
from serinus.sim.options import Cancel, Crash, Fault, Partition, Pause, Scenario, Work
from serinus.sim.ports import SWEEP_S, Shared
from serinus.sim.recalled import SentPages
from serinus.sim.timeline import Timeline
from serinus.sim.toy import expected_answer

_CALM_S_MAX = 90.0
"""After the last fault everything must have come to its end within this (I10)."""
_REST_S = 1.0
"""What an engine still tells its ranks after calm takes less."""
_STEPS_MAX = 60_000
_ROUNDS = 3
"""Times that every prompt is sent once more where KV was damaged."""
_CHECK_EVERY = 64
"""Events between two full checks of all schedulers and caches."""


@dataclass(slots=True, kw_only=True)
class SimClient:
    """One request as its client sees it."""

    work: Work
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    engine: str = ""
    """Where the router sent it last..."""
    life: int = 0
    """...and which run of that engine has it."""
    cancelled: bool = False
    end: str = ""
    """stop, length, abort, error, or lost (its engine was killed)."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the simulation has found."""

    kind: str
    """Name of the error or of the rule."""
    text: str
    at: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one scenario came to."""

    finding: Finding | None
    steps: int
    frames: int
    seconds: float
    """Virtual time that it took."""
    ends: dict[str, int]
    busy_steps: int
    """Events until the last client had its end."""
    busy_frames: int
    """Frames sent until then."""
    counts: dict[str, int]
    """What else happened: handoffs landed, recomputed by reason, frames rejected..."""


class Broken(AssertionError):
    """A rule of the simulation does not hold."""


class Cluster:
    """Clients, router, engines and adversary of one run."""

    def __init__(self, scenario: Scenario, moments: list[Moment] | None = None) -> None:
        """`moments`: what happens is appended to it; None = it is not wanted."""
        self.scenario = scenario
        rng = Rng(scenario.seed).split("run")
        self.timeline = Timeline()
        self._note = silent if moments is None else noting(moments, self.timeline)
        self.network = Network(self.timeline, scenario.options, rng.split("network"), self._note)
        self.network.drop_at.update(scenario.drop_frames)
        self.network.repeat_at.update(scenario.repeat_frames)
        self.fabric = Fabric(self.timeline, scenario.options, rng.split("fabric"))
        self.shared = Shared(scenario.seed, scenario.shape.backend, self.fabric, self.timeline, rng.split("folders"))
        self.sent = SentPages(lambda name: (self.engines[name].life, self.engines[name].cache))
        self.engines = {
            shape.name: SimEngine(
                shape, scenario.shape, timeline=self.timeline, network=self.network, shared=self.shared, sent=self.sent,
                options=scenario.options, rng=rng.split(shape.name), answer=self._answer, note=self._note,
            )
            for shape in scenario.shape.engines
        }  # fmt: skip
        lanes = lanes_of(scenario.shape)
        self.clients = {
            work.rid: SimClient(
                work=work,
                expected=expected_answer(
                    lanes, scenario.shape.vocab_size, np.array(work.prompt, np.int32), work.new_tokens, stop=0
                ),
            )
            for work in scenario.works
        }
        kept = rng.split("kept")
        for work in scenario.works:
            if kept.random() < 0.5:
                for engine in self.engines.values():
                    engine.keep(work.prompt, work.salt)
        self._by_step: dict[int, list[Fault]] = {}
        for work in scenario.works:
            self.timeline.at(work.at, self._arrive, work)
        for fault in scenario.faults:
            if fault.step >= 0:
                self._by_step.setdefault(fault.step, []).append(fault)
            else:
                self.timeline.at(fault.at, self._strike, fault)
        self.busy_steps = self.busy_frames = 0
        self.counts: Counter[str] = Counter()
        self._healed_at = 0.0
        self._short = ""
        """The first receipt that is short; told at the end, as what it stands for is the worse finding."""
        self._is_last_round = False

    # ---- router and clients -----------------------------------------------------------------------------------------

    def _arrive(self, work: Work) -> None:
        client = self.clients[work.rid]
        if client.cancelled:
            client.end = "abort"
            return
        engine = self.engines[work.decode]
        if not engine.alive:
            others = [e for e in self.engines.values() if e.shape.role == "decode" and e.alive]
            if not others:
                self.timeline.after(0.2, self._arrive, work)
                return
            engine = others[0]
        client.engine, client.life = engine.name, engine.life
        prefill = self.engines[work.prefill].address if work.prefill else ""
        request = Request(
            rid=work.rid, prompt=np.array(work.prompt, np.int32), seed=0, cache_salt=work.salt,
            sampling=SamplingParams(temperature=0.0, max_new_tokens=work.new_tokens),
            prefill_address=prefill, arrival=self.timeline.now_s, priority=work.priority, timeout_s=work.timeout_s,
        )  # fmt: skip
        engine.submit(request)

    def _answer(self, delta: TokenDelta) -> None:
        client = self.clients.get(delta.rid)
        if client is None:
            raise Broken(f"I7: {delta.rid} got an answer to a question that was never asked: {delta}")
        if client.end:
            raise Broken(f"I7: {delta.rid} got {delta.token_ids} {delta.finish} after its end ({client.end})")
        client.tokens.extend(delta.token_ids)
        if delta.token_ids:
            self._note("token", client.engine, delta.rid)
        if client.tokens != client.expected[: len(client.tokens)] and not self._may_stream_wrong:
            raise Broken(f"I6: {delta.rid} got {client.tokens}, expected {client.expected}")
        if delta.finish is not None:
            client.end, client.error = delta.finish.value, delta.error
            self._note("end", client.engine, delta.rid, client.end)
            self.busy_steps, self.busy_frames = self.timeline.step, self.network.frame_count
            self._check_end(client, delta)

    def _check_end(self, client: SimClient, delta: TokenDelta) -> None:
        receipt = None if delta.usage is None else delta.usage.kv_integrity
        if receipt is not None and receipt.slots_checked != receipt.slots_due:
            of = f"of {receipt.slots_due} slots due for {delta.rid}"
            self._short = self._short or f"I23: {of}, {receipt.slots_checked} were checked"
        whole = client.tokens == client.expected
        if delta.finish is not FinishReason.ERROR and client.tokens != client.expected[: len(client.tokens)]:
            raise Broken(f"I6: {delta.rid} ended ({delta.finish}) with {client.tokens}, expected {client.expected}")
        shape = self.engines[client.engine].shape
        pool = min((shape.pages - 1) * shape.page_size, self.scenario.shape.context_length)
        full = delta.finish is FinishReason.LENGTH and len(client.work.prompt) + len(client.tokens) == pool
        if delta.finish in (FinishReason.STOP, FinishReason.LENGTH) and not whole and not full:
            raise Broken(f"I7: {delta.rid} ended ({delta.finish}) with {client.tokens}, expected {client.expected}")
        if delta.finish is FinishReason.ABORT and not client.cancelled:
            raise Broken(f"I7: {delta.rid} was aborted, and its client had not left: {delta.error}")
        if self._may_fail and "KV integrity" in delta.error:
            return
        if client.work.timeout_s and delta.error_status == 504:
            self.counts["deadlines"] += 1
            return
        if delta.finish is FinishReason.ERROR and self.scenario.shape.on_failure != "error":
            raise Broken(f"I7: {delta.rid} failed: {delta.error}, expected an answer")

    @property
    def _may_fail(self) -> bool:
        """Whether a canary may end a request for what it found."""
        return self.scenario.options.damages and self.scenario.shape.mode == "raise" and not self._is_last_round

    @property
    def _may_stream_wrong(self) -> bool:
        """Whether a token may leave before the bytes that it was computed of had their turn; never with the end."""
        shape = self.scenario.shape
        return self.scenario.options.damages and shape.mode == "raise" and shape.coverage != "full"

    def _ask_again(self) -> None:
        """After calm, where KV was damaged: no prefix stays poisoned (I19). What slept in a cache may be found once
        more, in mode raise at the cost of a request; then every prompt has its answer. Raises Broken."""
        for number in range(_ROUNDS):
            self._is_last_round = number == _ROUNDS - 1
            for work in self.scenario.works:
                again = replace(work, rid=f"{work.rid}.{number}", timeout_s=0.0)
                self.clients[again.rid] = SimClient(work=again, expected=self.clients[work.rid].expected)
                self._arrive(again)
            self._rest()

    def _check_cached(self) -> None:
        """I20: no cached page is wrong that a sweep has passed, nor a stamp of one that a prompt has read since. I24:
        what was condemned is not kept where it came from. Raises Broken."""
        for engine in self.engines.values():
            asked = [work.prompt for work in self.scenario.works if work.decode == engine.name]
            wrong = engine.wrong_pages((StampLane.TAIL_K, StampLane.TAIL_V))
            if wrong := wrong + engine.wrong_pages(tuple(StampLane), asked if self._is_last_round else ()):
                raise Broken(f"I20: still cached, and wrong: {wrong}")
        if self.network.peers_lost or any(isinstance(fault, Crash | Partition) for fault in self.scenario.faults):
            return  # an engine that is not reached is not told
        for place in self.sent.kept():
            raise Broken(f"I24: still cached: {place}")

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self.counts[type(fault).__name__.lower()] += 1
        now = self.timeline.now_s
        match fault:
            case Cancel():
                self._cancel(self.clients[fault.rid])
            case Crash():
                self._crash(self.engines[fault.engine], fault.down_s)
            case Pause():
                engine = self.engines[fault.engine]
                until = max(engine.process.paused_until, now + fault.for_s)
                engine.process.paused_until = until
                self._note("paused", engine.name, until=until)
                self._healed_at = max(self._healed_at, until)
            case Partition():
                pair, silenced = (fault.source, fault.target), [self.network.blocked]
                silenced += [self.fabric.blocked] * fault.data
                for blocked in silenced:
                    blocked.add(pair)
                    self.timeline.after(fault.for_s, blocked.discard, pair)
                self._note("fault", fault.source, "", f"partition: {fault.source} to {fault.target}", now + fault.for_s)
                self._healed_at = max(self._healed_at, now + fault.for_s)

    def _cancel(self, client: SimClient) -> None:
        if client.cancelled or client.end:
            return
        client.cancelled = True
        rid = client.work.rid
        self._note("fault", client.engine or client.work.decode, rid, f"the client of {rid} leaves")
        if client.engine:
            engine = self.engines[client.engine]
            if engine.life == client.life and engine.alive:
                engine.cancel(client.work.rid)

    def _crash(self, engine: SimEngine, down_s: float) -> None:
        if not engine.alive:
            return
        engine.kill()
        for client in self.clients.values():
            if client.engine == engine.name and client.life == engine.life and not client.end:
                client.end = "lost"
                self._note("end", engine.name, client.work.rid, "lost")
        self._healed_at = max(self._healed_at, self.timeline.now_s + down_s)
        self.timeline.after(down_s, engine.boot)

    # ---- running ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work and faults, then calm, then the account. Raises what it finds."""
        last = max([work.at for work in self.scenario.works] + [0.0])
        last_fault = max([fault.at for fault in self.scenario.faults] + [last])
        while not self.network.calm:
            self._advance()
            now = self.timeline.now_s
            if now > last_fault and now >= self._healed_at and (now > last_fault + 3.0 or self.quiet):
                self._make_calm()
        self._rest()
        if self.scenario.options.damages:
            self._advance_for(SWEEP_S)
            self._check_cached()
            self._ask_again()
            self._check_cached()
        self.final_check()

    def _advance_for(self, seconds: float) -> None:
        """So much virtual time, and a little more where something is under way at its end."""
        until = self.timeline.now_s + seconds
        while self.timeline.now_s < until or (not self.quiet and self.timeline.now_s < until + _REST_S):
            self._advance()

    def _rest(self) -> None:
        """Until every client has its end. Raises Broken."""
        end = self.timeline.now_s + _CALM_S_MAX
        while not self.quiet:
            if self.timeline.now_s > end:
                raise Broken(f"I10: not at rest {_CALM_S_MAX} s after the last fault: {self.unrest()}")
            self._advance()

    @property
    def _kind(self) -> bool:
        """Nothing happens in this scenario but what a network does to frames (I16)."""
        options = self.scenario.options
        cancels_only = all(isinstance(fault, Cancel) for fault in self.scenario.faults)
        return (
            cancels_only
            and not options.damages
            and not options.corrupt
            and not options.lose_piece
            and not options.lose_op
        )

    def check_failures(self) -> None:
        """I16: loss, repetition and reordering change only timing: no handoff may fail for them. Raises Broken."""
        if not self._kind:
            return
        has_timeouts = any(work.timeout_s for work in self.scenario.works)
        allowed = {"decode failed: timeout"} if has_timeouts else set()  # prefill cannot end it in time
        failed = {
            name: count
            for name, count in self.totals().items()
            if name.startswith("decode failed") and count and name not in allowed
        }
        if failed or self.network.peers_lost:
            lost = dict(self.network.peers_lost)
            raise Broken(f"I16: frames were only lost, repeated or reordered, but {failed} failed, {lost} were lost")
        for engine in self.engines.values():
            if missed := engine.port.machine.rejects["below_floor"]:
                raise Broken(f"I16: {engine.name} missed the ends of {missed} handoffs; the grant floor cleaned up")

    def _make_calm(self) -> None:
        self.network.calm = self.fabric.calm = True
        self.network.blocked.clear()
        self.fabric.blocked.clear()
        for engine in self.engines.values():
            engine.process.wake()

    def _advance(self) -> None:
        for fault in self._by_step.pop(self.timeline.step, ()):
            self._strike(fault)
        if not self.timeline.advance():
            raise Broken("sim: nothing will ever happen again")
        if self.timeline.step > _STEPS_MAX:
            raise Broken(f"I10: no rest after {_STEPS_MAX} events: {self.unrest()}")
        if self.timeline.step % _CHECK_EVERY == 0:
            self.check()

    @property
    def quiet(self) -> bool:
        """Every client has its end and no engine has anything to do."""
        return (
            all(client.end for client in self.clients.values())
            and all(engine.alive and engine.idle for engine in self.engines.values())
            and self.shared.idle
        )

    def unrest(self) -> str:
        """What still has something to do, in words."""
        clients = [rid for rid, client in self.clients.items() if not client.end]
        engines = [
            f"{e.name}: alive {e.alive}, {e.scheduler.stats()}, {e.port.machine.handoff_count} handoffs"
            for e in self.engines.values()
            if not e.alive or not e.idle
        ]
        return f"clients {clients}; {engines}; {self.shared.unrest()}"

    def totals(self) -> dict[str, int]:
        """What happened, by name: faults, handoffs landed and failed by reason, late frames."""
        counts = self.counts.copy()
        counts["quarantined"] = self.network.quarantined
        counts["pieces lost"] = self.network.pieces_lost
        counts["late writes"] = self.fabric.late_count
        counts.update({f"damaged: {kind}": count for kind, count in self.network.damaged.items()})
        counts["operations lost"] = self.fabric.lost_count
        for engine in self.engines.values():
            for name, value in engine.counts().items():
                counts[name] += value
        return dict(counts)

    # ---- the account ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold between any two events. Only its own turns change what an engine has decided."""
        for engine in self.engines.values():
            if engine.alive and engine.engine.turns != engine.checked_turns:
                engine.checked_turns = engine.engine.turns
                engine.scheduler.sanity_check()

    def final_check(self) -> None:
        """After calm: nothing is held, nothing is left (I11, I12); every rank has obeyed the whole line (I13). Raises
        Broken."""
        self._advance_for(3.0)  # a rank may just now be told that a killed peer was given up
        if not self.quiet:
            raise Broken(f"I10: not at rest any more: {self.unrest()}")
        self.check_failures()
        if self._short:
            raise Broken(self._short)
        for engine in self.engines.values():
            engine.scheduler.sanity_check()
            self._check_pages(engine)
            if left := engine.leftovers():
                raise Broken(f"I12: {engine.name} still has {left}, expected nothing")
            for rank, number in enumerate(engine.links.obeyed[1:], 1):
                if number != engine.line.headers:
                    raise Broken(
                        f"I13: rank {rank} of {engine.name} has obeyed {number} headers of {engine.line.headers}"
                    )

    def _check_pages(self, engine: SimEngine) -> None:
        """I12: what is not retired is free, before and after a flush."""
        engine.cache.release_all_quarantined()
        for is_flushed in (False, True):
            if is_flushed:
                engine.cache.reset()
            for part, count in engine.pages.items():
                whole = count - 1 - engine.cache.ledgers[Tier.DEVICE, part].counts().retired
                left = whole - (engine.cache.free(part) if is_flushed else engine.cache.available(part))
                if left:
                    raise Broken(
                        f"I12: {engine.name} still uses {left} pages of part {part.name} (flushed: {is_flushed})"
                    )


@contextmanager
def _silence() -> Iterator[None]:
    """The engines of a run fail all the time, on purpose: their log lines tell nothing."""
    logger = logging.getLogger("serinus")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def run(scenario: Scenario, moments: list[Moment] | None = None) -> Run:
    """One scenario from beginning to end; without the log lines of its engines (for those: `Cluster(scenario).run()`,
    which raises what it finds). `moments`: what happens is appended to it."""
    with _silence():
        return _run(scenario, moments)


def _run(scenario: Scenario, moments: list[Moment] | None) -> Run:
    finding: Finding | None = None
    cluster = Cluster(scenario, moments)
    try:
        cluster.run()
    except (AssertionError, SerinusError, LookupError, ValueError, TypeError, AttributeError) as error:
        finding = Finding(
            kind=type(error).__name__, text=str(error), at=cluster.timeline.now_s, step=cluster.timeline.step
        )
    ends: dict[str, int] = {}
    for client in cluster.clients.values():
        ends[client.end] = ends.get(client.end, 0) + 1
    return Run(
        finding=finding, steps=cluster.timeline.step, frames=cluster.network.frame_count,
        seconds=cluster.timeline.now_s, ends=ends, busy_steps=cluster.busy_steps, busy_frames=cluster.busy_frames,
        counts=cluster.totals(),
    )  # fmt: skip
