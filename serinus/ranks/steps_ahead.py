"""StepsAhead: the runner and the canary of a rank that begins the next step before it reads the one that runs.

    run(plan n)     queue n, where it is not queued yet; queue what n says goes on behind it; wait for n alone
    run(plan n+1)   its work is queued, or even done: write its tables, queue what goes on behind it, wait for n+1

So the device computes while the host reads, commits, plans and sends. Where tokens are chosen by what the step before
gave (a grammar, a penalty), a pass is queued without that, and the first thing of the next plan is to choose them.

Of what was queued, the next plan takes the requests that still go on, and the tokens of the others are dropped. Where
the next plan is another one, all of it is: it has written nothing but KV of positions that its requests had not
computed, on pages that were theirs when it was queued, and whatever is given these pages is queued behind it.

The canary verifies such a pass as any other, by bytes as they are then, and what it finds is told with the step that
the pass was queued for, or with a later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from serinus.canary import CanaryMark, CanaryRank, Finding, RingOverflow
from serinus.core.errors import InvariantError, OutOfMemory
from serinus.core.plan import StepPlan, StepResult, TableWrite
from serinus.ranks.body import Meanwhile
from serinus.runner import Behind, Flight, Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queued:
    """One pass, and what of the canary was queued with it and before."""

    flight: Flight
    mark: CanaryMark | None

    def places(self, plan: StepPlan) -> list[int] | None:
        """Where the work of this plan, which came next, is in the pass; None = it is other work. Raises InvariantError:
        it is said to be where nothing is, or something else."""
        if plan.takes is None:
            return None
        places: list[int] = plan.takes.tolist()
        work = self.flight.work
        if any(
            place >= len(work) or work[place].rid != each.rid for place, each in zip(places, plan.work, strict=True)
        ):
            raise InvariantError(f"ranks: step {plan.step} takes {places} of the pass ahead, expected its own requests")
        return places


class StepsAhead:
    """A body.StepRunner and its body.StepCanary, of a rank whose engine has one stage. All slices queue the same passes
    in the same order: these follow from plans and settings alone."""

    def __init__(self, runner: Runner, canary: CanaryRank | None, meanwhile: Meanwhile | None = None) -> None:
        """`meanwhile`: done before it waits for a device."""
        self.taken = 0
        """Steps that were queued when their plan came, so far..."""
        self.dropped = 0
        """...and those that were queued for no plan."""
        self._runner, self._canary, self._meanwhile = runner, canary, meanwhile
        self._ahead: _Queued | None = None
        """Queued behind the step that was run last."""
        self._mark: CanaryMark | None = None
        """Of the step that was run last..."""
        self._places: list[int] | None = None
        """...and where its work is in the pass; None = in its order."""

    # ---- the canary, as the body calls it -----------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """The runner is about to run this plan."""
        if self._canary is None:
            return
        if self._ahead is not None and plan.takes is not None:
            self._canary.follow(plan)
        else:
            self._canary.begin(plan)

    def returned(self, result: StepResult | None) -> StepResult | None:
        """The runner has run it; returns what the leader is to get."""
        return result if self._canary is None else self._canary.returned(result)

    def abandoned(self) -> None:
        """The runner broke it off."""
        self._mark = None
        if self._canary is not None:
            self._canary.abandoned()

    def found(self) -> tuple[Finding | RingOverflow, ...]:
        """What was not sound, up to the step that was run last. Waits for nothing more than its tokens did."""
        return () if self._canary is None else self._canary.found(self._mark)

    def checked(self) -> list[list[int]] | None:
        """How much was verified of each work of the step that was run last."""
        checked, places = None if self._canary is None else self._canary.checked(self._mark), self._places
        if checked is None or places is None:
            return checked
        return [[slots[place] for place in places] if slots else slots for slots in checked]

    # ---- the runner ---------------------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult | None:
        """Run the step, and queue what goes on behind it. Raises as Runner.run; where there is no memory for what is
        queued ahead, it is not."""
        queued, self._ahead = self._ahead, None
        places = None if queued is None else queued.places(plan)
        self.taken += places is not None
        self.dropped += queued is not None and places is None
        writes: Sequence[TableWrite] = plan.table_writes
        if queued is None or places is None:
            queued, writes = self._launched(plan), ()
        self._mark, self._places, flight = queued.mark, places, queued.flight
        if places is not None and flight.hidden_WE is not None:
            try:
                flight = self._runner.choose(flight, plan, places)
            except OutOfMemory:
                self._runner.write_tables(writes)  # they are not of this step's requests alone
                raise
        self._ahead = self._queued_behind(plan, flight, places, writes)
        if self._ahead is None:
            self._runner.write_tables(writes)
        if self._meanwhile is not None:
            self._meanwhile.do()
        result = self._runner.read(flight)
        if result is None or places is None:
            return result
        return replace(result, step=plan.step, seqs=tuple([result.seqs[place] for place in places]))

    def _launched(self, plan: StepPlan, behind: Behind | None = None) -> _Queued:
        flight = self._runner.launch(plan, behind)
        return _Queued(flight=flight, mark=None if self._canary is None else self._canary.mark())

    def _queued_behind(
        self, plan: StepPlan, flight: Flight, places: Sequence[int] | None, writes: Sequence[TableWrite]
    ) -> _Queued | None:
        """What goes on behind a plan. `flight`: where its tokens are chosen, at these places (None = in its order).
        `writes`: what is to be written into the tables before."""
        ahead, canary = plan.ahead, self._canary
        if ahead is None or not (canary is None or canary.looks_ahead):
            return None
        follows = ahead.follows if places is None else np.array(places, np.int64)[ahead.follows]
        if canary is not None:
            canary.begin_ahead(ahead.work)
        following = StepPlan(step=plan.step + 1, work=ahead.work, table_writes=tuple(writes))
        try:
            return self._launched(following, Behind(flight=flight, follows_B=follows, chooses=ahead.chooses))
        except OutOfMemory:
            if canary is not None:
                canary.abandoned()
            return None
