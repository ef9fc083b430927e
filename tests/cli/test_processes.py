"""Processes: what is refused before anything loads, which process ends with which, which is started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serinus.cli import main
from serinus.cli.processes import stop_server, told_to_end
from serinus.cli.shape import check_shape
from serinus.cli.up import members
from serinus.core.config import ServeConfig, UpConfig, from_names
from serinus.core.cores import cores, engine_threads, threads_env
from serinus.core.errors import ConfigError
from serinus.core.free_ports import free_ports
from serinus.core.settings import ServerSettings
from serinus.models.small_checkpoints import make_toy
from serinus.testing.servers import Server

SMALL = ("--max-total-tokens", "1024", "--context-length", "256")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def refused(*words: str) -> tuple[int, str]:
    """Exit code and stderr of a command that should end by itself."""
    done = subprocess.run(
        [sys.executable, "-m", "serinus", *words], capture_output=True, text=True, check=False, timeout=240
    )
    return done.returncode, done.stderr


def child_pid(server: Server, module: str) -> int:
    """The process with `module` in its command line, among the descendants of a server."""
    found = _descendant(server.process.pid, module)
    assert found, f"no {module} under {server.process.pid}:\n{server.output}"
    return found


def _descendant(pid: int, module: str) -> int:
    """0 = none now. Threads and processes may end while we look: what is gone has no descendants."""
    found = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in _lines(task / "children").split():
                words = _lines(Path(f"/proc/{child}/cmdline")).split("\0")
                found = found or (int(child) if module in words else _descendant(int(child), module))
    return found


def _lines(file: Path) -> str:
    """What a file of /proc says; nothing where its process is gone."""
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until_gone(pid: int) -> None:
    """Return when a process that is no child of ours has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([handle], [], [], 120)
        assert ended, f"process {pid} is still there"
    finally:
        os.close(handle)


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "\nState:\tZ" not in status.read_text()


# ---- before anything starts -------------------------------------------------------------------------------------


def test_threads_are_shared_between_the_engines_of_a_machine() -> None:
    assert engine_threads(None, 1) == cores()
    assert engine_threads(None, 10 * cores()) == 1
    assert engine_threads(3, 10) == 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tp_size": 3}, "tp_size is 3"),
        ({"pp_size": 4}, "pp_size is 4, expected at most 3"),
        ({"pp_size": 2, "pp_layer_partition": "2,2"}, "with the sum 3"),
        ({"pp_layer_partition": "2"}, "with the sum 3"),
        (
            {"tp_size": 2, "json_model_override_args": "[1]"},
            r"json_model_override_args is '\[1\]', expected a JSON object",
        ),
    ],
)
def test_ranks_that_a_model_cannot_be_shared_among_are_refused_before_any_starts(
    toy: Path, wrong: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_shape(from_names(ServeConfig, {"model": str(toy), **wrong}))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"kv_canary_perturb": "req_to_tokens=1"}, "'req_to_tokens', expected one of req_to_token"),
        ({"kv_canary_perturb": "real_kv_used=1", "kv_canary_real_data": "none"}, "--kv-canary-real-data is none"),
        ({"kv_canary_perturb": "req_to_token=1", "kv_canary_perturb_target": "swa"}, "no layers of; expected full"),
        ({"kv_canary_perturb": "transfer_bytes=1", "kv_canary_real_data": "all"}, "--disaggregation-mode prefill"),
        ({"kv_canary_perturb": "req_to_token=1", "kv_canary_perturb_rank": 1}, "rank is 1, expected one of 0"),
        (
            {"kv_canary_perturb": "real_kv_used=1", "kv_canary_real_data": "partial", "tp_size": 2,
             "kv_canary_perturb_rank": 1}, "its head 0, which alone is digested",
        ),
        ({"kv_canary_perturb_rank": 1}, "without --kv-canary-perturb, expected both or neither"),
    ],
)  # fmt: skip
def test_faults_that_the_model_or_the_engine_cannot_have_are_refused_before_any_process_starts(
    tmp_path: Path, plan: dict[str, Any], said: str
) -> None:
    toy = make_toy(tmp_path / "toy", kv_heads=2, tokenizer=False)
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_shape(from_names(ServeConfig, {"model": str(toy), "kv_canary": "log", **plan}))
    check_shape(from_names(ServeConfig, {"model": str(toy), "kv_canary": "log", "kv_canary_perturb": "req_to_token=1"}))


def test_a_model_that_is_not_here_is_left_to_its_ranks(toy: Path) -> None:
    left = from_names(ServeConfig, {"model": "some/hub-id", "tp_size": 3})
    fits = from_names(ServeConfig, {"model": str(toy), "pp_size": 3})
    assert [check_shape(each) for each in (left, fits)] == [None, None]


def test_free_ports_are_different_ones_that_no_connection_gets() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert not any(low <= port <= high for port in ports)


def test_too_few_free_ports_are_said() -> None:
    with pytest.raises(ConfigError, match=r"ports of 127\.0\.0\.1 are free, expected 70000"):
        free_ports(70_000)


