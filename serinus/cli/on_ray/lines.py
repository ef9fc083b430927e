"""What hosted processes print, on the terminal of the command: each line with the name of its actor."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

from ray.exceptions import RayError

from serinus.core.clock import Clock
from serinus.core.log import child_line

_LAST_S: Final = 5.0
"""Actors that have ended may take this long to give their last lines."""


class ActorLines:
    """The lines of all actors of a group.

    They are asked for, not left to Ray's own log of workers: that one folds lines that repeat, and puts words before
    each of them which make a line of `--log-format json` none.
    """

    def __init__(self, log_format: str, clock: Clock) -> None:
        """`log_format`: text or json, as the processes write."""
        self._log_format = log_format
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self, actor: Any, name: str) -> None:
        """Print the lines of an actor's process from now on, until it ends."""
        task = asyncio.create_task(self._follow(actor, name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, actor: Any, name: str) -> None:
        try:
            while lines := await actor.lines.remote():
                for line in lines:
                    print(child_line(line, name, self._clock.unix(), self._log_format), file=sys.stderr, flush=True)
        except RayError:
            return  # the actor has ended, or its node has: the engine or the routers say so

    async def end(self) -> None:
        """Print what is left of actors that have ended."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_LAST_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
