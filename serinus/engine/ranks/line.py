"""Line: the leader's ordered line to all ranks, as those who give orders see it. A protocol; pure.

Whatever touches a rank's pages comes down this line and is obeyed in its order, so that a page which is free on the
leader may be given out at once: on every rank its old reader comes before its new writer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Line"]


class Line(Protocol):
    """Orders go down to the ranks, the leader's own included; answers come back."""

    @property
    def size(self) -> int:
        """How many ranks."""
        ...

    def order(self, order: object, rank: int | None = None) -> None:
        """Append: all ranks obey it (or `rank` alone), after all that was ordered before. It leaves with the next
        header, or the next pump."""
        ...

    def subscribe(self, body_type: type, take: Callable[[int, Any], None]) -> None:
        """Answers of this type, with the rank that gave them, are handed to `take`; inside `pump` alone."""
        ...

    def pump(self, wait_s: float = 0.0) -> None:
        """Send what waits, then hand out the answers that have come; where there are none, wait so long for one.

        Raises where a rank is lost or has failed, so that nobody waits for it for ever.
        """
        ...
