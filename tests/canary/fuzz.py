"""Flip one random byte of any live page, anywhere: it is reported at that page and nowhere else.

    python -m tests.canary.fuzz --flips 2000 --seed 1 [--device cuda]

Live pages are those of running requests, cached ones on the device, cached ones in the host tier, pages on their way
from a prefill to a decode engine, and files. A byte of a file is a miss with a warning (files carry checksums of
their own), everything else is a violation at one slot. Prints how many flips of each kind were made.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.canary import Violation
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.kernels import Reason
from serinus.kernels.pool_rows import row_of
from serinus.selftest import CANARY_SHAPES, CanaryPDFixture, make_canary_toy
from serinus.testing.oracle import toy_continue

PAGE = 4
TIERED = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "max_total_tokens": 96, "max_running_requests": 2}


SWEPT_STEPS = 12
"""A running request's slot is checked in the next step; a cached one by the sweep that the lead commands after it."""


def parts_of(pair: CanaryPDFixture) -> list[Part]:
    return sorted(pair.canary("decode").parts)


def accused(found: list[Violation], part: Part) -> Violation:
    """The one slot that all of these name; raises AssertionError."""
    assert found, "nothing was reported"
    assert {v.part for v in found} == {part}, [v.line() for v in found]
    assert {v.reasons for v in found} == {Reason.VERIFY_REAL_KV_HASH}, [v.line() for v in found]
    assert len({v.slot for v in found}) == 1, [v.line() for v in found]
    return found[0]


def flip_device(toy: Path, count: int, rng: Rng, device: str) -> None:
    """Bytes of K or V of any layer, of slots that a running request of decode reads or that are cached there."""
    settings = {"kv_canary_sweep_interval": 1}
    pair = CanaryPDFixture(toy, decode_settings=settings, max_total_tokens=1024, device=device)
    pair.send_parallel_short_requests(4, distinct_prompts=True, prompt_tokens=21)
    pair.run()
    canary, scheduler = pair.canary("decode"), pair.built("decode").engine.scheduler
    window = pair.pair.decode.built.spec.window or 1 << 30
    rids: list[str] = []
    for _ in range(count):
        if not rids or any(pair.finish(rid) for rid in rids) or len(pair.tokens(rids[0])) > 60:
            pair.run()
            rids = pair.send_parallel_short_requests(2, distinct_prompts=True, prompt_tokens=22, new_tokens=64)
            assert pair.run_until(lambda rids=rids: all(len(pair.tokens(rid)) > 1 for rid in rids))  # type: ignore[misc]
        part = rng.choice(parts_of(pair))
        lanes = canary.parts[part]
        live = list(pair.built("decode").cache.walk(0, 1 << 20, part=part, unlocked_only=True).slots)
        for rid in rids:
            state = scheduler._states[rid]
            low = max(0, state.computed - window + 1) if part is Part.SWA else 0
            live += lanes.table_RC[state.row, low : state.computed].tolist()
        slot, half = int(rng.choice(live)), rng.randrange(part.halves)
        lane = lanes.layers_kv[rng.randrange(len(lanes.layers_kv))][half]
        row = row_of(lane, slot).view(-1).view(torch.uint8)
        byte, mask = rng.randrange(len(row)), rng.randrange(1, 256)
        row[byte] ^= mask
        before, steps = canary.violation_count, canary.steps
        while canary.violation_count == before and canary.steps < steps + SWEPT_STEPS:
            pair.pair.turn_decode()
        row[byte] ^= mask
        for _ in range(SWEPT_STEPS):  # what was checked is reported by the turns that commit the steps and the sweep
            pair.pair.turn_decode()
        found = pair.violations("decode")[before - canary.violation_count :] if canary.violation_count > before else []
        violation = accused(found, part)
        assert (violation.slot, violation.tag.split("_")[1]) == (slot, "KV"[half]), violation.line()
    pair.assert_no_violation(side="prefill")


def flip_host(toy: Path, count: int, rng: Rng, device: str) -> None:
    """Bytes of pages in the host tier, which then come back."""
    pair = CanaryPDFixture(toy, kv_canary="raise", decode_settings=TIERED, device=device)
    built, canary = pair.built("decode"), pair.canary("decode")
    tiers, cache = built.tiers, built.cache
    assert tiers is not None
    for _ in range(count):
        pair.flush()
        prompts = [pair.random_prompt(10 * PAGE + 1) for _ in range(4)]
        for prompt in prompts:
            pair.send(prompt, new_tokens=2)
            pair.run()
        while cache.poll().in_flight:
            pass
        part = rng.choice(parts_of(pair))
        host_page = int(rng.choice(list(cache.host_pages(part))))
        row = tiers.host[part].data_PY[host_page]
        row[rng.randrange(built.pools[part].spec.kv_bytes)] ^= rng.randrange(1, 256)
        damaged, before, known = row.copy(), canary.violation_count, len(pair.violations("decode"))
        for prompt in 2 * prompts:
            pair.send(prompt, new_tokens=2)
            if pair.run_until(lambda before=before: canary.violation_count > before):  # type: ignore[misc]
                break
        found = pair.violations("decode")[known:]
        at_host = [each for each in found if each.tag.startswith("HOST")]  # where the copy came from is verified, too
        assert {each.page for each in at_host} <= {host_page}, [each.line() for each in at_host]
        violation = accused([each for each in found if each not in at_host], part)
        page = np.array([violation.page], np.int32)
        assert (built.pools[part].read_pages(page)[0] == damaged).all(), violation.line()
        pair.run()
        pair.release()
    pair.assert_no_violation(side="prefill")
    pair.close()


