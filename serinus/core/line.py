"""The leader's ordered line of commands to the ranks of its engine, as its users see it. A protocol; plain data passes.

Whatever touches a rank's pages comes down this line and is obeyed in its order, so a page that is free on the leader
may be given out again at once: on every rank its earlier reader stands before its new writer. `ranks` implements it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class CommandLine(Protocol):
    """Commands go down to the ranks, the leader's own included; answers come back."""

    @property
    def size(self) -> int:
        """Number of ranks, the leader included."""

    def command(self, command: object, rank: int | None = None) -> None:
        """Append a command for all ranks, or for `rank` alone. Every rank obeys in the order of these calls.

        It leaves when the turn ends or at the next `pump`; nothing is done before.
        """

    def subscribe(self, answer_type: type, take: Callable[[int, Any], None]) -> None:
        """Hand answers of this type to `take(rank, answer)`. `take` is called inside `pump` only."""

    def pump(self, wait_s: float = 0.0) -> None:
        """Send the commands that wait, then hand out the answers that came; with none, wait up to `wait_s` for one.

        Raises PeerGone or InvariantError: a rank is lost or has failed; no later answer will come.
        """
