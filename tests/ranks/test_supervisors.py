"""The leader's supervisor alone: which ranks may report, which are missing, which is at fault when several fail."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.errors import ConfigError, PeerGone
from serinus.parallel import Mesh
from serinus.ranks.exit_reason import CONFIG_CODE, LOST_CODE, ExitRecord, exit_words
from serinus.ranks.handshake import difference, shared_settings, signed
from serinus.ranks.leader_supervisor import LeaderSupervisor
from serinus.ranks.links import LeaderLinks
from serinus.ranks.rank_processes import RankProcesses
from serinus.wire import Arrived, ZmqChannel, decode, encode
from serinus.wire.messages import EngineEnd, RankExit, RankHello, RankWelcome

CLOCK = WallClock()
CONFIG = from_names(ServeConfig, {"tp_size": 2, "pp_size": 2})
SETTINGS = shared_settings(CONFIG)
WELCOME = RankWelcome(store="127.0.0.1:1")


class Rank:
    """A rank that only talks."""

    def __init__(self, address: str, rank: int, **hello: object) -> None:
        self.channel = ZmqChannel()
        self.channel.connect("leader", address)
        said = {"rank": rank, "pid": 1, "host": "h", "settings": SETTINGS, "mac": signed("", rank, SETTINGS), **hello}
        self.say(RankHello(**said))  # type: ignore[arg-type]

    def say(self, message: RankHello | RankExit) -> None:
        self.channel.send("leader", encode(message))

    def hear(self) -> object:
        """The leader's next word."""
        end = CLOCK.now() + 60
        while CLOCK.now() < end:
            for event in self.channel.poll(0.1):
                return decode(event.parts).message if isinstance(event, Arrived) else event
        raise AssertionError("the leader says nothing")


class Watched(NamedTuple):
    """A leader without a loop."""

    supervisor: LeaderSupervisor
    links: LeaderLinks
    exit_record: ExitRecord


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def start(secret: str = "", **processes: subprocess.Popen[bytes]) -> Watched:
        exit_record = ExitRecord(tmp_path / "words")
        mesh = Mesh(tp=2, pp=2)
        links = LeaderLinks(
            f"ipc://{tmp_path}/c", mesh=mesh, clock=CLOCK, settings=SETTINGS, secret=secret, silence_s=20.0
        )
        supervisor = LeaderSupervisor(links, silence_s=20.0, clock=CLOCK, exit_record=exit_record, ends_process=False)
        made.append(Watched(supervisor, links, exit_record))
        supervisor.start(lambda: {int(name[1:]): process for name, process in processes.items()})
        links.welcome(WELCOME)
        return made[-1]

    yield start
    for supervisor, links, _ in made:
        supervisor.close(failure=None)
        links.close(0.0)


@pytest.fixture
def ranks() -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(address: str, rank: int, **hello: object) -> Rank:
        made.append(Rank(address, rank, **hello))
        return made[-1]

    yield make
    for rank in made:
        rank.channel.close()


Watch = Callable[..., Watched]
Ranks = Callable[..., Rank]


@pytest.mark.slow
def test_ranks_that_report_are_told_where_everything_is_and_those_that_do_not_are_named(
    watch: Watch, ranks: Ranks
) -> None:
    supervisor, links, _ = watch()
    assert [ranks(links.address, rank).hear() for rank in (1, 3)] == [WELCOME, WELCOME]
    with pytest.raises(ConfigError, match=r"TP0 PP1 did not report at .* within 0\.2 s, expected all 4 ranks"):
        links.gather(supervisor.check, 0.2)
    ranks(links.address, 2)
    links.gather(supervisor.check, 10)
    assert sorted(links.facts) == [1, 2, 3]


@pytest.mark.slow
def test_a_rank_with_other_settings_ends_the_start_and_the_setting_is_named(watch: Watch, ranks: Ranks) -> None:
    supervisor, links, exit_record = watch()
    other = shared_settings(from_names(ServeConfig, {"tp_size": 2, "pp_size": 2, "page_size": 32}))
    refused = ranks(links.address, 1, settings=other, mac=signed("", 1, other)).hear()
    assert isinstance(refused, EngineEnd)
    assert (refused.code, "--page-size is 32, expected 16" in refused.reason) == (CONFIG_CODE, True)
    with pytest.raises(ConfigError, match=r"TP1 PP0 on h has other settings than its leader: --page-size is 32"):
        links.gather(supervisor.check, 10)
    assert ExitRecord.read(exit_record.folder / "words") == exit_record.ending  # type: ignore[operator]


@pytest.mark.slow
def test_a_stranger_is_sent_away_and_changes_nothing(watch: Watch, ranks: Ranks) -> None:
    _, links, exit_record = watch(secret="s")
    for rank, mac in ((1, b""), (1, signed("other", 1, SETTINGS)), (9, signed("s", 9, SETTINGS))):
        assert isinstance(ranks(links.address, rank, mac=mac).hear(), EngineEnd)
    assert ranks(links.address, 1, mac=signed("s", 1, SETTINGS)).hear() == WELCOME
    assert isinstance(ranks(links.address, 1, mac=signed("s", 1, SETTINGS)).hear(), EngineEnd), "it is here already"
    assert exit_record.ending is None


