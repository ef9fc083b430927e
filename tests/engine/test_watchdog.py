"""The leader's watchdog, alone: who may report, who is missing, and whose fault it is when several fail."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.errors import ConfigError, PeerGone
from serinus.engine.fate import CONFIG_CODE, LOST_CODE, Fate, how_it_ended
from serinus.engine.followers import Followers, shared_settings, signed
from serinus.engine.watchdog import Watchdog, difference
from serinus.parallel import Mesh
from serinus.wire import Arrived, ZmqChannel, decode, encode
from serinus.wire.messages import WatchEnd, WatchHello, WatchWelcome, WatchWords

CLOCK = WallClock()
CONFIG = from_names(ServeConfig, {"tp_size": 2, "pp_size": 2})
SETTINGS = shared_settings(CONFIG)
WELCOME = WatchWelcome(control="ipc:///nowhere", store="127.0.0.1:1", token=b"t")


class Rank:
    """A rank that only talks."""

    def __init__(self, address: str, rank: int, **hello: object) -> None:
        self.channel = ZmqChannel()
        self.channel.connect("leader", address)
        said = {"rank": rank, "pid": 1, "host": "h", "settings": SETTINGS, "mac": signed("", rank, SETTINGS), **hello}
        self.say(WatchHello(**said))  # type: ignore[arg-type]

    def say(self, message: WatchHello | WatchWords) -> None:
        self.channel.send("leader", encode(message))

    def hear(self) -> object:
        """The leader's next word."""
        end = CLOCK.now() + 10
        while CLOCK.now() < end:
            for event in self.channel.poll(0.1):
                return decode(event.parts).message if isinstance(event, Arrived) else event
        raise AssertionError("the leader says nothing")


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., tuple[Watchdog, Fate]]]:
    made: list[Watchdog] = []

    def start(secret: str = "", **processes: subprocess.Popen[bytes]) -> tuple[Watchdog, Fate]:
        fate = Fate(tmp_path / "words")
        watchdog = Watchdog(
            f"ipc://{tmp_path}/watch",
            mesh=Mesh(tp=2, pp=2),
            settings=SETTINGS,
            expected_mac=lambda rank, settings: signed(secret, rank, settings),
            silence_s=2.0,
            clock=CLOCK,
            fate=fate,
            ends_process=False,
        )
        made.append(watchdog)
        watchdog.start(lambda: {int(name[1:]): process for name, process in processes.items()})
        watchdog.welcome(WELCOME)
        return watchdog, fate

    yield start
    for watchdog in made:
        watchdog.close(failure=None)


@pytest.fixture
def ranks() -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(address: str, rank: int, **hello: object) -> Rank:
        made.append(Rank(address, rank, **hello))
        return made[-1]

    yield make
    for rank in made:
        rank.channel.close()


Watch = Callable[..., tuple[Watchdog, Fate]]
Ranks = Callable[..., Rank]


@pytest.mark.slow
def test_ranks_that_report_are_told_where_everything_is_and_those_that_do_not_are_named(
    watch: Watch, ranks: Ranks
) -> None:
    watchdog, _ = watch()
    assert [ranks(watchdog.address, rank).hear() for rank in (1, 3)] == [WELCOME, WELCOME]
    with pytest.raises(ConfigError, match=r"TP0 PP1 did not report at .* within 0\.2 s, expected all 4 ranks"):
        watchdog.gather(0.2)
    ranks(watchdog.address, 2)
    watchdog.gather(10)
    assert [facts.rank for facts in watchdog.facts()] == [1, 2, 3]


@pytest.mark.slow
def test_a_rank_with_other_settings_ends_the_start_and_the_setting_is_named(watch: Watch, ranks: Ranks) -> None:
    watchdog, fate = watch()
    other = shared_settings(from_names(ServeConfig, {"tp_size": 2, "pp_size": 2, "page_size": 32}))
    refused = ranks(watchdog.address, 1, settings=other, mac=signed("", 1, other)).hear()
    assert isinstance(refused, WatchEnd)
    assert (refused.code, "--page-size is 32, expected 16" in refused.reason) == (CONFIG_CODE, True)
    with pytest.raises(ConfigError, match=r"TP1 PP0 on h has other settings than its leader: --page-size is 32"):
        watchdog.gather(10)
    assert Fate.read(fate.folder / "words") == fate.ending  # type: ignore[operator]


@pytest.mark.slow
def test_a_stranger_is_sent_away_and_changes_nothing(watch: Watch, ranks: Ranks) -> None:
    watchdog, fate = watch(secret="s")
    for rank, mac in ((1, b""), (1, signed("other", 1, SETTINGS)), (9, signed("s", 9, SETTINGS))):
        assert isinstance(ranks(watchdog.address, rank, mac=mac).hear(), WatchEnd)
    assert ranks(watchdog.address, 1, mac=signed("s", 1, SETTINGS)).hear() == WELCOME
    assert isinstance(ranks(watchdog.address, 1, mac=signed("s", 1, SETTINGS)).hear(), WatchEnd), "it is here already"
    assert fate.ending is None


