"""scenes: what happens around the faults of one cell of the matrix, in a pair of engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from serinus.canary import CanaryRank
from serinus.core.parts import Part
from serinus.selftest.fixture import SIDES, CanaryPDFixture

CLEAN: Final = "none"
"""The mode of a cell in which nothing is planted."""
OVERFLOW: Final = "overflow"
"""The mode of a cell in which so much is damaged at once that the ring of violations runs over."""
TIERED: Final[Mapping[str, Any]] = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}
_SWEEP_PAGES: Final = 16
"""Pages of one sweep: a pass over the cache is many sweeps."""
_HANDOFFS: Final = 6
_OVERFLOWING: Final = 8
"""Requests that are read at once; with stages, in each of the steps that are under way."""
_TURNS_MAX: Final = 2000
_NEVER: Final = 1 << 30
_LOOPS: Final = 3
Scene = Callable[[CanaryPDFixture, str, int], None]
"""(pair, side in which is planted, faults)."""


def scene_settings(mode: str, side: str, part: str, page: int, stages: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the prefill and of the decode engine that the scene of a mode needs."""
    prefill: dict[str, Any] = {}
    decode: dict[str, Any] = {}
    own = prefill if side == "prefill" else decode
    if mode in (CLEAN, "tier_bytes"):
        small = {**TIERED, "max_total_tokens": 24 * page, "max_running_requests": 2}
        (own if mode != CLEAN else decode).update(small)
    if mode == CLEAN:
        decode["kv_canary_sweep_interval"] = 2
        prefill |= decode
    if side == "decode" and (SCENES[mode] in (_running, _overflow) or (mode == "tier_bytes" and part != Part.SWA.name)):
        # It computes every prompt by itself: every token is its own, and all requests run within a few steps, while
        # handoffs take as long as the machine likes. In part SWA tier_bytes would keep pages that no prompt loads,
        # being out of all windows; those that come by handoff are in one.
        decode["min_remote_tokens"] = _NEVER
    if mode == "tier_bytes" and side == "prefill":
        decode["disable_radix_cache"] = True  # every prompt is asked of prefill again
    if mode == "real_kv_unused_cache":
        own["kv_canary_sweep_interval"] = 1
    if mode in ("req_to_token", "foreign_page", "real_kv_used") and side == "prefill":
        prefill["chunked_prefill_size"] = 2 * page
    if mode == "real_kv_unused_cache" and side == "prefill":
        prefill["chunked_prefill_size"] = page
    if mode == "real_kv_post_forward" and side == "prefill":  # prompts in one chunk each: decode is the next reader
        prefill["chunked_prefill_size"] = 4 * _HANDOFFS * page
    if mode == OVERFLOW:
        decode |= {"max_total_tokens": 4096 * stages, "max_running_requests": _OVERFLOWING * stages}
        decode |= {"chunked_prefill_size": 4096 * stages}
    return prefill, decode