def test_a_group_has_prefill_engines_before_decode_engines_each_with_its_name_and_port() -> None:
    group = members(from_names(UpConfig, {"model": "m", "prefill": 1, "decode": 2}))
    assert [member.name for member in group] == ["prefill-0", "decode-0", "decode-1"]
    assert len({member.url for member in group}) == 3
    assert [member.config.role for member in group] == ["prefill", "decode", "decode"]


def test_a_group_without_prefill_engines_is_made_of_whole_ones() -> None:
    group = members(from_names(UpConfig, {"model": "m", "prefill": 0, "decode": 2}))
    assert [member.name for member in group] == ["unified-0", "unified-1"]
    assert {member.config.pd.mode for member in group} == {"null"}


@pytest.mark.slow
@pytest.mark.parametrize("words", [("serve", "{toy}"), ("up", "{toy}"), ("router", "--decode", "http://127.0.0.1:1")])
def test_a_port_in_use_is_said_before_anything_is_loaded(words: tuple[str, ...], toy: Path, taken_port: int) -> None:
    code, err = refused(*(word.format(toy=toy) for word in words), "--port", str(taken_port))
    assert code == 2
    assert f"port {taken_port}" in err
    assert "Traceback" not in err
    assert "KV Cache" not in err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", pytest.param("up", marks=pytest.mark.proof)])
def test_a_checkpoint_that_is_not_there_ends_with_2_and_its_name(command: str) -> None:
    code, err = refused(command, "./no-such-checkpoint", "--port", "0")
    assert code == 2
    assert err.splitlines() == [
        f"serinus {command}: models: no directory './no-such-checkpoint', expected a directory with config.json, "
        "a GGUF file (*.gguf) or a hub id such as org/name"
    ]


@pytest.mark.parametrize("command", ["serve", "up"])
def test_a_path_that_is_no_checkpoint_is_refused_before_a_port_is_bound(
    command: str, tmp_path: Path, taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine would be started behind the port."""
    for path, wrong in ((tmp_path, "has no config.json"), (tmp_path / "none.gguf", "no file")):
        assert main([command, str(path), "--port", str(taken_port)]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert str(path) in said
        assert wrong in said
        assert "port" not in said


@pytest.mark.parametrize("source", ["nowhere.jinja", "{% if %}", "latin-1.jinja"])
def test_a_chat_template_that_is_none_is_refused_before_a_port_is_bound(
    source: str, toy: Path, tmp_path: Path, taken_port: int, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The engine would load its model first."""
    monkeypatch.chdir(tmp_path)
    Path("latin-1.jinja").write_bytes(b"\xe4")
    assert main(["serve", str(toy), "--chat-template", source, "--port", str(taken_port)]) == 2
    said = capsys.readouterr().err
    assert "chat template" in said
    assert "port" not in said


# ---- a running server -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_when_its_engine_dies_a_server_says_so_and_ends_with_1(toy: Path) -> None:
    with Server("serve", str(toy), *SMALL) as server:
        os.kill(child_pid(server, "serinus.engine.process"), signal.SIGKILL)
        server.wait_line("engine unified-0 died of SIGKILL")
        assert server.process.wait(60) == 1


@pytest.mark.slow
def test_an_engine_dies_with_its_front(toy: Path) -> None:
    with Server("serve", str(toy), *SMALL) as server:
        engine = child_pid(server, "serinus.engine.process")
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until_gone(engine)
        assert not is_alive(engine)


@pytest.mark.proof
def test_a_server_leaves_no_directory_behind(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Server("serve", str(toy), *SMALL) as server:
        assert [path.name.startswith("serinus-") for path in tmp_path.iterdir()] == [True]
        assert server.stop() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_server_that_is_to_end_at_once_leaves_no_directory_behind(toy: Path, tmp_path: Path) -> None:
    async def start_and_stop() -> int:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "serinus", "serve", str(toy), "--port", "0", *SMALL),
            env={**threads_env(1), "TMPDIR": str(tmp_path)},
            stderr=asyncio.subprocess.PIPE,
            process_group=0,
        )
        assert process.stderr is not None
        assert b"serinus: " in await process.stderr.readline()  # the directory is there, HTTP is not yet
        return await stop_server(process, s_max=0.0)

    assert asyncio.run(start_and_stop()) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_signal_that_comes_in_a_callback_while_a_server_imports_ends_it(toy: Path, tmp_path: Path) -> None:
    """An exception in a callback of a weak reference is dropped."""
    code = (
        "import signal, sys, weakref; from serinus.cli import main\n"
        "class Thing: pass\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'serinus.front.app':\n"
        "            self.ref = weakref.ref(Thing(), lambda _: signal.raise_signal(signal.SIGTERM))\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", str(toy), *SMALL, "--port", "0"],
        env={**threads_env(1), "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_ends_a_server_ends_one_that_does_not_listen_yet_too(
    told: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)  # this suite may run under nohup

    async def ends(settings: ServerSettings) -> bool:
        event = told_to_end(settings)
        signal.raise_signal(told)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), 0.1)
        return event.is_set()

    assert asyncio.run(ends(ServerSettings()))
    rereads = told == signal.SIGHUP  # with such a file it asks for that to be read again
    assert asyncio.run(ends(ServerSettings(api_keys_file="keys.jsonl"))) is not rereads


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unified-0", "unified-1"])
def test_up_that_is_told_to_end_before_it_listens_ends_its_engines_and_nothing_else_is_said(
    toy: Path, name: str
) -> None:
    """Between two engines it waits; behind the last one it imports what HTTP needs."""
    code = (
        "import signal, sys; from serinus.cli import main, up; spawn = up._Group._spawn\n"
        "async def spawn_and_tell(group, member):\n"
        "    await spawn(group, member)\n"
        f"    if member.name == {name!r}: signal.raise_signal(signal.SIGINT)\n"
        "up._Group._spawn = spawn_and_tell\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["up", str(toy), *SMALL, "--port", "0", "--prefill", "0", "--decode", "2"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "all engines have stopped" in done.stderr
    own = [line for line in done.stderr.splitlines() if not line.lstrip().startswith("unified-")]
    assert not [line for line in own if "Traceback" in line], done.stderr


@pytest.mark.slow
def test_an_engine_of_a_front_that_has_removed_its_settings_says_so(tmp_path: Path) -> None:
    words = ["--config", str(tmp_path / "config.json"), "--endpoint", f"ipc://{tmp_path}/engine"]
    code = f"import os, sys; from serinus.engine.process import main; main([*{words!r}, '--parent', str(os.getppid())])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"engine: no settings at {tmp_path}/config.json, expected them there: the front has ended"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "first", "shown"),
    [
        ("0", "unified-0", r"http://127.0.0.1:\d+ "),
        pytest.param("1", "prefill-0", r"http://127.0.0.1:\d+ .* tcp://127.0.0.1:\d+ ", marks=pytest.mark.proof),
    ],
)
def test_up_starts_a_dead_engine_again_and_takes_all_down_with_it(
    toy: Path, prefill: str, first: str, shown: str
) -> None:
    with Server("up", str(toy), *SMALL, "--prefill", prefill, "--decode", "1", host="::1") as server:
        assert server.url.startswith("http://[::1]:")
        assert re.search(rf"{first} .* {shown}", server.output)
        engine = child_pid(server, "serinus.engine.process")
        os.kill(engine, signal.SIGKILL)
        server.wait_line(r"\d-\d\d .* ended with exit code 1, restart in 0.5 s")
        server.wait_line(rf"{first} is back after")
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
        left = [child_pid(server, "--child"), child_pid(server, "serinus.engine.process")]
        os.kill(server.process.pid, signal.SIGKILL)
        for pid in left:
            wait_until_gone(pid)
            assert not is_alive(pid)


