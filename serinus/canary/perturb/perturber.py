"""Perturber: carries a PerturbPlan out around the steps of one rank, and notes every injection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serinus.canary.hook import StepChecks
from serinus.canary.lanes import PartLanes
from serinus.canary.perturb import foreign_page, next_token_swap, page_bytes, real_kv, req_to_token
from serinus.canary.perturb.damage import PageShape, Places
from serinus.canary.perturb.plan import Injection, PerturbPlan, Place
from serinus.core.log import get_logger
from serinus.core.parts import PageStore, Part
from serinus.core.plan import StepResult
from serinus.core.rng import Rng
from serinus.models import ForwardBatch

_REMEMBERED: Final = 64
"""Faults whose slots are not damaged again."""
_ON_DEVICE: Final = ("real_kv_used", "real_kv_unused_cache", "real_kv_post_forward")
_log = get_logger("canary")


class Perturber:
    """Plants faults by plan. All modes share one gate: nothing happens in the first `warmup_steps` steps."""

    def __init__(self, plan: PerturbPlan, *, host: Mapping[Part, NDArray[np.uint8]] | None = None) -> None:
        """`host`: this rank's host tier by part, [P, Y]; only the mode tier_bytes needs it."""
        self.injections: list[Injection] = []
        """Everything planted so far, in order."""
        self.cached: dict[tuple[str, Part], NDArray[np.integer]] = {}
        """What the leader says holds cached KV now, as pages: of ("host", part) all, of ("device", part) those that no
        request uses."""
        self._host = {} if host is None else host
        self._lanes: Mapping[Part, PartLanes] = {}
        self._shapes: Mapping[Part, PageShape] = {}
        self._partial = False
        self._step = 0
        self._rids: tuple[str, ...] = ()
        self.replan(plan)

    def replan(self, plan: PerturbPlan) -> None:
        """Plant by this plan from the next step on; what the one before planted is no longer counted."""
        self.plan = plan
        self._open = False
        self._skipped: set[str] = set()
        self._rngs = {name: Rng(plan.seed).split(name) for name in plan.probabilities}
        self._counts = Counter[str]()
        self._places: dict[tuple[str, Part], Places] = {}
        if any(plan.probabilities.values()):
            _log.warning(
                "kv_canary perturbation is on: %s; gate closed for %d steps",
                dict(plan.probabilities),
                plan.warmup_steps,
            )

    def attach(self, lanes: Mapping[Part, PartLanes], *, page_size: int, partial: bool) -> None:
        """Say what may be damaged; once, before the first step. `partial`: not all bytes are digested."""
        self._lanes, self._partial = lanes, partial
        self._shapes = {part: PageShape.of(each, page_size) for part, each in lanes.items()}

    def before(self, checks: StepChecks, batch: ForwardBatch) -> None:
        """Before the step is verified: rows, bytes that it reads, and pages of the host tier."""
        self._step, self._rids = checks.step, checks.rids
        if not self._open and checks.step > self.plan.warmup_steps:
            self._open = True
            if self.plan.probabilities:
                _log.warning("kv_canary perturbation: the gate is open from step %d on", checks.step)
        part = self.plan.target
        if self._due("req_to_token"):
            done = req_to_token.run(
                self._rngs["req_to_token"], self._lanes[part], checks, self.plan.seed + self._counts["req_to_token"]
            )
            self._note("req_to_token", done, "no two slots of different requests are read")
        if self._due("foreign_page"):
            pages, size = self.cached.get(("device", part), np.empty(0, np.int64)), self._shapes[part].page_size
            done = foreign_page.run(self._rngs["foreign_page"], self._lanes[part], checks, pages, size)
            self._note("foreign_page", done, "no page is read that another prompt has a page of the same positions of")
        if self._due("real_kv_used") and (place := self._place("real_kv_used")):
            lanes, spared = self._lanes[part], self._damaged_slots()
            done = real_kv.used(self._rngs["real_kv_used"], lanes, checks, place, spared)
            self._note("real_kv_used", done, "no request reads undamaged KV in this step; later ones are tried")
        if part in self._host and self._due("tier_bytes") and (place := self._place("tier_bytes")):
            rows, pages = self._host[part], self.cached.get(("host", part), np.empty(0, np.int32))
            spared = {done.page for done in self.injections if done.mode == "tier_bytes"}
            pages = np.array([page for page in pages.tolist() if page not in spared], np.int64)
            done = page_bytes.run(
                "tier_bytes", self._rngs["tier_bytes"], rows, pages, part, self._step, self._shapes[part], place,
                is_last_whole=True,
            )  # fmt: skip
            self._note("tier_bytes", done, "the host tier has no undamaged page now; later steps are tried")

    def after(self, checks: StepChecks, batch: ForwardBatch) -> None:
        """After the step was stamped: bytes that it wrote."""
        name = "real_kv_post_forward"
        if self._due(name) and (place := self._place(name)):
            done = real_kv.post_forward(self._rngs[name], self._lanes[self.plan.target], checks, batch, place)
            self._note(name, done, "the request drawn wrote nothing that is kept")

    def returned(self, result: StepResult) -> StepResult:
        """The tokens as the leader gets them."""
        name = "next_token_swap"
        if self._due(name):
            result, injection = next_token_swap.run(self._rngs[name], result, self._rids, self._step)
            self._note(name, injection, "no two requests got different tokens")
        return result

    def sweep(self, part: Part, step: int) -> None:
        """Some cached slots of the part are about to be swept; `step` reports what is found."""
        name = "real_kv_unused_cache"
        if part is self.plan.target and self._due(name) and (place := self._place(name)):
            pages = self.cached.get(("device", part), np.empty(0, np.int64))
            lanes, size, spared = self._lanes[part], self._shapes[part].page_size, self._damaged_slots()
            done = real_kv.unused_cache(self._rngs[name], lanes, pages, size, step, place, spared)
            self._note(name, done, "no undamaged page is cached and free of requests now; later steps are tried")

    def outgoing(self, pools: Mapping[Part, PageStore]) -> Mapping[Part, PageStore]:
        """The pools as a handoff reads them: with the mode transfer_bytes, pages are damaged on their way out."""
        return {part: _TamperedStore(pool, part, self) for part, pool in pools.items()}

    def sent(self, part: Part, pages_GY: NDArray[np.uint8]) -> None:
        """These bytes are about to leave for another engine."""
        name = "transfer_bytes"
        if part is self.plan.target and len(pages_GY) and self._due(name) and (place := self._place(name)):
            done = page_bytes.run(
                name, self._rngs[name], pages_GY, np.arange(len(pages_GY)), part, self._step, self._shapes[part], place,
                is_last_whole=False,
            )  # fmt: skip
            self._note(name, done, "the page has no bytes here")

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _due(self, name: str) -> bool:
        rng = self._rngs.get(name)
        if rng is None or not self._open:
            return False
        if self.plan.count_max and self._counts[name] >= self.plan.count_max:
            return False
        return rng.random() < self.plan.probabilities[name]

    def _place(self, name: str) -> Place | None:
        """Where the next fault of this mode hits."""
        part = self.plan.target
        places = self._places.get((name, part))
        if places is None:
            rng, stamped = Rng(self.plan.seed).split(f"{name} places"), name in ("tier_bytes", "transfer_bytes")
            places = Places(rng, self._shapes[part], partial=self._partial, stamped=stamped)
            self._places[name, part] = places
        place = places.draw()
        if place is None:
            self._note(name, None, "this rank holds nothing that is digested")
        return place

    def _damaged_slots(self) -> set[int]:
        """Slots that hold a fault already: a second one there would prove nothing, or undo the first."""
        part = self.plan.target.name
        recent = self.injections[-_REMEMBERED:]
        return {done.slot for done in recent if done.part == part and done.mode in _ON_DEVICE}

    def _note(self, name: str, injection: Injection | None, why_not: str) -> None:
        if injection is not None:
            self._counts[name] += 1
            if injection.slot and not injection.page:
                size = self._shapes[self.plan.target].page_size
                injection = replace(injection, page=injection.slot // size)
            self.injections.append(injection)
            _log.warning("%s", injection.line())
            return
        if (places := self._places.get((name, self.plan.target))) is not None:
            places.give_back()
        if name not in self._skipped:
            self._skipped.add(name)
            _log.warning("kv_canary not injected: mode=%s step=%d skipped because %s", name, self._step, why_not)


class _TamperedStore:
    """A pool whose pages may be damaged on their way out (PageStore)."""

    def __init__(self, pool: PageStore, part: Part, perturber: Perturber) -> None:
        self._pool, self._part, self._perturber = pool, part, perturber

    @property
    def page_bytes(self) -> int:
        return self._pool.page_bytes

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> object:
        self._pool.read_pages(pages, out)
        self._perturber.sent(self._part, out)
        return out

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        self._pool.write_pages(pages, data)
