"""One engine on a Ray cluster: placed, started, watched, placed again when it is lost, drained, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serinus.cli.on_ray.actors import RankHost
from serinus.cli.on_ray.lines import ActorLines
from serinus.cli.on_ray.placement import Bundle, actor_name, bundles_of, rank_config, why_unplaced
from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError, PeerGone, SerinusError
from serinus.core.fleet_settings import side_of
from serinus.core.log import get_logger
from serinus.ranks.rank_processes import mesh_of

_log = get_logger("cli")
_BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses before an engine is placed again; the last one repeats."""
_STEADY_S: Final = 60.0
"""An engine that lived this long begins with the first pause again."""
_SAY_FIRST_S: Final = 5.0
"""An engine that waits so long for room says so."""
_SAY_EVERY_S: Final = 10.0
"""Between two lines on it."""
_LOOK_S: Final = 0.2
_HEALTH_EVERY_S: Final = 2.0
_HEALTH_S_MAX: Final = 15.0
"""An actor that does not say in this time how it is, is lost: its node stands still, or cannot be reached."""
_NAME_FREE_S_MAX: Final = 10.0
"""The name of an actor that has ended is free again within this time."""


class State(StrEnum):
    """Where an engine is in its life."""

    WAITING = "waits for room"
    STARTING = "starts"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    GONE = "gone"


async def new_actor(host: type, name: str, lines: ActorLines, **options: Any) -> Any:
    """A named actor, with its lines on the terminal. Raises ConfigError where the name stays taken: by another group of
    this namespace."""
    for _ in range(int(_NAME_FREE_S_MAX / _LOOK_S)):
        try:
            actor = ray.remote(host).options(name=name, max_restarts=0, **options).remote(name)
        except ValueError:  # the name is that of one that ends just now, or of another group
            await asyncio.sleep(_LOOK_S)
        else:
            lines.follow(actor, name)
            return actor
    raise ConfigError(
        f"cli: an actor {name!r} is in this namespace of the cluster already, expected none: give another"
        f" --ray-namespace, or end the other group"
    )


async def end_actors(actors: list[Any], s_max: float) -> None:
    """Let hosted processes end, then the actors; those of lost nodes are not waited for."""

    async def end(actor: Any) -> None:
        try:
            async with asyncio.timeout(s_max + _HEALTH_S_MAX):
                await actor.stop.remote(s_max)
        except (RayError, TimeoutError) as err:
            _log.debug("serinus: an actor did not end its process: %s", err)  # its process ends with it
        ray.kill(actor)

    await asyncio.gather(*map(end, actors))


