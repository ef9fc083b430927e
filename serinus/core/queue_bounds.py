"""`--max-queued-by-priority`: how many requests of each priority may wait."""

from __future__ import annotations

import re
from collections.abc import Sequence

from serinus.core.errors import ConfigError


def bounds_by_priority(pairs: Sequence[str]) -> dict[int, int]:
    """How many requests may wait, by priority, of PRIORITY=COUNT. Raises ConfigError."""
    found: dict[int, int] = {}
    for pair in pairs:
        priority, _, count = pair.partition("=")
        if not re.fullmatch(r"-?[0-9]{1,10}", priority) or not re.fullmatch(r"[0-9]{1,9}", count):
            raise ConfigError(f"config: --max-queued-by-priority has {pair!r}, expected PRIORITY=COUNT, as in 5=8")
        if int(priority) in found:
            raise ConfigError(f"config: --max-queued-by-priority has the priority {int(priority)} twice")
        found[int(priority)] = int(count)
    return found
