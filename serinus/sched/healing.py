"""Heals: a request that read wrong KV, or was sent some, goes back; this engine or a prefill engine computes it again.

Knows no reasons and no bounds: the engine asks, by request. A prompt that a prefill engine computed may be asked for
once more; after that, and where no prefill engine can be asked, it is computed here.
"""

from __future__ import annotations

from collections import deque

from serinus.core.errors import InvariantError
from serinus.sched.incoming import Incoming
from serinus.sched.open_step import OpenStep
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.request_queues import RequestQueues
from serinus.sched.request_state import Healing, Phase
from serinus.sched.settings import SchedSettings


class Heals:
    """The heals of one scheduler's requests."""

    def __init__(
        self, settings: SchedSettings, allocator: PageAllocator, incoming: Incoming, requests: RequestQueues,
        plans: deque[OpenStep],
    ) -> None:  # fmt: skip
        """`plans`: those under way."""
        self._settings, self._allocator, self._incoming = settings, allocator, incoming
        self._requests, self._open = requests, plans
        self._states = requests.states

    def kind_of(self, rid: str) -> Healing:
        """What is to be done about a request that read wrong KV in the step that is committed next."""
        state = self._states.get(rid)
        if state is None or state.aborting or state.phase in (Phase.WAITING, Phase.PREALLOC):
            return Healing.NOTHING
        if state.handoff is not None:
            return Healing.PEER
        if state.phase is Phase.TRANSFER:
            return Healing.TRANSFER
        step = self._open[0] if self._open else None
        if step is not None and any(
            w.rid == rid and s is None for w, s in zip(step.plan.work, step.states, strict=True)
        ):
            return Healing.NOTHING
        return Healing.RUNNING

    def count(self, rid: str) -> int:
        """How often a request was healed; 0 = never, or unknown."""
        return len(self._states[rid].heals) if rid in self._states else 0

    def heal(self, rid: str, reason: str, now: float, *, asks: bool = False, is_last: bool = False) -> None:
        """A running request read wrong KV (`reason`: what was found): it goes back to the last token that is known to
        be right and is computed again at the place of its age, on other pages, from what any tier has of it that is
        sound; the storage is asked once more. `asks`: its prompt is asked for once more too (`address_of`). `is_last`:
        there may be no other heal. Then, and where the heal before brought it no token further, it is computed of its
        tokens alone: whatever copies are sound, what brings them may not be. Steps under way drop what they compute for
        it. Tokens that have left are computed again too: equal ones are not given out twice, the first other one ends
        the request with an error that names it (TokenDelta.wrong_token).

        Raises KeyError where it is unknown, InvariantError where it does not run. Cost: that of a retraction.
        """
        state = self._states[rid]
        if not state.running or state.aborting:
            raise InvariantError(f"sched: request {rid} is healed as {state.phase.name}, expected a running one")
        state.heals.append(reason)
        state.asked_again |= asks
        self._requests.go_back(state, asks=asks)
        state.alone |= is_last or state.healed_at == state.right
        state.healed_at = state.right
        if self._settings.prefetch_policy != "none":
            self._allocator.prefetch(state, now, ahead=False)  # it goes first
        for step in self._open:
            step.forget(state)

    def address_of(self, rid: str) -> str:
        """The prefill engine that computed a request's prompt, where it may be asked for that once more, as the pages
        that came are wrong, or became so; empty = it may not."""
        state = self._states.get(rid)
        if state is None or not self._settings.heals or not state.remote or state.asked_again:
            return ""
        return state.request.prefill_address if state.phase in (Phase.TRANSFER, Phase.DECODE) else ""

    def ask_again(self, rid: str, reason: str) -> None:
        """What came for a request is wrong (`reason`), and its handoff is over: it waits for pages and its prompt once
        more. Raises KeyError where it is not in transfer."""
        state = self._incoming.in_transfer(rid)
        state.heals.append(reason)
        state.asked_again, state.lost = True, state.prompt_len
        self._incoming.wait_again(state)