@pytest.mark.slow
def test_whose_own_words_they_are_weighs_more_than_whoever_suffers_from_it(watch: Watch, ranks: Ranks) -> None:
    watchdog, fate = watch()
    three = [ranks(watchdog.address, rank) for rank in (1, 2, 3)]
    assert [rank.hear() for rank in three] == [WELCOME] * 3
    three[0].say(WatchWords(reason="lost a rank of its mesh", code=LOST_CODE, suffers=True))
    three[2].say(WatchWords(reason="broke: InvariantError: two and two", code=LOST_CODE))
    ending = fate.wait(10)
    assert ending is not None
    assert ending.reason == "engine: rank TP1 PP1 (pid 1 on h) broke: InvariantError: two and two"
    told = three[1].hear()
    assert told == WatchEnd(reason=ending.reason, code=LOST_CODE)
    with pytest.raises(PeerGone, match="TP1 PP1"):
        watchdog.check()


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_with_its_signal(watch: Watch) -> None:
    processes = {
        f"r{rank}": subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for rank in (1, 2)
    }
    _, fate = watch(**processes)
    processes["r2"].kill()
    ending = fate.wait(10)
    assert ending is not None
    assert ending.reason == "engine: rank TP0 PP1 died of SIGKILL"
    assert processes["r1"].wait(10) == -signal.SIGKILL, "the others end with the engine"
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.slow
def test_a_rank_that_was_told_to_stop_may_end_long_before_the_others(watch: Watch) -> None:
    """One has its last step behind it, another computes for a while: nobody is lost."""
    words = (sys.executable, "-c", "input()")
    processes = {f"r{rank}": subprocess.Popen(words, stdin=subprocess.PIPE) for rank in (1, 2)}
    watchdog, fate = watch(**processes)
    watchdog.dismiss()
    processes["r1"].communicate(b"stop\n")
    assert fate.wait(1.0) is None
    assert processes["r2"].poll() is None
    processes["r2"].communicate(b"stop\n")
    watchdog.close()
    assert (fate.ending, processes["r2"].returncode) == (None, 0)


@pytest.mark.slow
def test_ranks_that_nobody_told_to_stop_are_told_why_they_end_and_not_waited_for(watch: Watch, ranks: Ranks) -> None:
    """They may stand in a collective that their leader was interrupted in."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watchdog, fate = watch(r2=process)
    rank = ranks(watchdog.address, 1)
    assert rank.hear() == WELCOME
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(watchdog.close)
        said = rank.hear()
        closing.result(10)
    assert isinstance(said, WatchEnd)
    assert said.reason == "engine: the leader broke, or was interrupted"
    assert (fate.ending, process.wait(10)) == (None, -signal.SIGKILL)
    assert process.stdin is not None
    process.stdin.close()


def test_a_fate_is_sealed_once_and_read_by_others(tmp_path: Path) -> None:
    fate = Fate(tmp_path / "words")
    assert Fate.read(tmp_path / "words") is None
    first = fate.seal("first", 3)
    assert fate.seal("second", 2) == first
    assert Fate(tmp_path / "words").seal("third", 1).reason == "third", "a process knows what it saw itself"
    assert Fate.read(tmp_path / "words") == first
    (tmp_path / "words").write_text("{")
    assert Fate.read(tmp_path / "words") is None


def test_endings_and_differences_are_said_in_words() -> None:
    assert how_it_ended(-9) == "died of SIGKILL"
    assert how_it_ended(2) == "ended with exit code 2"
    assert difference(SETTINGS, json.dumps({**json.loads(SETTINGS), "canary": {}})).startswith("--kv-canary is None")
    assert (
        difference(SETTINGS, json.dumps({**json.loads(SETTINGS), "newer": {"x": 1}})) == "newer.x is 1, expected None"
    )


def test_ranks_need_not_share_paths_and_secrets_but_never_tell_them() -> None:
    names = {"tp_size": 2, "model_path": "/models/a", "cluster_secret": "secret", "node_rank": 0}
    other = {**names, "model_path": "/data/a", "cluster_secret": "other"}
    one, two = (shared_settings(from_names(ServeConfig, each)) for each in (names, other))
    assert one == two
    assert "secret" not in one.replace("cluster_secret", "")


def test_only_machine_0_has_a_leader() -> None:
    names = {"tp_size": 2, "nnodes": 2, "node_rank": 1, "dist_init_addr": "127.0.0.1:1"}
    with pytest.raises(ConfigError, match="--node-rank is 1, expected 0"):
        Followers(from_names(ServeConfig, names), CLOCK)