@pytest.mark.slow
def test_a_rank_that_broke_by_itself_is_at_fault_and_not_those_that_suffer_from_it(watch: Watch, ranks: Ranks) -> None:
    supervisor, links, exit_record = watch()
    three = [ranks(links.address, rank) for rank in (1, 2, 3)]
    assert [rank.hear() for rank in three] == [WELCOME] * 3
    three[0].say(RankExit(reason="lost a rank of its mesh", code=LOST_CODE, suffers=True))
    three[2].say(RankExit(reason="broke: InvariantError: two and two", code=LOST_CODE))
    ending = exit_record.wait(60)
    assert ending is not None
    assert ending.reason == "engine: rank TP1 PP1 (pid 1 on h) broke: InvariantError: two and two"
    told = three[1].hear()
    assert told == EngineEnd(reason=ending.reason, code=LOST_CODE)
    with pytest.raises(PeerGone, match="TP1 PP1"):
        supervisor.check()


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_with_its_signal(watch: Watch) -> None:
    processes = {
        f"r{rank}": subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for rank in (1, 2)
    }
    _, _, exit_record = watch(**processes)
    processes["r2"].kill()
    ending = exit_record.wait(60)
    assert ending is not None
    assert ending.reason == "engine: rank TP0 PP1 died of SIGKILL"
    assert processes["r1"].wait(60) == -signal.SIGKILL, "the others end with the engine"
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.slow
def test_a_rank_that_was_told_to_stop_may_end_long_before_the_others(watch: Watch) -> None:
    """One has its last step behind it, another computes for a while: no rank is lost."""
    words = (sys.executable, "-c", "input()")
    processes = {f"r{rank}": subprocess.Popen(words, stdin=subprocess.PIPE) for rank in (1, 2)}
    supervisor, _, exit_record = watch(**processes)
    supervisor.dismiss()
    processes["r1"].communicate(b"stop\n")
    assert exit_record.wait(1.0) is None
    assert processes["r2"].poll() is None
    processes["r2"].communicate(b"stop\n")
    supervisor.close()
    assert (exit_record.ending, processes["r2"].returncode) == (None, 0)


@pytest.mark.slow
def test_ranks_that_were_not_told_to_stop_are_told_why_they_end_and_not_waited_for(watch: Watch, ranks: Ranks) -> None:
    """They may stand in a collective that their leader was interrupted in."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    supervisor, links, exit_record = watch(r2=process)
    rank = ranks(links.address, 1)
    assert rank.hear() == WELCOME
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(supervisor.close)
        said = rank.hear()
        closing.result(60)
    assert isinstance(said, EngineEnd)
    assert said.reason == "engine: the leader broke, or was interrupted"
    assert (exit_record.ending, process.wait(60)) == (None, -signal.SIGKILL)
    assert process.stdin is not None
    process.stdin.close()


def test_a_fate_is_sealed_once_and_read_by_others(tmp_path: Path) -> None:
    exit_record = ExitRecord(tmp_path / "words")
    assert ExitRecord.read(tmp_path / "words") is None
    first = exit_record.record("first", 3)
    assert exit_record.record("second", 2) == first
    assert ExitRecord(tmp_path / "words").record("third", 1).reason == "third", "a process knows what it saw itself"
    assert ExitRecord.read(tmp_path / "words") == first
    (tmp_path / "words").write_text("{")
    assert ExitRecord.read(tmp_path / "words") is None


def test_endings_and_differences_are_said_in_words() -> None:
    assert exit_words(-9) == "died of SIGKILL"
    assert exit_words(2) == "ended with exit code 2"
    assert difference(SETTINGS, json.dumps({**json.loads(SETTINGS), "canary": {}})).startswith("--kv-canary is None")
    assert (
        difference(SETTINGS, json.dumps({**json.loads(SETTINGS), "newer": {"x": 1}})) == "newer.x is 1, expected None"
    )
    for nonsense in ("{", "[]", '{"canary": 1}', '{"canary": ' + "[" * 30_000):
        assert difference(SETTINGS, nonsense) == "they cannot be read"


def test_ranks_need_not_share_paths_and_secrets_but_never_tell_them() -> None:
    names = {"tp_size": 2, "model_path": "/models/a", "cluster_secret": "secret", "node_rank": 0}
    other = {**names, "model_path": "/data/a", "cluster_secret": "other"}
    one, two = (shared_settings(from_names(ServeConfig, each)) for each in (names, other))
    assert one == two
    assert "secret" not in one.replace("cluster_secret", "")


def test_only_machine_0_has_a_leader() -> None:
    names = {"tp_size": 2, "nnodes": 2, "node_rank": 1, "dist_init_addr": "127.0.0.1:1"}
    with pytest.raises(ConfigError, match="--node-rank is 1, expected 0"):
        RankProcesses(from_names(ServeConfig, names), CLOCK)
