"""Run the perturbation stories of two engines again and again, each time with another seed: not one may fail.

    python -m tests.canary.stability --runs 200
    python -m tests.canary.stability --soak-minutes 30      (nothing planted: nothing may be reported) [--device cuda]

A run is: for models of full, sliding and both kinds of layers, in each part, prefill damages KV after it was stamped
(decode reports it, prefill is silent), bytes change in flight, and a running request of decode is damaged. Prints what
it did; exit code 1 with the story and the seed that failed.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import tempfile
import time
from pathlib import Path

from serinus.core.parts import Part
from serinus.selftest import CANARY_SHAPES, SIDES, CanaryPDFixture, make_canary_toy
from tests.canary.traffic import mixed_traffic

CASES = [("full", Part.FULL), ("swa", Part.SWA), ("both", Part.FULL), ("both", Part.SWA)]
POLICIES = ("write_through", "write_back")
STORIES = ("real_kv_post_forward", "transfer_bytes", "real_kv_used")


def story(toys: dict[str, Path], shape: str, part: Part, mode: str, seed: int) -> None:
    """Damage pages of one part in one way. Raises AssertionError where the canary does not report them as it must."""
    side = "decode" if mode == "real_kv_used" else "prefill"
    pair = CanaryPDFixture(toys[shape], **{f"perturb_{side}": f"{mode}=1.0"}, target=part, seed=seed, armed=False)  # type: ignore[arg-type]
    pair.arm(side, count=2)
    pair.send_parallel_short_requests(3, distinct_prompts=True, new_tokens=6)
    pair.run()
    assert pair.injections(side), "nothing was planted"
    found = pair.assert_violation_reported(fail_reason="verify_real_kv_hash", part=part, side="decode")
    assert len(found) == len(pair.violations("decode")), [v.line() for v in pair.violations("decode")]
    pair.assert_no_violation(side="prefill")
    if side == "decode":
        planted = {(i.slot, i.position) for i in pair.injections(side)}
        assert {(v.slot, v.position) for v in found} <= planted
    elif mode == "real_kv_post_forward":
        assert {v.position for v in found} == {i.position for i in pair.injections(side)}


def soak(toys: dict[str, Path], minutes: float, device: str) -> int:
    """Clean traffic with aborts, eviction, write-back, load-back and handoffs; violations found. `device`: of the
    engines."""
    until = time.monotonic() + 60 * minutes
    slots = loaded = evicted = requests = aborts = alarms = 0
    for pairs, (shape, policy) in enumerate(itertools.cycle(itertools.product(CANARY_SHAPES, POLICIES)), 1):
        small = {
            "enable_hierarchical_cache": True, "hicache_ratio": 8.0, "hicache_write_policy": policy,
            "max_total_tokens": 120, "max_running_requests": 4,
        }  # fmt: skip
        seed = (pairs - 1) // (len(CANARY_SHAPES) * len(POLICIES))
        pair = CanaryPDFixture(
            toys[shape], seed=seed, kv_canary_sweep_interval=3, prefill_settings=small, decode_settings=small,
            kv_canary_coverage="full" if seed % 2 else "rotating:4", device=device,
        )  # fmt: skip
        sent, aborted = mixed_traffic(pair, prompts=4, turns=20)
        requests, aborts = requests + sent, aborts + aborted
        alarms += sum(pair.canary(side).violation_count for side in SIDES)
        pair.assert_no_violation()
        slots += sum(pair.canary(side).checked_slots() for side in SIDES)
        stats = pair.built("decode").cache.stats()
        loaded, evicted = loaded + stats.loaded_tokens, evicted + stats.evicted_pages
        pair.close()
        print(
            f"soak: {pairs} pairs of engines, {requests} requests, {aborts} aborted, {slots} slots checked, {evicted} "
            f"pages evicted and {loaded} tokens loaded back in decode, {alarms} false alarms",
            flush=True,
        )
        if time.monotonic() >= until:
            break
    return alarms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--soak-minutes", type=float, default=0.0)
    parser.add_argument("--device", default="cpu", help="of the soak's engines: cpu or cuda")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    home = Path(tempfile.mkdtemp(prefix="canary-stability-"))
    toys = {shape: make_canary_toy(home / shape, shape) for shape in CANARY_SHAPES}
    if arguments.soak_minutes:
        return 1 if soak(toys, arguments.soak_minutes, arguments.device) else 0
    start = time.monotonic()
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.runs):
        for shape, part in CASES:
            for mode in STORIES:
                try:
                    story(toys, shape, part, mode, seed)
                except AssertionError as error:
                    print(f"FAILED: seed {seed}, {shape}, part {part.name}, {mode}: {error}")
                    return 1
        if seed % 20 == 19:
            print(f"{seed + 1 - arguments.first_seed} runs, {time.monotonic() - start:.0f} s", flush=True)
    count = arguments.runs * len(CASES) * len(STORIES)
    print(f"{arguments.runs} runs of {len(CASES) * len(STORIES)} stories ({count} in all), none failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
