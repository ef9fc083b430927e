"""`serinus demo`: its model tells the codes of a chat, and it says why where it cannot start.

That the three canaries answer the fault as it says is shown from the wheel (test_wheel.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from serinus import LLM, SamplingParams
from serinus.cli.demo.chats import GREETINGS, chat, draw_facts
from serinus.cli.demo.run import MODEL
from serinus.core.rng import Rng
from tests.e2e.cluster import until


@pytest.mark.slow
def test_the_model_of_the_demo_tells_every_code_of_forty_chats_and_greets() -> None:
    rng = Rng(20261122)
    pairs = list(GREETINGS)
    for _ in range(40):
        facts = draw_facts(rng, rng.randint(3, 9))
        pairs += chat(rng, facts, rng.randint(0, 4), [rng.choice(facts)])
    llm = LLM(str(MODEL))
    chats = [[{"role": "user", "content": asked}] for asked, _ in pairs]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=48))
    assert [output.outputs[0].text for output in outputs] == [answer for _, answer in pairs]


def test_it_prints_where_its_model_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "serinus", "demo", "--model-path"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(MODEL)
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 5e6, "the wheel is to stay small"


STAYS = """
from contextlib import suppress
from serinus.cli.demo.group import Group
from serinus.cli.demo.run import MODEL
group = Group(MODEL)
group.wait_ready()
with suppress(KeyboardInterrupt):
    print(group._process.pid, flush=True)
    group.wait_interrupted()
print(group.stop(), flush=True)
"""


@pytest.mark.parametrize(("number", "told"), [(signal.SIGINT, "0\n"), (signal.SIGKILL, "")])
def test_its_engines_end_in_peace_at_ctrl_c_and_when_it_is_killed(number: signal.Signals, told: str) -> None:
    command = [sys.executable, "-c", STAYS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as demo:
        assert demo.stdout is not None
        pid = int(demo.stdout.readline())
        os.killpg(demo.pid, number)  # as a terminal does at Ctrl-C
        assert demo.stdout.read() == told
    until(lambda: not Path(f"/proc/{pid}").exists(), "serinus up ends", 30)


@pytest.mark.proof
def test_a_demo_that_cannot_start_shows_the_reason_and_ends_with_1() -> None:
    command = [sys.executable, "-m", "serinus", "demo"]
    env = {**os.environ, "SERINUS_MAX_TOTAL_TOKENS": "many"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=env)
    assert done.returncode == 1
    assert "the demo failed" in done.stdout
    assert "many" in done.stdout
