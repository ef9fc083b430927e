"""What is too long for every day: every step of small recorded runs, all pairs of faults, for all ways pages travel.

    python -m tests.sim.night [--works N] [--pairs-every K] [--backend NAME] [--seed S]

Prints each finding as a scenario (save it, `serinus sim --scenario FILE`); exit code 1 = there was one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from serinus.core.clock import WallClock
from serinus.sim import Scenario, at_every_step, calm_scenario, draw, pairs_of_faults, run

BACKENDS = ("local", "shm", "tcp", "push", "pull", "ipc")


def _sweep(name: str, scenarios: Iterable[Scenario]) -> int:
    clock, count, found = WallClock(), 0, 0
    start = clock.now()
    for count, scenario in enumerate(scenarios, 1):  # noqa: B007
        finding = run(scenario).finding
        if finding is not None:
            found += 1
            print(f"{name}: {finding.kind}: {finding.text}\n{scenario.to_json()}", flush=True)
    print(f"{name}: {count} runs, {found} found, {clock.now() - start:.0f} s", flush=True)
    return found


def main(words: list[str]) -> int:
    """All sweeps; 0 = nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.night", description="Sweeps over every step.")
    parser.add_argument("--works", type=int, default=2, help="requests in the runs with one fault (default: 2)")
    parser.add_argument("--pairs-every", type=int, default=1, help="look at each K-th pair only (default: 1)")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only these (default: all)")
    parser.add_argument("--seed", type=int, default=3, help="the seed that the requests are drawn from (default: 3)")
    arguments = parser.parse_args(words)
    found = 0
    for backend in arguments.backend or BACKENDS:
        scenario = draw(arguments.seed, backend=backend)
        found += _sweep(f"{backend}, every step", at_every_step(calm_scenario(scenario, arguments.works)))
        pairs = pairs_of_faults(calm_scenario(scenario, 1), every=arguments.pairs_every)
        found += _sweep(f"{backend}, pairs", pairs)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