@pytest.mark.proof
def test_an_engine_that_cannot_be_started_again_is_tried_again(toy: Path) -> None:
    """A machine without a free process, or file, is so for a moment."""
    with Server("up", str(toy), *SMALL, "--prefill", "0", "--decode", "1") as server:
        allowed = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        engine = child_pid(server, "--child")
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, allowed[1]))
        os.kill(engine, signal.SIGKILL)
        server.wait_line(r"could not be started \(.*Too many open files\), restart in 1 s")
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, allowed)
        server.wait_line("is back after")
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200


@pytest.mark.proof
def test_an_engine_that_dies_while_it_starts_again_is_started_again(toy: Path) -> None:
    with Server("up", str(toy), *SMALL, "--prefill", "0", "--decode", "1") as server:
        first = child_pid(server, "--child")
        os.kill(first, signal.SIGKILL)
        server.wait_line(r"ended with exit code -9, restart in 0.5 s")
        second = 0
        while second in (0, first) and server.process.poll() is None:
            second = _descendant(server.process.pid, "--child")
        os.kill(second, signal.SIGKILL)
        server.wait_line(r"ended with exit code -9, restart in 1 s")
        server.wait_line(r"unified-0 is back after")
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200


@pytest.mark.proof
def test_up_without_restart_ends_when_an_engine_does(toy: Path) -> None:
    with Server("up", str(toy), *SMALL, "--prefill", "0", "--decode", "1", "--no-restart") as server:
        os.kill(child_pid(server, "serinus.engine.process"), signal.SIGKILL)
        server.wait_line(r"unified-0 ended with exit code 1 and is not restarted")
        assert server.process.wait(60) == 1


@pytest.mark.slow
def test_the_doctor_finds_nothing_wrong_with_a_whole_checkpoint(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(toy)]) == 0
    out = capsys.readouterr().out
    assert "SerinusToyForCausalLM" in out
    for row in ("extra nixl", "extra mooncake", "all ops on column cpu", "off (--enable-hierarchical-cache)"):
        assert row in out
    assert main(["doctor", str(tmp_path)]) == 1
    assert "bad" in capsys.readouterr().out


def test_an_engine_spins_little_unless_the_operator_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert threads_env(2)["GOMP_SPINCOUNT"] == "5000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert threads_env(2)["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in threads_env(2)
