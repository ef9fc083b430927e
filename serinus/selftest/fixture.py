"""CanaryPDFixture: a prefill and a decode engine in one thread, each under its canary, and faults planted in either.

    pair = CanaryPDFixture(make_canary_toy(folder, "swa"), perturb_prefill="real_kv_post_forward=1.0")
    pair.send_parallel_short_requests(3, distinct_prompts=True)
    pair.run()
    pair.assert_violation_reported(fail_reason="verify_real_kv_hash", part=Part.SWA, side="decode")
    pair.assert_no_violation(side="prefill")

The two engines are whole: cores, roles, handoff machines, pools, tiers (pair.py). The router is left out: it only names
an address, touches no KV, and would bring processes and sockets into tests that must own the order of events. Nothing
sleeps: turns are taken until what is awaited has happened.

With `tp_size` and `pp_size` each engine has several ranks: the leaders in this thread, the others in threads of their
own, joined by sockets and segments of this machine. Their order is then that of the threads: the same seed plants
faults in the same ranks and places, but which slots are in use at that moment may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from serinus.canary import CanaryLead, CanaryRank, Finding, Violation, reason_names
from serinus.canary.perturb import Injection, Perturber, parse_perturb
from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.parts import Part
from serinus.core.private_folder import PrivateFolder
from serinus.core.request import FinishReason, KvIntegrity
from serinus.core.rng import Rng
from serinus.engine.built import Built
from serinus.models import make_toy
from serinus.parallel import Mesh
from serinus.ranks.thread_ranks import ThreadRanks
from serinus.ranks.tier_parts import pause
from serinus.selftest.pair import EnginePair
from serinus.wire.fault_order import SECONDS_MAX, FaultOrder

CANARY_SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "swa": {"window": 9},
    "both": {"window": 9, "layer_types": "SFS"},
    "latent": {"latent": True, "kv_heads": 1},
}
"""Toy models: all layers full, all sliding, both, all latent. A window of 9 sees whole pages of 4 where a page
begins."""
SIDES = ("prefill", "decode")
_DEFAULTS: dict[str, Any] = {
    "page_size": 4,
    "max_total_tokens": 512,
    "max_running_requests": 8,
    "chunked_prefill_size": 64,
    "kv_canary": "log",
    "kv_canary_real_data": "all",
    "kv_canary_coverage": "full",
    "kv_canary_stats_interval": 0,
}
_RANKED: dict[str, Any] = {"transfer_backend": "shm", "bootstrap_port": 0, "max_step_ms": 0}
"""How engines of several ranks are joined: each rank moves its share. Time is real there: no chunk depends on it."""
_WAIT_S = 0.0005
_STALL_S = 60.0
"""Ranks that are threads may take so long over a step: the first compiles kernels, beside whatever else runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A fault, and where both engines were when it was planted."""

    injection: Injection
    side: str
    steps: dict[str, int]
    """Steps of each engine's canary by then."""


def make_canary_toy(folder: Path, shape: str, **kind: Any) -> Path:
    """A toy checkpoint of one of CANARY_SHAPES."""
    heads = {"kv_heads": 2, "head_size": 16}
    return make_toy(folder, tokenizer=False, **{**heads, **CANARY_SHAPES[shape], **kind})


