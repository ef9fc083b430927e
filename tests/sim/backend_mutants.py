"""Mutants of the data backends (when is an operation over, what does a fence end, when are staged bytes given up), and
of what makes an engine from its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from serinus.core.rng import Rng
from serinus.pd.backends import CudaIpcBackend, MooncakeBackend, NixlBackend, OpResult, OpState, Staged
from serinus.pd.backends.holds import SharedHolds
from serinus.pd.backends.shm import _ShmSender
from serinus.pd.decode_table import DecodeTable
from serinus.pd.layout import Cut, RankLayout
from serinus.pd.registry import Registry
from serinus.pd.slices import Slice
from serinus.sim import Scenario, draw
from serinus.sim.one_sided import SimAgent, SimTransferEngine
from serinus.sim.options import Options, Partition
from tests.sim.canary_mutants import damaged
from tests.sim.hunting import mutant, replaced, unchecked


def _over_at_once(backend: type[CudaIpcBackend] | type[NixlBackend] | type[MooncakeBackend]) -> Iterator[None]:
    """Completion is reported before the bytes have moved."""
    poll = backend.poll

    def polled(self: Any, op: int) -> OpResult:
        result = poll(self, op)
        return OpResult(state=OpState.DONE) if result.state is OpState.PENDING else result

    with replaced(backend, "poll", polled):
        yield


mutant("a read is over when it has begun", "pull", says="I2:")(partial(_over_at_once, NixlBackend))
mutant("a gather is over when it was queued", "ipc", says="I2:")(partial(_over_at_once, CudaIpcBackend))
mutant("a write is over when it was handed on", "push", says="I4:")(partial(_over_at_once, MooncakeBackend))


@mutant("a read that failed is over", "pull", says="I2:")
def failed_read_over() -> Iterator[None]:
    """The agent lives on, and with it the pieces of the read that are still under way."""
    check, poll = SimAgent.check_xfer_state, NixlBackend.poll
    failed: list[str] = []

    def checked(self: SimAgent, handle: Any) -> str:
        state = check(self, handle)
        if state == "ERR":
            failed.append(state)
            return "PROC"
        return state

    def polled(self: NixlBackend, op: int) -> OpResult:
        failed.clear()
        result = poll(self, op)
        return OpResult(state=OpState.FAILED, error=failed[0]) if failed else result

    with replaced(SimAgent, "check_xfer_state", checked), replaced(NixlBackend, "poll", polled):
        yield


@mutant("memory is let go while it is read", "ipc", says="is let go while it is read")
def let_go_early() -> Iterator[None]:
    """A read under way does not keep the memory of its peer open."""
    begin = CudaIpcBackend._begin

    def reads(self: CudaIpcBackend, *rest: Any) -> int:
        op = begin(self, *rest)
        known = self._reads[op].peer
        self._let_go(known.process, known.handles)
        self._reads[op] = replace(self._reads[op], peer=replace(known, handles=()))
        return op

    with replaced(CudaIpcBackend, "_begin", reads):
        yield


def _unequal(seed: int) -> Scenario:
    return draw(seed, backend="ipc", unequal=True)


@mutant("a slice is read when it was queued", world=_unequal, says="I6:")
def sliced_at_once() -> Iterator[None]:
    """...and its sums are those of the owner."""
    with unchecked():
        yield from _over_at_once(CudaIpcBackend)


@mutant(
    "a rank fills the heads of its neighbour",
    world=lambda seed: draw(seed, backend="ipc", unequal=True, latent=False),
    says="I6:",
)
def other_heads() -> Iterator[None]:
    """Its slices are whole rows, of which it has a part."""
    import serinus.pd.stores as stores

    original = stores.slices

    def shifted(source: RankLayout, target: RankLayout, item: Cut) -> tuple[Slice, Slice]:
        theirs, ours = original(source, target, item)
        return replace(theirs, start=0), replace(ours, start=0)

    with replaced(stores, "slices", shifted):
        yield


def outlasting(seed: int, backend: str) -> Scenario:
    """Reads go on after prefill has given a decode engine up, which does not know yet, as it hears nothing; prompts of
    another one take the pages meanwhile."""
    rng = Rng(seed).split("outlasting")
    scenario = draw(seed, backend=backend, slides=False, canary="", unequal=False)
    works = [replace(rng.choice(scenario.works), rid=f"r{index}", prefill="p0") for index in range(12)]
    early = [replace(work, decode="d0", at=round(rng.random() * 0.2, 3)) for work in works[:4]]
    late = [replace(work, decode="d1", at=round(5.0 + rng.random() * 3.0, 3)) for work in works[4:]]
    later = round(0.5 + 4.0 * rng.random(), 3)
    silence = tuple(
        Partition(source=source, target=target, at=at, for_s=9.0, data=False)
        for source, target, at in (("d0", "p0", 0.3), ("p0", "d0", later))
    )
    options = Options(delay_s=0.01, write_late_s=9.0)
    return replace(scenario, works=(*early, *late), faults=silence, options=options)


def _outlasting(backend: str) -> dict[str, Any]:
    """What a mutant says of such worlds."""
    return {"world": partial(outlasting, backend=backend), "says": "I6:"}


def _without_sums(owner: type, name: str, value: Any) -> Iterator[None]:
    """A patch, where sums of what was read are not compared."""
    with unchecked(), replaced(owner, name, value):
        yield


@mutant("neither sums nor hold nor CONFIRM", **_outlasting("ipc"))
@mutant("neither digests nor CONFIRM", **_outlasting("pull"))
def trusting() -> Iterator[None]:
    """A read that ended well is believed: it always does."""
    yield from _without_sums(DecodeTable, "_is_held", lambda self, handoff: True)


@mutant("no sums, and a hold outlives its connection", **_outlasting("ipc"))
def everlasting() -> Iterator[None]:
    """Prefill gives pages up, and their hold says that it has not."""
    yield from _without_sums(SharedHolds, "end", lambda self, hold: None)


@mutant("no sums, and a hold is looked at when its connection begins", **_outlasting("ipc"))
def looked_early() -> Iterator[None]:
    """...and not when the reads have ended."""
    found: dict[str, bool] = {}
    lasts = SharedHolds.lasts

    def held(self: SharedHolds, hold: str) -> bool:
        return found.setdefault(hold, lasts(self, hold))

    welcome = Registry.welcome

    def greeted(self: Registry, peer: Any, *rest: Any) -> bool:
        done = welcome(self, peer, *rest)
        for holds in self._settings.holds.values():
            holds.lasts(peer.hold)
        return done

    with replaced(Registry, "welcome", greeted):
        yield from _without_sums(SharedHolds, "lasts", held)


@mutant(
    "a read into rows is over when it has begun",
    world=lambda seed: draw(seed, backend="pull", unequal=True),
    says="I6:",
)
def rows_over_at_once() -> Iterator[None]:
    """...and nothing compares what is there with what was sent."""
    with unchecked():
        yield from _over_at_once(NixlBackend)


@mutant("a write that failed is over", "push", says="I2:")
def failed_write_over() -> Iterator[None]:
    """Some of its bytes are still on their way."""
    poll = MooncakeBackend.poll

    def polled(self: MooncakeBackend, op: int) -> OpResult:
        result = poll(self, op)
        return OpResult(state=OpState.FAILED, error=result.error) if result.state is OpState.LOST else result

    with replaced(MooncakeBackend, "poll", polled):
        yield


@mutant("a fence that keeps the old engine", "push", says="I2:")
def engine_kept() -> Iterator[None]:
    """Something still refers to it, so its connections are not closed."""
    initialize, kept = SimTransferEngine.initialize, []

    def initialized(self: SimTransferEngine, *settings: str) -> int:
        kept.append(self)
        return initialize(self, *settings)

    with replaced(SimTransferEngine, "initialize", initialized):
        yield


@mutant("staged bytes are given up before they were fetched", "shm", "tcp", says="I16:")
def staged_given_up() -> Iterator[None]:
    """The place of a piece in the sender's area is handed out again at once."""
    from serinus.pd.backends.tcp import _TcpSender

    def stage(sender: Any) -> Any:
        stage, release = sender.stage, sender.release

        def staged(self: Any, byte_count: int) -> Staged | None:
            found: Staged | None = stage(self, byte_count)
            if found is not None:
                release(self, found.key)
            return found

        return staged

    with (
        replaced(_ShmSender, "stage", stage(_ShmSender)),
        replaced(_ShmSender, "release", lambda self, key: None),
        replaced(_TcpSender, "stage", stage(_TcpSender)),
        replaced(_TcpSender, "release", lambda self, key: None),
    ):
        yield


@mutant("an engine is made without the end of an answer", says="I6:")
def no_end() -> Iterator[None]:
    """What the model says of its last token does not reach the scheduler."""
    import serinus.engine.planning as planning

    settings = planning.SchedSettings
    with replaced(planning, "SchedSettings", lambda **more: settings(**{**more, "eos_ids": ()})):
        yield


@mutant("an engine is made without the check of arrivals", world=damaged, says="I23:")
def no_check_of_arrivals() -> Iterator[None]:
    """The canary is there, and its role does not know."""
    import serinus.engine.build as build

    parts = build.HandoffParts
    with replaced(build, "HandoffParts", lambda **more: parts(**{**more, "arrived": None})):
        yield
