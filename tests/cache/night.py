"""The long mode of the proof: seeds that the normal suite never reaches, then Hypothesis with a large budget.

    python -m tests.cache.night --minutes 60 [--seed 1000000] [--steps 300]

Prints the first seed that turns an oracle red, with its shape and what was wrong, and ends with exit code 1;
`python -m tests.cache.night --only SEED` runs that one alone.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback

import serinus.cache
from serinus.core.rng import Rng
from tests.cache.drive import draw_shape, drive
from tests.cache.test_machine import explore


def run_seed(seed: int, steps: int) -> int:
    """Rules that ran, or -1 after a failure, which is printed."""
    try:
        return drive(serinus.cache, seed, steps).steps
    except Exception:
        print(f"seed {seed}, {draw_shape(Rng(seed))}")
        traceback.print_exc()
        return -1


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long; a tenth of it is Hypothesis'")
    parser.add_argument("--seed", type=int, default=1_000_000, help="the first seed")
    parser.add_argument("--steps", type=int, default=300, help="rules per seed")
    parser.add_argument("--only", type=int, metavar="SEED", help="run one seed and stop")
    arguments = parser.parse_args()
    if arguments.only is not None:
        return int(run_seed(arguments.only, arguments.steps) < 0)
    end = time.monotonic() + arguments.minutes * 60 * 0.9
    seed, rules = arguments.seed, 0
    while time.monotonic() < end:
        ran = run_seed(seed, arguments.steps)
        if ran < 0:
            return 1
        seed, rules = seed + 1, rules + ran
        if seed % 500 == 0:
            print(f"{seed - arguments.seed} seeds, {rules} rules", flush=True)
    examples = max(10, int(arguments.minutes * 60 * 0.1 * 10))
    more = explore(examples, steps_max=120)
    print(f"{seed - arguments.seed} seeds, {rules} rules; {more} more by Hypothesis: all green")
    return 0


if __name__ == "__main__":
    sys.exit(main())