class CanaryPDFixture:
    """Two engines, their canaries, and what was planted and found."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        perturb_prefill: str = "",
        perturb_decode: str = "",
        target: Part | None = None,
        seed: int = 0,
        armed: bool = True,
        prefill_settings: dict[str, Any] | None = None,
        decode_settings: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`perturb_*`: NAME=PROBABILITY,... of one engine; `armed` = False: nothing is planted before `arm`;
        the settings are those of engines, by their names, of both or of one."""
        self._perturb = {"prefill": perturb_prefill, "decode": perturb_decode}
        self._target, self._seed = "" if target is None else target.name.lower(), seed
        self._rank: int | None = None
        gate: dict[str, Any] = {"kv_canary_perturb_target": self._target, "kv_canary_perturb_seed": seed}
        gate["kv_canary_perturb_warmup_steps"] = 0
        own = {"prefill": dict(prefill_settings or {}), "decode": dict(decode_settings or {})}
        for side, text in (("prefill", perturb_prefill), ("decode", perturb_decode)):
            if text:
                planned = {"kv_canary_perturb": text, **gate} if armed else {"kv_canary_perturb_api": True}
                own[side] = {**planned, **own[side]}
        self.mesh = Mesh(**{name: settings.get(f"{name}_size", 1) for name in ("tp", "pp", "ep")})
        """The ranks of each of the two engines."""
        with ExitStack() as undo:
            starter = partial(_threads, undo.enter_context(PrivateFolder())) if self.mesh.size > 1 else None
            self.pair = EnginePair(
                checkpoint,
                prefill_settings=own["prefill"],
                decode_settings=own["decode"],
                starter=starter,
                **{**_DEFAULTS, **(_RANKED if starter else {}), **settings},
            )
            undo.callback(self.pair.close)
            self._ends = undo.pop_all()
        self.ranks = [self.mesh.name(rank) for rank in range(self.mesh.size)] if self.mesh.size > 1 else [""]
        """Their names in reports; one rank alone has the name ""."""
        self.planted: list[Planted] = []
        """Every fault, in order."""
        self.prompts: dict[str, list[int]] = {}
        self._heard: dict[str, list[Violation]] = {side: [] for side in SIDES}
        for side in SIDES:
            self.lead(side).listeners.append(partial(self._hear, side))
        self._rng = Rng(seed).split("prompts")
        self._sent = 0

    def built(self, side: str) -> Built:
        """The engine of that side: prefill or decode."""
        return (self.pair.prefill if side == "prefill" else self.pair.decode).built

    def lead(self, side: str) -> CanaryLead:
        """The leader's half of its canary."""
        lead = self.built(side).engine.canary
        assert lead is not None, f"testing: the {side} engine has no canary"
        return lead

    def canary(self, side: str) -> CanaryRank:
        """The canary of its first rank, the leader's."""
        canary = self.built(side).canary
        assert canary is not None, f"testing: the {side} engine has no canary"
        return canary

    def perturber(self, side: str) -> Perturber:
        """The object that plants the faults of that side."""
        perturber = self.canary(side).perturber
        assert perturber is not None, f"testing: nothing to plant in the {side} engine, expected perturb_{side}"
        return perturber

    # ---- work -----------------------------------------------------------------------------------------------------

    def send(self, prompt: Sequence[int], *, new_tokens: int = 8, rid: str = "") -> str:
        """One request of a client of the decode engine; its prompt is computed by the prefill engine."""
        rid = rid or f"r{self._sent}"
        self._sent += 1
        self.prompts[rid] = list(prompt)
        self.pair.add(rid, prompt, new_tokens, seed=self._sent)
        return rid

    def random_prompt(self, length: int) -> list[int]:
        """Token ids by the seed."""
        vocab = self.pair.decode.built.spec.vocab_size
        return [self._rng.randrange(vocab) for _ in range(length)]

    def send_parallel_short_requests(
        self, n: int, *, distinct_prompts: bool, prompt_tokens: int = 14, new_tokens: int = 8
    ) -> list[str]:
        """`n` requests at once, their prompts all different or all the same; their names."""
        shared = self.random_prompt(prompt_tokens)
        prompts = [self.random_prompt(prompt_tokens) if distinct_prompts else shared for _ in range(n)]
        return [self.send(prompt, new_tokens=new_tokens) for prompt in prompts]

    def turn(self) -> None:
        """One turn of each engine, prefill first."""
        for side, turn in (("prefill", self.pair.turn_prefill), ("decode", self.pair.turn_decode)):
            before = self.canary(side).steps
            turn()
            if self.canary(side).steps > before:
                continue
            if self.mesh.size > 1:
                self.built(side).line.pump(_WAIT_S)  # for other ranks, which answer when they can
            elif self.built(side).engine.scheduler.in_flight:
                pause(_WAIT_S)  # as the engine's own loop waits for copies, which threads of their own carry

    def run_until(self, happened: Callable[[], bool], *, turns_max: int = 20_000) -> bool:
        """Turns until `happened()`, or until nothing is left to do; whether it happened.

        Raises AssertionError where neither is the case, and neither engine has begun a step, for `turns_max` turns and,
        where other ranks answer when they can, a minute."""
        clock, steps, left = self.pair.clock, -1, 0
        until = clock.now()
        while not happened():
            if self.pair.idle:
                return False
            now = sum(self.lead(side).steps for side in SIDES)
            if now != steps:
                steps, left, until = now, turns_max, clock.now() + _STALL_S * (self.mesh.size > 1)
            left -= 1
            assert left >= 0 or clock.now() < until, f"testing: neither happened nor idle: {self._under_way()}"
            self.turn()
        return True

    def run(self) -> None:
        """Turns until both engines hold nothing."""
        self.run_until(lambda: False)
        for side in SIDES:
            self.injections(side)
        self.pair.check()

    def tokens(self, rid: str) -> list[int]:
        """Tokens that its client has got."""
        return self.pair.tokens(rid)

    def finish(self, rid: str) -> FinishReason | None:
        """How the request ended; None = it has not."""
        return self.pair.decode.finish(rid)

    def failed(self, rid: str) -> bool:
        """Whether its client was answered an error."""
        return self.finish(rid) is FinishReason.ERROR

    def seed_faults(self, seed: int, *, rank: int | None = None) -> None:
        """The seed of the faults that are planted from the next `arm` on, and the rank whose KV they damage; None = one
        drawn from the seed."""
        self._seed, self._rank = seed, rank

    def release(self) -> None:
        """Give back the pages that mode raise has quarantined: the faults were ours, the memory is sound."""
        for side in SIDES:
            for violation in self.violations(side):
                self.built(side).cache.release_quarantined(violation.part, np.array([violation.page], np.int32))

    def flush(self) -> None:
        """Forget what is cached in both engines, in every tier; they must be idle."""
        for side in SIDES:
            cache = self.built(side).cache
            while cache.poll().in_flight:
                pause(_WAIT_S)
            cache.reset()

    def close(self) -> None:
        """Close both engines, with the threads of their ranks and tiers."""
        self._ends.close()

    # ---- faults and findings ----------------------------------------------------------------------------------------

    def arm(self, side: str, count: int = 1) -> None:
        """From its next step on, plant so many faults of each of its modes at most."""
        faults = self.lead(side).faults
        assert faults is not None, f"testing: nothing to plant in the {side} engine, expected perturb_{side}"
        chances = parse_perturb(self._perturb[side])
        faults.order(
            FaultOrder(
                perturb=chances, target=self._target, rank=self._rank, seed=self._seed, count=count,
                seconds=SECONDS_MAX,
            )
        )  # fmt: skip

    def injections(self, side: str) -> list[Injection]:
        """What was planted in one engine. Asks its ranks: one that runs no step tells nothing by itself."""
        self.lead(side).view()
        return [planted.injection for planted in self.planted if planted.side == side]

    def violations(self, side: str) -> list[Violation]:
        """What one engine's canary has found, in order."""
        return list(self._heard[side])

    def assert_violation_reported(self, *, fail_reason: str, part: Part, side: str) -> list[Violation]:
        """Those of that reason and part; raises AssertionError where there is none."""
        found = self.violations(side)
        named = [v for v in found if v.part is part and fail_reason in reason_names(v.reasons)]
        assert named, f"testing: no {fail_reason} of part {part.name} on the {side} side: {self._report()}"
        return named

    def assert_no_violation(self, *, side: str = "") -> None:
        """On that side, or on both, nothing was found, and slots were looked at."""
        for each in (side,) if side else SIDES:
            view = self.lead(each).view()
            assert view["violations"] == 0, f"testing: the {each} side is not clean: {self._report()}"
            assert view["slots_checked"] == view["slots_due"], f"testing: the {each} side was not watched"
            short = [rid for rid, receipt in self.receipts().items() if receipt.slots_checked != receipt.slots_due]
            assert not short, f"testing: fewer slots were checked for {short} than were due"

    def receipts(self) -> dict[str, KvIntegrity]:
        """Of the answers that ended with one."""
        usages = {rid: deltas[-1].usage for rid, deltas in self.pair.deltas.items() if deltas}
        return {rid: each.kv_integrity for rid, each in usages.items() if each is not None and each.kv_integrity}

    def checked_slots(self, side: str) -> list[int]:
        """Slots that each rank of that side has verified so far, by rank. Waits for all of them."""
        view = self.lead(side).view()
        return [each["slots_checked"] for each in view.get("ranks", [view])]

    def _hear(self, side: str, finding: Finding) -> None:
        if isinstance(finding, Violation):
            self._heard[side].append(finding)
            return
        steps = {each: self.canary(each).steps for each in SIDES}
        self.planted.append(Planted(injection=finding, side=side, steps=steps))

    def _under_way(self) -> str:
        """What the engines hold, for the report of a stall."""
        stats = {side: self.built(side).engine.scheduler.stats() for side in SIDES}
        return "; ".join(f"{side} after step {self.lead(side).steps}: {stats[side]}" for side in SIDES)

    def _report(self) -> str:
        lines = [f"planted in {p.side}: {p.injection.line()}" for p in self.planted]
        lines += [f"found by {side}: {v.line()}" for side in SIDES for v in self.violations(side)[:8]]
        return "\n".join(["", *lines]) if lines else "nothing planted, nothing found"


def _threads(home: Path, config: ServeConfig, clock: Clock) -> ThreadRanks:
    """The ranks of one engine that do not lead."""
    place = home / config.role
    place.mkdir()
    return ThreadRanks(config, place, clock)
