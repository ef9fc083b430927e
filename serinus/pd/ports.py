"""The border between the pure machines and the world: what the ports of both roles do alike.

A port posts messages, has its engine's ranks move pages (crew.py), and hands the rest to the engine. One per engine and
role, on the leader; everything happens in the caller's thread, inside `poll` and `handle`. decode_port.py and
prefill_port.py are the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeAlias, TypeVar

from serinus.core.clock import Clock
from serinus.core.errors import ConfigError, TransferFailed
from serinus.core.ids import new_xid
from serinus.pd.actions import AttachPeer
from serinus.pd.backends import Backend, OneSided, OpState
from serinus.pd.crew import Crew, LocalCrew
from serinus.pd.decode import DecodeSide
from serinus.pd.events import PeerLost, Received, Tick
from serinus.pd.hand import Hand
from serinus.pd.layout import RankLayout
from serinus.pd.modes import Mode
from serinus.pd.orders import HandAnswer, LeavePeer
from serinus.pd.prefill import PrefillSide
from serinus.pd.pulse import Pace
from serinus.pd.reach import Reach
from serinus.pd.settings import PdSettings
from serinus.pd.stores import Stores, StoresOf
from serinus.wire import Letter, Post

__all__ = ["MOVING_S", "TICK_S", "AnyBackend", "Port", "frame_backends"]

TICK_S = 0.25
"""An idle loop polls at least this often."""
MOVING_S = 0.001
"""...and this often while operations of a one-sided backend are under way: nothing wakes it when they end."""

OFFENCES = frozenset({"bad_data", "repeated_grant", "repeated_xid", "second_hello", "unexpected", "wrong_peer"})
"""Reasons for which a machine drops a message that no peer sends who keeps to the protocol, however late it comes."""
OFFENCES_MAX = 8
"""A peer that sends so many over one connection is given up."""

AnyBackend: TypeAlias = Backend | OneSided

Event = TypeVar("Event")
Result = TypeVar("Result")
Token = TypeVar("Token")


class Port(ABC, Generic[Event, Result, Token]):
    """Takes letters and answers in turn, tells the machine the time, watches operations, counts."""

    machine: DecodeSide | PrefillSide

    def __init__(
        self, settings: PdSettings, *, post: Post, backends: Sequence[AnyBackend], clock: Clock,
        store: StoresOf | None = None, crew: Crew | None = None,
        follower_backends: Sequence[Sequence[OneSided]] = (), mint: Callable[[], str] = new_xid,
    ) -> None:  # fmt: skip
        """`store`: the pages of all ranks, where this thread may touch them (see StoresOf); else `crew`: the ranks that
        touch their own, which takes `backends` that move frames; `follower_backends`: those of ranks 1, 2..., where
        one-sided ones are used and one thread stands for all ranks; `mint`: names and nonces, never the same twice."""
        _check(settings, backends)
        self._post = post
        layout = RankLayout(settings.layout)
        self._stores = Stores(layout, store) if store is not None else None
        one_sided = [{b.name: b for b in backends if not _moves_frames(b)}]
        one_sided.extend({b.name: b for b in others} for others in follower_backends)
        self._reach: Reach[Token] = Reach(one_sided if one_sided[0] else [])  # type: ignore[arg-type]
        if self._stores is not None:
            self._reach.register(self._stores)
        elif one_sided[0]:
            raise ConfigError(
                f"pd: backend {backends[0].name!r} reaches into pools from outside, which the ranks of an engine with"
                " several cannot allow; expected shm or tcp there"
            )
        self._crew = crew if crew is not None else self._own_crew(layout, backends, clock)
        if self._crew.size != len(layout.shards):
            raise ConfigError(f"pd: a crew of {self._crew.size} ranks, the layout has {len(layout.shards)}")
        self.settings = replace(settings, endpoints={**settings.endpoints, **self._reach.endpoints})
        self._mint = mint
        self._clock = clock
        self._pace = Pace()
        self._ticked_at = -1.0
        self._peers: dict[str, AttachPeer] = {}
        self._offences = 0
        self._blamed: Counter[str] = Counter()
        """Messages without sense, by peer."""

    def _own_crew(self, layout: RankLayout, backends: Sequence[AnyBackend], clock: Clock) -> Crew:
        if self._stores is None:
            raise ConfigError("pd: neither stores nor a crew, expected one of them")
        movers = frame_backends(backends)
        return LocalCrew(
            [
                Hand(rank, layout=layout, stores=stores, backends=movers, clock=clock)
                for rank, stores in enumerate(self._stores.by_rank)
            ]
        )

    def poll(self, timeout_s: float, *, load: int = 0, turn: int = 0) -> list[Result]:
        """Wait up to timeout_s for news (0 = do not wait), deal with it, and return what the engine must act on.

        `load`, `turn`: see events.Tick. Where this thread stands for all ranks, pages that came are copied in here:
        that is the time it takes.
        """
        out: list[Result] = []
        self._pace.look(self._clock.now())
        self._crew.look()
        self._run_all(self._told(self._crew.poll()), out)
        for item in self._post.poll(min(timeout_s, MOVING_S) if self._reach.is_busy else timeout_s):
            if isinstance(item, Letter):
                event: Received | PeerLost = Received(
                    peer=item.peer, incarnation=item.incarnation, message=item.message, payload=item.payload
                )
            else:
                self._leave(item.peer)
                event = PeerLost(peer=item.peer, reason=item.reason)
            rejected = self.machine.rejects.total()
            self._run(event, out)
            if self.machine.rejects.total() > rejected:
                self._blame(item.peer, out)
        if self._reach.is_busy:
            self._reap(out)
        now = self._clock.now()
        if now - self._ticked_at >= TICK_S / 2:
            self._ticked_at = now
            self._run(Tick(load=load, turn=turn, step_s=self._pace.longest_s), out)
        self._post.flush()
        return out

    def handle(self, event: Event) -> list[Result]:
        """Give the machine an event of the engine; chunks that were computed are ordered to be copied out here."""
        out: list[Result] = []
        self._run(event, out)
        return out

    @property
    def rejects(self) -> Counter[str]:
        """Frames refused and messages dropped without effect, by reason."""
        return self._post.rejects + self.machine.rejects

    @property
    def resent_count(self) -> int:
        """Frames that were sent again."""
        return self._post.resent_count

    @property
    def wait_s(self) -> float:
        """Poll again within this: TICK_S, or less where something is under way whose end wakes nobody."""
        if self._crew.has_news:
            return 0.0
        return MOVING_S if self._reach.is_busy else TICK_S

    def close(self) -> None:
        """End all connections; give Shutdown first, so that the peers hear of it."""
        for peer in list(self._peers):
            self._leave(peer)
        self._crew.close()
        self._post.close()
        self._reach.close()

    def _run(self, event: Event | Received | PeerLost | Tick, out: list[Result]) -> None:
        """Give one event to the machine, and perform what it asks. What ranks answer at once comes next."""
        events: deque[Event | Received | PeerLost | Tick] = deque((event,))
        while events:
            self._perform(events.popleft(), events, out)
            if answers := self._crew.poll():
                events.extend(self._told(answers))

    def _run_all(self, events: Sequence[Event], out: list[Result]) -> None:
        for event in events:
            self._run(event, out)

    def _told(self, answers: Sequence[HandAnswer]) -> list[Event]:
        """What ranks have answered, as events."""
        return [event for answer in answers if (event := self._answered(answer)) is not None]

    def _reap(self, out: list[Result]) -> None:
        """Operations that are over are reported. Where one was lost its peer is given up first: decode fences then, and
        holds its pages until that is done, so whatever still moves harms nobody."""
        for item in self._reach.poll():
            if item.result.state is OpState.LOST:
                self._lost(item.peer, item.result.error, out)
            error = "" if item.result.state is OpState.DONE else item.result.error or "it failed"
            self._run(self._report(item.token, error), out)

    def _blame(self, peer: str, out: list[Result]) -> None:
        """Something of it was rejected. Where every frame of it is sound, and what they say is what no sound peer ever
        sends, it is given up after a few of them."""
        offences = sum(self.machine.rejects[reason] for reason in OFFENCES)
        if offences == self._offences:
            return
        self._offences = offences
        self._blamed[peer] += 1
        if self._blamed[peer] >= OFFENCES_MAX and peer in self._peers:
            self._give_up(peer, f"pd: {OFFENCES_MAX} messages that make no sense", out)

    def _lost(self, peer: str, error: str, out: list[Result]) -> None:
        if peer in self._peers:
            self._give_up(peer, error, out)

    def _give_up(self, peer: str, reason: str, out: list[Result]) -> None:
        self._leave(peer)
        self._post.disconnect(peer)
        self._run(PeerLost(peer=peer, reason=reason), out)

    def _attach(self, action: AttachPeer) -> tuple[PeerLost, ...]:
        """Join the data backend of a peer; where that fails the peer is given up, and said to be lost."""
        self._peers[action.peer] = action
        if not self._reach.has(action.backend):
            return ()
        try:
            self._reach.join(action.peer, action.backend, action.endpoints)
        except TransferFailed as error:
            self._leave(action.peer)
            self._post.disconnect(action.peer)
            return (PeerLost(peer=action.peer, reason=str(error)),)
        return ()

    def _leave(self, peer: str) -> None:
        """Every rank gives back what it has for the peer, once it has done what it was told before."""
        self._blamed.pop(peer, None)
        if self._peers.pop(peer, None) is not None:
            self._reach.leave(peer)
            for rank in range(self._crew.size):
                self._crew.order(rank, LeavePeer(peer=peer))

    def _pool(self) -> Stores:
        """For one-sided backends: the pages of all ranks."""
        assert self._stores is not None, "pd: a one-sided backend without stores, expected a ConfigError at birth"
        return self._stores

    @abstractmethod
    def _report(self, token: Token, error: str) -> Event:
        """The event that says that an operation is over."""

    @abstractmethod
    def _answered(self, answer: HandAnswer) -> Event | None:
        """The event that an answer of a rank makes; None = none yet."""

    @abstractmethod
    def _perform(
        self, event: Event | Received | PeerLost | Tick, events: deque[Event | Received | PeerLost | Tick],
        out: list[Result],
    ) -> None:  # fmt: skip
        """Give one event to the machine and do what it asks; what happens meanwhile is appended to `events`."""


def frame_backends(backends: Sequence[AnyBackend]) -> list[Backend]:
    """Those whose bytes a hand stages and takes in."""
    return [backend for backend in backends if _moves_frames(backend)]  # type: ignore[misc]


def _moves_frames(backend: AnyBackend) -> bool:
    return backend.capabilities.mode is Mode.RECEIVER_CHECKED


def _check(settings: PdSettings, backends: Sequence[AnyBackend]) -> None:
    names = tuple(backend.name for backend in backends)
    if names != settings.backends:
        raise ConfigError(f"pd: settings name the backends {settings.backends}, expected {names}, those given")
    for backend in backends:
        said = settings.capabilities_of(backend.name)
        if said != backend.capabilities:
            raise ConfigError(f"pd: settings say {said} of {backend.name}, expected {backend.capabilities}")
