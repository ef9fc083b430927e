"""How long a handoff may take, and what prefill knows of a request's own timeout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serinus.pd import AbortPrefill, PrefillSide, PrepareHandoff, Recompute, Tick
from serinus.wire.messages import Fail, Hello, Prepare
from tests.pd.steps import greeted, of_type, sent, start_event, tell
from tests.pd.tiny import LAYOUT, make_request, make_settings


def test_every_handoff_has_a_deadline_on_both_sides() -> None:
    side = greeted(handoff_s_max=10.0)
    side.handle(start_event(), 0.0)
    out = side.handle(Tick(), 10.5)
    assert [r.code for r in of_type(out, Recompute)] == ["deadline"]
    assert isinstance(sent(out)[0], Fail)
    prefill = PrefillSide(make_settings("p", 2))
    tell(prefill, "in-1", Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm",), host="here"))
    prepare = Prepare(xid="x", grant=1, request=make_request("r", 9), held=0, deadline_s=3.0)
    tell(prefill, "in-1", prepare)
    end = prefill.handle(Tick(), 3.5)
    assert [action.code for action in of_type(end, AbortPrefill)] == ["deadline"]
    assert next(m for m in sent(end) if isinstance(m, Fail)).code == "deadline"


@pytest.mark.parametrize(("timeout_s", "asked_at", "left_s"), [(9.0, 14.0, 5.0), (9.0, 19.5, 1e-3), (0.0, 14.0, 0.0)])
def test_prefill_is_told_what_is_left_of_a_timeout(timeout_s: float, asked_at: float, left_s: float) -> None:
    """It came at 10 s, and waited for pages here. Prefill has another clock, and orders prompts by what is left."""
    event = start_event()
    request = replace(event.request, timeout_s=timeout_s, arrival=10.0)
    (prepare,) = sent(greeted().handle(replace(event, request=request), asked_at))
    assert isinstance(prepare, Prepare)
    assert prepare.request.timeout_s == left_s


def test_a_handoff_that_waits_in_a_long_queue_has_until_its_deadline() -> None:
    side = greeted(handoff_s_max=500.0, silence_s_max=1000.0)
    side.handle(start_event(), 0.0)
    assert not of_type(side.handle(Tick(), 499.0), Recompute)
    assert [r.code for r in of_type(side.handle(Tick(), 501.0), Recompute)] == ["deadline"]


def test_the_deadline_of_a_prompt_that_was_asked_for_early_counts_again_from_its_grant() -> None:
    side, event = greeted(handoff_s_max=10.0), start_event()
    (prepare,) = sent(side.handle(PrepareHandoff(rid="r", request=event.request, address="p0"), 0.0))
    prefill = PrefillSide(make_settings("p", 2))
    tell(prefill, "in-1", Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm",), host="here"))
    tell(prefill, "in-1", prepare)
    (grant,) = sent(side.handle(event, 9.0))
    tell(prefill, "in-1", grant, 9.0)
    for now, over in ((18.5, False), (19.5, True)):
        assert bool(of_type(side.handle(Tick(), now), Recompute)) == over
        assert bool(of_type(prefill.handle(Tick(), now), AbortPrefill)) == over
