"""`--max-queued-by-priority`: what it means, and what is refused."""

from __future__ import annotations

import pytest

from serinus.core.errors import ConfigError
from serinus.core.queue_bounds import bounds_by_priority
from serinus.core.settings import ScheduleSettings


def test_pairs_are_priorities_and_counts() -> None:
    assert bounds_by_priority(("0=32", "-5=8", "7=0")) == {0: 32, -5: 8, 7: 0}


@pytest.mark.parametrize("pair", ["5", "=8", "5=", "a=1", "5=-1", "5=1.5", "0=32,5=8"])
def test_what_is_no_pair_is_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match="--max-queued-by-priority has"):
        ScheduleSettings(schedule_policy="priority", max_queued_by_priority=(pair,))


def test_one_priority_twice_and_another_policy_are_refused() -> None:
    with pytest.raises(ConfigError, match="the priority 5 twice"):
        bounds_by_priority(("5=8", "5=9"))
    with pytest.raises(ConfigError, match="expected --schedule-policy priority"):
        ScheduleSettings(max_queued_by_priority=("5=8",))
    with pytest.raises(ConfigError, match=r"--priority-ageing is 5\.0 with --schedule-policy lpm"):
        ScheduleSettings(schedule_policy="lpm", priority_ageing_s=5.0)
