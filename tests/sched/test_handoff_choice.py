"""Which prompts are handed over: the first token that comes sooner decides, and only where both engines measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serinus.core.errors import ConfigError
from serinus.sched import PrefillPace, SchedSettings
from serinus.sched.handoff_choice import HandoffChoice
from serinus.sched.step_pace import StepPace
from serinus.testing.builders import make_request
from serinus.testing.handoff_pair import HandoffPair

SLOW = PrefillPace(queue_s=30.0, token_s=0.001)
IDLE = PrefillPace(queue_s=0.0, token_s=0.001)


def test_two_idle_engines_of_one_speed_hand_over() -> None:
    choice = HandoffChoice(1.5)
    choice.landed(2000, 0.1)
    assert not choice.stays(2000, IDLE, IDLE, streams=False)
    assert choice.seconds_there(2000, IDLE) == pytest.approx(2.1)


def test_a_prompt_stays_where_the_prefill_engine_has_a_long_queue() -> None:
    choice = HandoffChoice(1.5)
    assert choice.stays(2000, IDLE, SLOW, streams=False)
    assert choice.stays(2000, IDLE, SLOW, streams=True)


def test_a_queue_here_counts_as_one_there_does() -> None:
    assert not HandoffChoice(1.5).stays(2000, SLOW, SLOW, streams=False)


def test_streams_that_would_wait_send_a_prompt_away() -> None:
    choice, there = HandoffChoice(1.5), PrefillPace(queue_s=2.0, token_s=0.001)
    assert choice.stays(2000, IDLE, there, streams=False), "2 s here, 4 s there"
    assert not choice.stays(2000, IDLE, there, streams=True), "2 s here, and 2 s for the streams"


def test_a_slow_way_keeps_a_prompt_here() -> None:
    choice = HandoffChoice(1.5)
    for tokens in (500, 2000, 1000, 4000):
        choice.landed(tokens, 0.02 + 0.002 * tokens)
    assert choice.seconds_there(2000, IDLE) == pytest.approx(6.02, rel=0.01)
    assert choice.stays(2000, IDLE, IDLE, streams=False)


def test_a_way_that_is_fast_again_is_noticed() -> None:
    choice = HandoffChoice(1.5)
    choice.landed(2000, 60.0)  # the prefill engine stood still
    for _ in range(4):
        stayed = [choice.stays(2000, IDLE, IDLE, streams=False) for _ in range(16)]
        assert stayed == [True] * 15 + [False]
        choice.landed(2000, 0.1)
    for _ in range(20):
        choice.landed(2000, 0.1)
    assert not choice.stays(2000, IDLE, IDLE, streams=False)


@pytest.mark.parametrize("gain", [0.0, 1.5])
def test_nothing_stays_before_both_engines_have_measured(gain: float) -> None:
    choice, unknown = HandoffChoice(gain), PrefillPace(queue_s=30.0)
    assert not choice.stays(2000, PrefillPace(), SLOW, streams=False)
    assert not choice.stays(2000, IDLE, unknown, streams=False)
    assert choice.stays(2000, IDLE, SLOW, streams=False) == bool(gain)


def test_a_gain_below_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="local_gain is -1"):
        SchedSettings(page_size=4, context_length=64, rows=4, vocab_size=100, max_running_requests=3, local_gain=-1.0)


def test_the_pace_of_an_engine_counts_the_steps_that_a_prompt_takes() -> None:
    pace = StepPace(step_s_max=0.0, tokens_max=100, page_size=4)
    assert pace.seconds(250, decodes=False) == 0.0
    for tokens in (20, 100, 40, 80):
        pace.took(0.010 + 0.001 * tokens, prompt_tokens=tokens, decodes=False)
    assert pace.seconds(250, decodes=False) == pytest.approx(3 * 0.010 + 0.250)


def _measured(gain: float) -> HandoffPair:
    """A pair of which the decode engine has computed a prompt by itself."""
    pair = HandoffPair(local_gain=gain)
    pair.decode.add("first", [9] * 22, max_new_tokens=1)
    pair.decode.run()
    assert pair.decode.scheduler.prefill_pace().token_s > 0
    return pair


def _asked(pair: HandoffPair, there: PrefillPace) -> list[str]:
    """Those of two prompts that come at once which are handed over."""
    for rid, token in (("a", 7), ("b", 8)):
        request = make_request(rid, [token] * 22, max_new_tokens=2)
        pair.add(replace(request, prefill_address="tcp://p"), remote=True)
    return [each.rid for each in pair.decode.scheduler.take_reservations(1.0, {"tcp://p": there})]


def test_the_scheduler_computes_here_what_comes_sooner_and_says_so() -> None:
    pair = _measured(1.5)
    assert _asked(pair, SLOW) == []
    assert pair.decode.scheduler.incoming.take_kept() == [("a", "sooner_here"), ("b", "sooner_here")]
    pair.calm()
    usage = pair.decode.answers["a"].last.usage
    assert usage is not None
    assert usage.local_reason == "sooner_here"
    pair.check_answers()


def test_what_is_handed_over_is_ahead_of_what_follows() -> None:
    pair = _measured(1.0)
    here = pair.decode.scheduler
    assert _asked(pair, here.prefill_pace()) == ["a"]
    assert here.incoming.take_kept() == [("b", "sooner_here")]