def flip_in_flight(toy: Path, count: int, rng: Rng, device: str) -> None:
    """Bytes of pages between the engines; in mode raise, so that the right answer must come all the same."""
    target = Part.SWA if "both" in toy.name else None
    planted = {"perturb_prefill": "transfer_bytes=0.0", "target": target}
    pair = CanaryPDFixture(toy, **planted, kv_canary="raise", device=device)  # type: ignore[arg-type]
    canary, length, done = pair.canary("decode"), 14, []

    def sent(part: Part, pages_GY: NDArray[np.uint8]) -> None:
        spec = pair.built("prefill").pools[part].spec
        if done or part is not wanted or not spec.kv_bytes:
            return
        row = pages_GY[rng.randrange(len(pages_GY))]
        positions = row[spec.kv_bytes :].view(np.int64).reshape(2 * spec.halves, PAGE, 4)[spec.halves, :, 1]
        width = spec.slot_bytes // spec.layer_count // spec.halves
        byte = rng.randrange(spec.kv_bytes)
        position = int(positions[0]) + byte // width % PAGE
        if position < length:  # behind the prompt, a page holds what its last owner left
            row[byte] ^= rng.randrange(1, 256)
            done.append(position)

    perturber = pair.perturber("prefill")
    perturber.sent = sent  # type: ignore[method-assign]
    flips = 0
    while flips < count:
        done.clear()
        wanted = rng.choice(parts_of(pair))
        before = canary.violation_count
        (rid,) = pair.send_parallel_short_requests(1, distinct_prompts=True, prompt_tokens=length, new_tokens=3)
        pair.run()
        assert pair.tokens(rid) == toy_continue(pair.pair.decode.built.spec, pair.prompts[rid], 3)
        new = canary.violation_count - before
        if not done:
            assert not new
            continue
        assert accused(pair.violations("decode")[-new:] if new else [], wanted).position == done[0]
        pair.release()
        flips += 1
    pair.assert_no_violation(side="prefill")


def flip_file(toy: Path, count: int, rng: Rng, folder: Path, device: str) -> int:
    """Bytes of stored pages: never used, never a violation; how many of the files were read (and found bad)."""
    stored: dict[str, Any] = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file",
                              "hicache_storage_dir": str(folder),
                              "hicache_storage_prefetch_policy": "wait_complete"}  # fmt: skip
    pair = CanaryPDFixture(toy, decode_settings=stored, device=device)
    tiers = pair.built("decode").tiers
    assert tiers is not None
    assert tiers.storage is not None
    prompt = pair.random_prompt(10 * PAGE + 1)
    pair.send(prompt, new_tokens=2)
    pair.run()
    for _ in range(count):
        pair.flush()
        file = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 64))
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        file.write_bytes(data)
        rid = pair.send(prompt, new_tokens=2)
        pair.run()
        assert pair.tokens(rid) == toy_continue(pair.pair.decode.built.spec, prompt, 2)
    pair.assert_no_violation()
    pair.flush()
    bad = tiers.storage.shelf.counts().bad
    pair.close()
    return int(bad)


def fuzz(home: Path, flips: int, seed: int, device: str = "cpu") -> Counter[str]:
    """So many flips, spread over the kinds and the shapes of models. `device`: of the engines. Raises
    AssertionError."""
    rng, done = Rng(seed).split("flips"), Counter[str]()
    shapes = list(CANARY_SHAPES)
    slow = flips // (10 * len(shapes)) or 1
    for shape in shapes:
        toy = make_canary_toy(home / shape, shape)
        flip_host(toy, slow, rng, device)
        bad = flip_file(toy, slow, rng, home / f"files {shape}", device)
        done.update({"host": slow, "file": slow, "file, found bad": bad})
        flying = flips // (4 * len(shapes)) or 1
        flip_in_flight(toy, flying, rng, device)
        rest = -(-flips // len(shapes)) - 2 * slow - flying
        flip_device(toy, rest, rng, device)
        done.update({"in flight": flying, "device": rest})
        print(shape, dict(done), flush=True)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="of the engines: cpu or cuda")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as home:
        done = fuzz(Path(home), arguments.flips, arguments.seed, arguments.device)
    print(f"{arguments.flips} flips, each reported at its page and nowhere else: {dict(done)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
