"""plan(): a pure function from what was seen of a group of engines to how many of each role there should be.

It turns what each role has to do into a *load*, in engines that would be wholly taken by it:

- decode (or engines that do both): how full KV and request slots are, and the waiting requests, each as large as those
  that run are on average;
- prefill: the share of time spent in steps, and the waiting prompts; at least what the load of decode engines calls for
  by the ratio of the two over the last minutes, so that both follow a wave of requests at once.

Engines are added when the load would fill them by more than `full` all through the last `up_s` seconds, and taken away
when it would have filled fewer by less than `spare` all through the last `down_s` seconds. As `spare` is below `full`,
a steady load never makes it go to and fro. Knows no clock, no HTTP, nothing of where engines run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

_BIG_REQUEST = 1 / 8
"""The part of an engine that a waiting prompt is taken to need, and a waiting request where none runs to measure by."""
_IDLE = 0.05
"""Less load than this says nothing of the ratio of the roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many engines of a role there may be."""

    low: int
    """At least so many."""
    high: int
    """At most so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePace:
    """How soon a change is answered."""

    up_s: float = 10.0
    """A need for more engines must last so long."""
    down_s: float = 300.0
    """A need for fewer must last so long; `up_s` where the other role has engines that no node has room for."""
    full: float = 0.75
    """More engines where these would be filled by more than this."""
    spare: float = 0.6
    """Fewer where so many would be filled by less than this."""
    ratio_s: float = 300.0
    """The ratio of prefill to decode work is a mean over about this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSeen:
    """The engines of one role at one moment."""

    wanted: int
    """There are so many, or will be; those that are being drained are not counted."""
    ready: int
    """Of those, the ones that take requests. The means below are over them."""
    running_reqs: int = 0
    """Requests that they compute, and those that have pages and wait for a peer."""
    queue_reqs: int = 0
    """Requests that wait for them."""
    usage: float = 0.0
    """How full an engine is: its KV or its request slots, whichever is fuller, 0 to 1."""
    busy: float = 0.0
    """Share of the time in steps, 0 to 1."""
    unplaced: int = 0
    """Of those wanted, the ones that no node has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All engines at one moment."""

    at_s: float
    prefill: RoleSeen
    decode: RoleSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one decision leaves to the next."""

    began_s: float | None = None
    """When the first look was."""
    ratio: float | None = None
    """Prefill work for each unit of decode work."""
    loads: tuple[tuple[float, float, float], ...] = ()
    """(time, load of prefill, load of decode) of the looks in the last `down_s` seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many engines there should be, and why that is another number than before."""

    prefill: int
    decode: int
    why: tuple[str, ...] = ()
    """A sentence for each role that changes."""
    memory: Memory = field(default_factory=Memory)


def plan(seen: Seen, memory: Memory, *, prefill: Bounds, decode: Bounds, pace: ScalePace = ScalePace()) -> Decision:
    """Decide from one more look; `memory` is that of the last decision. The same arguments give the same decision."""
    memory = _remember(seen, memory, pace)
    roles = (("prefill", seen.prefill, seen.decode, prefill, 1), ("decode", seen.decode, seen.prefill, decode, 2))
    counts, why = [], []
    for name, role, other, bounds, column in roles:
        count = min(max(_target(seen.at_s, role, other, memory, column, pace), bounds.low), bounds.high)
        counts.append(count)
        if count != role.wanted:
            load = memory.loads[-1][column] if memory.loads else 0.0
            why.append(
                f"{name} {role.wanted} -> {count}: load {load:.2f} engines, {role.queue_reqs} waiting,"
                f" usage {role.usage:.0%}, busy {role.busy:.0%}"
            )
    return Decision(prefill=counts[0], decode=counts[1], why=tuple(why), memory=memory)


def _remember(seen: Seen, memory: Memory, pace: ScalePace) -> Memory:
    """The memory with one more look; where no engine could be looked at, there was none."""
    began = seen.at_s if memory.began_s is None else memory.began_s
    waiting_for_prefill = seen.prefill.wanted > 0 and not seen.prefill.ready
    if not seen.decode.ready or waiting_for_prefill:
        return Memory(began_s=began, ratio=memory.ratio, loads=memory.loads)
    decode = _decode_load(seen.decode)
    own = seen.prefill.ready * seen.prefill.busy + seen.prefill.queue_reqs * _BIG_REQUEST
    ratio = memory.ratio
    if decode > _IDLE and seen.prefill.ready:
        now = own / decode
        step = seen.at_s - memory.loads[-1][0] if memory.loads else 0.0
        ratio = now if ratio is None else ratio + (now - ratio) * min(1.0, step / pace.ratio_s)
    follows = min((ratio or 0.0) * decode, 2 * own + _IDLE)  # a ratio of other times does not invent work
    look = (seen.at_s, max(own, follows), decode)
    kept = tuple(each for each in memory.loads if each[0] > seen.at_s - pace.down_s - pace.up_s)
    return Memory(began_s=began, ratio=ratio, loads=(*kept, look))


def _decode_load(role: RoleSeen) -> float:
    taken = role.ready * role.usage
    each = taken / role.running_reqs if role.running_reqs else _BIG_REQUEST
    return taken + role.queue_reqs * each


def _target(now: float, role: RoleSeen, other: RoleSeen, memory: Memory, column: int, pace: ScalePace) -> int:
    def needs(last_s: float, fill: float, choose: Callable[[list[int]], int]) -> int | None:
        """The smallest or largest need of the last seconds; None = they have not been looked at all through."""
        if not memory.loads or memory.began_s is None or memory.began_s > now - last_s:
            return None
        loads = [look[column] for look in memory.loads if look[0] >= now - last_s]
        return choose([math.ceil(load / fill - 1e-9) for load in loads]) if loads else None

    more = needs(pace.up_s, pace.full, min)
    if more is not None and more > role.wanted:
        return max(role.wanted, min(more, 2 * max(role.ready, 1)))  # those that start have not helped yet
    fewer = needs(pace.up_s if other.unplaced else pace.down_s, pace.spare, max)
    if fewer is not None and fewer < role.wanted:
        return fewer
    return role.wanted