def pages_to_sweep(pair: CanaryPDFixture, side: str, part: Part) -> int:
    """Sweeps of one full pass, from wherever the walk stands."""
    pages = pair.built(side).pools[part].spec.page_count
    return -(-pages // _SWEEP_PAGES) + 1


def _page(pair: CanaryPDFixture) -> int:
    return pair.pair.decode.built.config.memory.page_size


def _length(pair: CanaryPDFixture) -> int:
    """Tokens of a prompt: three pages and a half."""
    return 3 * _page(pair) + 2


def _running(pair: CanaryPDFixture, side: str, count: int) -> None:
    """Three requests are under way, far from their ends; of prefill: three prompts, chunk by chunk, when a fourth is
    cached, to the pages of which a row can be pointed: how long those of the three are locked, the handoffs decide."""
    stride = pair.canary(side).settings.stride
    if side == "prefill":
        tokens = (2 * (count + 4) // 3 + 4 + stride) * _page(pair) + 2
        pair.send(pair.random_prompt(tokens), new_tokens=2)
        pair.run()
        pair.arm(side, count)
        pair.send_parallel_short_requests(3, distinct_prompts=True, prompt_tokens=tokens, new_tokens=2)
        return
    _decoding(pair, 3, _length(pair), count + 2 * stride)
    pair.arm(side, count)


def _decoding(pair: CanaryPDFixture, count: int, length: int, more: int) -> list[str]:
    """So many requests decode, each at least `more` steps from its end. The engine computes the prompts by itself, so
    that none can be late: a request gets at most one token in each step."""
    settings = pair.built("decode").engine.scheduler.settings
    assert settings.min_remote_tokens == _NEVER, "selftest: prompts are computed elsewhere, expected here"
    # Each is sent in a turn of its own; then chunks, which take turns with the decodes of every stage.
    steps = count * (1 + -(-length // settings.chunked_prefill_size))
    rids = pair.send_parallel_short_requests(
        count, distinct_prompts=True, prompt_tokens=length, new_tokens=16 + pair.mesh.pp * steps + more
    )
    pair.run_until(lambda: all(len(pair.tokens(rid)) >= 3 for rid in rids))
    ended = [rid for rid in rids if pair.finish(rid) is not None]
    assert not ended, f"selftest: {ended} ended before all of {count} requests were under way"
    return rids


def _handed_over(pair: CanaryPDFixture, side: str, count: int) -> None:
    """Prompts are computed for the decode engine, until so many faults are planted; each of them is answered."""
    pair.arm("prefill", count)
    for _ in range(count):
        rids = pair.send_parallel_short_requests(_HANDOFFS, distinct_prompts=True, prompt_tokens=_length(pair))
        pair.run()
        failed = [rid for rid in rids if pair.failed(rid)]
        assert not failed, f"{failed} failed: what arrived was not checked before it was used"
        if len(pair.injections("prefill")) >= count:
            return


def _asleep(pair: CanaryPDFixture, side: str, count: int) -> None:
    """Some prompts are cached; another request keeps the engine at work for more than a pass over the cache."""
    pair.lead(side).sweep_slots = _SWEEP_PAGES * _page(pair)
    pair.send_parallel_short_requests(8, distinct_prompts=True, prompt_tokens=_length(pair), new_tokens=2)
    pair.run()
    pair.arm(side, count)
    steps = count + 4 + max(pages_to_sweep(pair, side, part) for part in pair.canary(side).parts)
    if side == "prefill":
        pair.send_parallel_short_requests(1, distinct_prompts=True, prompt_tokens=steps * _page(pair), new_tokens=1)
    else:
        pair.send_parallel_short_requests(1, distinct_prompts=True, prompt_tokens=_length(pair), new_tokens=steps)


def _came_back(pair: CanaryPDFixture, side: str, count: int) -> None:
    """Prompts go down to the host tier and come back, until the damaged page has been among them."""
    pair.flush()
    known = len(pair.violations(side))
    prompts = [pair.random_prompt(10 * _page(pair) + 1) for _ in range(4)]
    for prompt in prompts:
        pair.send(prompt, new_tokens=2)
        pair.run()
    pair.arm(side, count)
    for prompt in _LOOPS * prompts:
        rid = pair.send(prompt, new_tokens=2)
        pair.run()
        found = pair.violations(side)[known:]
        local = pair.built(side).config.pd.min_remote_tokens == _NEVER
        if local and any(violation.rid == rid for violation in found):
            assert not pair.tokens(rid), f"{rid} got tokens from pages that were wrong when they came back"
        if found:
            return


def _clean(pair: CanaryPDFixture, side: str, count: int) -> None:
    """Shared and distinct prompts, aborts, more tokens than the device holds, prompts that come back."""
    page = _page(pair)
    shared = [pair.random_prompt(8 * page + 1) for _ in range(3)]
    for turn in range(6):
        rids = [pair.send([*shared[turn % 3], *pair.random_prompt(2)], new_tokens=page) for _ in range(2)]
        rids += pair.send_parallel_short_requests(2, distinct_prompts=turn % 2 == 0, prompt_tokens=_length(pair))
        for _ in range(3 + 4 * turn):
            pair.turn()
        if pair.finish(rids[turn % 4]) is None:
            pair.pair.abort(rids[turn % 4])
        pair.run()
    for each in SIDES:
        pair.lead(each).view()  # asks for what was checked


def _overflow(pair: CanaryPDFixture, side: str, count: int) -> None:
    """Every slot that these requests read on the leader's rank is changed at once: none of them may go on."""
    canary = pair.canary(side)
    halves = min(canary.parts).halves  # latent rows are verified once, not as K and as V: it takes twice as many
    rids = _decoding(pair, _OVERFLOWING * pair.mesh.pp, 200 // halves, 8)
    found, due = canary.violation_count, 0
    for lanes in canary.parts.values():
        with torch.inference_mode():
            for half in lanes.layers_kv[0]:
                half.view(torch.int16).bitwise_xor_(1)
    for _ in range(_TURNS_MAX):  # where a step was queued before the change, the one behind it is the first to see it
        if canary.violation_count > found:
            break
        due = _told(canary)
        pair.turn()
    # Beside its slots each request of the step has one entry a part due that binds it to its tokens: not changed.
    expected = halves * (_told(canary) - due - canary.step_size * len(canary.parts))
    assert expected > canary.settings.ring_rows, f"{expected} violations do not fill {canary.settings.ring_rows} rows"
    counted = canary.violation_count - found
    assert counted == expected, f"{expected} violations in one step, of {halves} halves, but {counted} were counted"
    pair.run()
    left = [rid for rid in rids if not pair.failed(rid)]
    assert not left, f"{left} went on, though nothing is known of {counted - canary.settings.ring_rows} violations"


def _told(canary: CanaryRank) -> int:
    """Slots of requests that had to be verified in the steps that were told so far."""
    return sum(ring.told for lanes in canary.parts.values() for ring in lanes.of_requests)


def _abort(pair: CanaryPDFixture, rids: Sequence[str]) -> None:
    for rid in rids:
        if pair.finish(rid) is None:
            pair.pair.decode.abort(rid)


SCENES: Final[Mapping[str, Scene]] = {
    CLEAN: _clean,
    OVERFLOW: _overflow,
    "req_to_token": _running,
    "foreign_page": _running,
    "real_kv_used": _running,
    "next_token_swap": _running,
    "real_kv_post_forward": _running,
    "real_kv_unused_cache": _asleep,
    "tier_bytes": _came_back,
    "transfer_bytes": _handed_over,
}
"""By mode. Where prefill damages what it has stamped, decode finds it: that scene is that of transfer_bytes."""