@dataclass(eq=False)
class RayEngine:
    """One engine; `live` is its life."""

    config: ServeConfig
    """All but its addresses."""
    gpus: bool
    clock: Clock
    lines: ActorLines
    namespace: str
    drain_s_max: float
    left_routers: Callable[[str], bool]
    """Whether no router sends requests to this URL any more."""
    state: State = State.WAITING
    url: str = ""
    nodes: list[str] = field(default_factory=list)
    """Addresses of the nodes of its stages."""
    report: dict[str, Any] = field(default_factory=dict)
    """What it said when it was ready."""
    restarts: int = 0
    why: str = ""
    """Why it was lost, or cannot be."""
    is_first: bool = True
    """The group is not ready yet: wrong settings are then the end of it. Later another node may have what one lacks."""
    no_restart: bool = False
    """Once lost it is not placed again."""
    fatal: bool = False
    """It will not be placed again: `why`."""
    _leave: asyncio.Event = field(default_factory=asyncio.Event)
    _group: PlacementGroup | None = None
    _ranks: list[Any] = field(default_factory=list)
    """Their actors, the leader first."""

    @property
    def name(self) -> str:
        """Its own, which is also that of its first actor."""
        return self.config.engine_name

    @property
    def kind(self) -> str:
        """How the planner and the flags call its role."""
        return side_of(self.config.role)

    @property
    def stays(self) -> bool:
        """Whether it counts: it is not on its way out."""
        return self.state not in (State.DRAINING, State.GONE) and not self._leave.is_set()

    def leave(self) -> None:
        """Drain it, then end it."""
        self._leave.set()

    async def live(self) -> None:
        """Until it has been drained, or cannot be."""
        while not self._leave.is_set() and not self.fatal:
            born = self.clock.now()
            try:
                if await self._place():
                    born = self.clock.now()
                    await self._start()
                    await self._watch()
            except (RayError, SerinusError) as err:
                self.why = str(err).strip().splitlines()[-1]
                wrong = isinstance(err, ConfigError) or "exit code 2 " in self.why
                self.fatal = self.no_restart or (self.is_first and wrong)
                self.state = State.LOST
            await self.end(5.0 if self.state is State.DRAINING else 0.0)
            if self.state is State.LOST and not self.fatal and not self._leave.is_set():
                self.restarts = 0 if self.clock.now() - born > _STEADY_S else self.restarts
                pause = _BACKOFF_S[min(self.restarts, len(_BACKOFF_S) - 1)]
                self.restarts += 1
                _log.warning("serinus: %s is lost (%s), placed again in %g s", self.name, self.why, pause)
                await asyncio.sleep(pause)
        self.state = State.GONE

    # ---- a place ----------------------------------------------------------------------------------------------

    async def _place(self) -> bool:
        """Wait for room, and say what is missing; False where it is not wanted any more."""
        bundles: list[Bundle] = bundles_of(self.config, gpus=self.gpus)
        self.state = State.WAITING
        self._group = placement_group(bundles, strategy="SPREAD", name=f"{self.namespace}/{self.name}")
        began = said = self.clock.now()
        while not await asyncio.to_thread(self._group.wait, _LOOK_S):
            now = self.clock.now()
            if self._leave.is_set():
                return False
            if now - said > (_SAY_EVERY_S if said > began else _SAY_FIRST_S):
                said = now
                self.why = why_unplaced(bundles, ray.nodes(), ray.available_resources())
                _log.warning("serinus: %s waits for room since %.0f s: %s", self.name, now - began, self.why)
        where = placement_group_table(self._group)["bundles_to_node_id"]
        address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        self.nodes = [address[where[number]] for number in range(len(bundles))]
        return True

    async def _start(self) -> None:
        """Start its actors and their processes. Raises RayError, SerinusError."""
        self.state, self._ranks, self.why = State.STARTING, [], ""
        _log.info("serinus: %s starts on %s", self.name, ", ".join(self.nodes))
        mesh = mesh_of(self.config)
        for rank in range(mesh.size):
            stage = mesh.pp_rank(rank)
            bundle = bundles_of(self.config, gpus=self.gpus)[stage]
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=stage)
            self._ranks.append(
                await new_actor(
                    RankHost,
                    actor_name(self.name, mesh, rank),
                    self.lines,
                    num_cpus=bundle["CPU"] / mesh.tp,
                    num_gpus=bundle.get("GPU", 0) / mesh.tp,
                    scheduling_strategy=strategy,
                )
            )
        http, meeting = await self._ranks[0].place.remote(self.nodes[0])
        starts = [
            actor.start.remote(rank_config(self.config, self.nodes, mesh, rank, http, meeting).to_json())
            for rank, actor in enumerate(self._ranks)
        ]
        reports = await asyncio.gather(*map(_result, starts))
        self.report, self.url = reports[0], str(reports[0]["url"])
        self.state = State.READY
        again = f" again, on {', '.join(self.nodes)}" if self.restarts else ""
        _log.info("serinus: %s is ready%s after %.1f s: %s", self.name, again, self.report["seconds"], self.url)

    # ---- life and end -----------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Until it is lost or has been drained. Raises RayError, SerinusError: why it is lost."""
        ends = [asyncio.ensure_future(_result(actor.ended.remote())) for actor in self._ranks]
        leave = asyncio.ensure_future(self._leave.wait())
        try:
            while not leave.done():
                await asyncio.wait([*ends, leave], timeout=_HEALTH_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    if end.done():
                        fate = end.result()
                        raise PeerGone(f"its process ended with exit code {fate.code} : {fate.last_words}")
                if not leave.done():
                    await self._ask_health()
            await self._drain()
        finally:
            for task in (*ends, leave):
                task.cancel()
            await asyncio.gather(*ends, leave, return_exceptions=True)

    async def _ask_health(self) -> None:
        try:
            async with asyncio.timeout(_HEALTH_S_MAX):
                await asyncio.gather(*(_result(actor.state.remote()) for actor in self._ranks))
        except TimeoutError:
            raise PeerGone(f"an actor gave no sign of life for {_HEALTH_S_MAX:g} s") from None

    async def _drain(self) -> None:
        """Routers send it nothing more; what it has, it answers."""
        self.state = State.DRAINING
        _log.info("serinus: %s is drained, at most %g s", self.name, self.drain_s_max)
        end = self.clock.now() + self.drain_s_max
        while self.clock.now() < end:
            if self.left_routers(self.url) and not await self._ranks[0].unfinished.remote():
                return
            await asyncio.sleep(_LOOK_S)
        _log.warning("serinus: %s still has requests after %g s, it is ended", self.name, self.drain_s_max)

    async def end(self, s_max: float) -> None:
        """End what is left of its actors, and give its place back; it lets its requests end for `s_max` seconds."""
        self.url, actors, self._ranks = "", self._ranks, []
        await end_actors(actors, s_max)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


async def _result(ref: Any) -> Any:
    return await ref
