"""Faults on real processes: router, decode engine and prefill engine as one would run them, a bad network between them.

    python -m tests.e2e.chaos --rounds 200 --seed 1 --backend tcp
    python -m tests.e2e.chaos --rounds 50 --backend cuda_ipc --gpus 0 1 --faults kill stop cut   (on GPUs)

A round: requests with known answers, one fault in some phase of them, then calm. Every answer must be the right one or
an error in words; afterwards all gauges are zero, every page is free or cached, and prompts are handed over again. No
round waits for a time: a pause lasts until the others have given up on the paused one. Only each 25th round stops an
engine for a whole minute, many times longer than every timeout, and lets it go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import httpx

from serinus.cli.up import gpu_env
from serinus.core.free_ports import free_ports
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.testing.oracle import toy_continue
from serinus.testing.proxy import CALM, FaultyProxy, Weather
from serinus.testing.servers import Server

from .cluster import HTTP, QUEUES, handed_over, metric, until

TIMES = (
    "--disaggregation-heartbeat-interval", "0.2", "--disaggregation-peer-timeout", "2",
    "--disaggregation-handoff-timeout", "8",
)  # fmt: skip
SIZES = (
    "--max-total-tokens", "4096", "--page-size", "8", "--chunked-prefill-size", "64", "--context-length", "512",
    "--max-running-requests", "16", "--skip-tokenizer-init",
)  # fmt: skip
PHASES = ("asked", "granted", "travelling", "running")
MINUTE_S = 60.0
MINUTE_EVERY = 25


class Cluster:
    """The three processes and the proxy. What dies stays dead until `heal`."""

    def __init__(self, checkpoint: Path, backend: str, seed: int, gpus: Sequence[int] = ()) -> None:
        """`gpus`: of prefill and of decode; none = both on the CPU."""
        self.checkpoint = checkpoint
        self.backend = backend
        self.gpus = dict(zip(("prefill", "decode"), gpus, strict=False))
        *ports, self.control = free_ports(4)
        self.ports = dict(zip(("prefill", "decode", "router"), ports, strict=True))
        self.proxy = FaultyProxy(f"127.0.0.1:{self.control}", seed=seed)
        self.servers: dict[str, Server] = {}
        self.pids: dict[str, int] = {}

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def __enter__(self) -> Cluster:
        self.proxy.__enter__()
        try:
            self.heal()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self.servers.values():
            server.kill()
        self.proxy.__exit__(kind, error, trace)

    def heal(self) -> None:
        """Start what is dead; good weather; wait until all answer."""
        self.proxy.weather = CALM
        begun = {name: self._begin(name) for name in self.ports if not self._lives(name)}
        for name, server in begun.items():
            self.servers[name] = server.__enter__()
        for name in begun:
            if name != "router":
                self.pids[name] = int(HTTP.get(f"{self.url(name)}/server_info").json()["info"]["pid"])
        until(lambda: HTTP.get(f"{self.url('router')}/health").status_code == 200, "the router sees decode")

    def _lives(self, name: str) -> bool:
        return name in self.servers and self.servers[name].process.poll() is None

    def _begin(self, name: str) -> Server:
        port = self.ports[name]
        if name == "router":
            return Server(
                "router", "--decode", self.url("decode"), "--poll-interval", "0.1", port=port, ready="router on"
            )
        words = ["serve", str(self.checkpoint), "--disaggregation-mode", name, *TIMES, *SIZES]
        words += ["--disaggregation-transfer-backend", self.backend]
        words += ["--device", "cuda" if self.gpus else "cpu"]
        if name == "prefill":
            words += ["--disaggregation-bootstrap-port", str(self.control)]
        else:
            words += ["--disaggregation-prefill-addresses", f"tcp://{self.proxy.address}"]
            words += ["--disaggregation-min-tokens", "16"]
        seen = (self.gpus[name], *self.gpus.values()) if self.gpus else ()
        return Server(*words, port=port, env=gpu_env(tuple(dict.fromkeys(seen)), os.environ))

    # ---- faults -----------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """SIGKILL: to an engine process, or to the router; returns when the server has ended."""
        if name == "router":
            self.servers[name].process.kill()
        else:
            os.kill(self.pids[name], signal.SIGKILL)
        self.servers[name].process.wait(60)
        self.servers[name].kill()

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """SIGSTOP, later SIGCONT, to an engine process."""
        os.kill(self.pids[name], signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pids[name], signal.SIGCONT)

    # ---- looks ------------------------------------------------------------------------------------------------

    def gauge(self, name: str, of: str) -> float:
        """A gauge of one engine; 0 where it is gone."""
        try:
            return metric(self.url(of), name)
        except httpx.HTTPError:
            return 0.0

    def peer_state(self) -> str:
        """What decode says of prefill."""
        peers = HTTP.get(f"{self.url('decode')}/server_info").json()["load"].get("peers", [])
        return str(peers[0]["state"]) if peers else ""

    def left_over(self) -> dict[str, float]:
        """Gauges that should be zero and are not, and pages without an owner."""
        left: dict[str, float] = {}
        for name in ("prefill", "decode"):
            left |= {f"{name} {gauge}": value for gauge in QUEUES if (value := metric(self.url(name), gauge))}
            for state in ("request", "quarantined", "copy"):
                value = metric(self.url(name), "pages", state=state)
                left |= {f"{name} pages {state}": value} if value else {}
        return left


class Chaos:
    """Rounds on one cluster."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.rng = random.Random(seed)
        self.spec = load_spec(cluster.checkpoint)
        self.counts: Counter[str] = Counter()
        self.faults: dict[str, Callable[[str], None]] = {
            "kill prefill": lambda phase: self._kill("prefill", phase),
            "kill decode": lambda phase: self._kill("decode", phase),
            "kill router": lambda phase: self._kill("router", phase),
            "stop prefill": self._stop_prefill,
            "stop decode": self._stop_decode,
            "cut": self._cut,
            "flips": lambda phase: self._storm(Weather(flips_per_mb=6.0)),
            "cuts": lambda phase: self._storm(Weather(cuts_per_mb=6.0)),
            "delay": lambda phase: self._storm(Weather(delay_s=0.02)),
            "all at once": lambda phase: self._storm(Weather(delay_s=0.01, flips_per_mb=4.0, cuts_per_mb=4.0)),
        }
        self.minutes: dict[str, Callable[[str], None]] = {
            "stop prefill for a minute": lambda phase: self._stop_a_minute("prefill", phase),
            "stop decode for a minute": lambda phase: self._stop_a_minute("decode", phase),
        }
        self.waiting: list[Future[httpx.Response]] = []

    def round(self, fault: str, phase: str) -> None:
        """One fault in one phase. Raises AssertionError where something is wrong afterwards."""
        cluster, rng = self.cluster, self.rng
        until(lambda: handed_over(cluster.url("decode"), self._prompt(200)), "prompts are handed over")
        load = [(self._prompt(rng.randint(20, 420)), rng.randint(4, 40)) for _ in range(rng.randint(3, 10))]
        self.before = {of: cluster.gauge("num_requests_total", of) for of in ("decode", "prefill")}
        self.landed = cluster.gauge("kv_transfer_pages_total", "decode")
        with ThreadPoolExecutor(len(load)) as pool:
            self._ask = lambda: [pool.submit(self._generate, prompt, count) for prompt, count in load]
            self.waiting = []
            (self.faults | self.minutes)[fault](phase)
            answers = [self._outcome(future) for future in self.waiting]
        for (prompt, count), (status, said) in zip(load, answers, strict=True):
            if status == 200:
                assert said == toy_continue(self.spec, prompt, count), "a wrong answer"
                self.counts["answers right"] += 1
            else:
                assert status in (0, 502, 503), f"status {status} says {said!r}"
                assert said, f"status {status} says nothing"
                assert fault.startswith(("kill", "stop decode")), f"{fault} is no reason for {status}: {said}"
                self.counts["errors in words"] += 1
        cluster.heal()
        until(lambda: not cluster.left_over(), "all gauges at zero", 60)
        self.counts[fault] += 1

    # ---- requests -----------------------------------------------------------------------------------------------

    def _prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(self.spec.vocab_size) for _ in range(length)]

    def _generate(self, prompt: list[int], count: int) -> httpx.Response:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        return HTTP.post(f"{self.cluster.url('router')}/generate", json=body)

    def _outcome(self, future: Future[httpx.Response]) -> tuple[int, object]:
        """(status, tokens or words); status 0 = the router itself was gone."""
        error = future.exception()
        if isinstance(error, httpx.TransportError) and self.cluster.servers["router"].process.poll() is not None:
            return 0, repr(error)
        answer = future.result()
        if answer.status_code == 200:
            return 200, answer.json()["output_ids"]
        return answer.status_code, answer.json()["error"]["message"]

    def _reach(self, phase: str) -> None:
        """Ask everything; return when the first request is in this phase (or past it)."""
        self.waiting = self._ask()
        if phase == "asked":
            return
        cluster = self.cluster
        gauge = {
            "granted": lambda: cluster.gauge("num_decode_transfer_queue_reqs", "decode") > 0,
            "travelling": lambda: cluster.gauge("kv_transfer_pages_total", "decode") > self.landed,
            "running": lambda: cluster.gauge("num_running_reqs", "decode") > 0,
        }[phase]
        until(lambda: gauge() or any(future.done() for future in self.waiting), f"a request is {phase}")

    # ---- faults -------------------------------------------------------------------------------------------------

    def _kill(self, name: str, phase: str) -> None:
        if phase == "granted" and name == "prefill":  # none may get further
            with contextlib.suppress(ProcessLookupError), self.cluster.stopped("prefill"):
                self._reach(phase)
                self.cluster.kill(name)
            return
        self._reach(phase)
        self.cluster.kill(name)

    def _stop_prefill(self, phase: str) -> None:
        """Until decode has given it up; what it sends when it goes on must do no harm."""
        if phase == "granted":
            with self.cluster.stopped("prefill"):
                self._reach(phase)
                until(lambda: self.cluster.peer_state() == "down", "decode gave prefill up")
                for future in self.waiting:
                    future.exception()  # all are answered while it stands still
            return
        self._reach(phase)
        with self.cluster.stopped("prefill"):
            until(lambda: self.cluster.peer_state() == "down", "decode gave prefill up")

    def _stop_decode(self, phase: str) -> None:
        """Until prefill has given it up and freed everything."""
        self._reach(phase)
        prefill = self.cluster.url("prefill")

        def free() -> bool:
            info = HTTP.get(f"{prefill}/server_info").json()["load"]
            return not info.get("peers") and not any(metric(prefill, gauge) for gauge in QUEUES)

        with self.cluster.stopped("decode"):
            until(free, "prefill gave decode up")

    def _stop_a_minute(self, name: str, phase: str) -> None:
        """Longer than every timeout of every process; then it goes on as if nothing had happened."""
        self._reach(phase)
        with self.cluster.stopped(name):
            threading.Event().wait(MINUTE_S)  # the minute itself is the fault

    def _cut(self, phase: str) -> None:
        self._reach(phase)
        self.cluster.proxy.cut()
        self.counts["connections cut"] += 1

    def _storm(self, weather: Weather) -> None:
        flipped, cut = self.cluster.proxy.flipped, self.cluster.proxy.cut_count
        self.cluster.proxy.weather = weather
        self.waiting = self._ask()
        for future in self.waiting:
            future.exception()
        self.cluster.proxy.weather = CALM
        self.counts["bits flipped"] += self.cluster.proxy.flipped - flipped
        self.counts["connections cut"] += self.cluster.proxy.cut_count - cut


def run(
    rounds: int, seed: int, backend: str, gpus: Sequence[int] = (), faults: Sequence[str] = ("",)
) -> dict[str, object]:
    """All rounds, with a progress bar on stderr; the result as plain data. Raises AssertionError at the first fault.

    `gpus`: as of a Cluster; `faults`: how the names of those begin that are drawn from.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    rng = random.Random(seed)
    begun = time.monotonic()
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_toy(Path(folder) / "toy", kv_heads=4, head_size=32, tokenizer=False)
        with (
            Cluster(checkpoint, backend, seed, gpus) as cluster,
            Progress(*columns, console=Console(stderr=True)) as bar,
        ):
            chaos = Chaos(cluster, seed)
            task = bar.add_task("", total=rounds)
            for number in range(rounds):
                kinds = [kind for kind in chaos.faults if kind.startswith(tuple(faults))]
                if number % MINUTE_EVERY == MINUTE_EVERY - 1:
                    kinds = list(chaos.minutes)
                fault, phase = rng.choice(kinds), rng.choice(PHASES)
                bar.update(task, description=f"{fault}, {phase}")
                try:
                    chaos.round(fault, phase)
                except BaseException:
                    logs = "\n".join(server.output[-4000:] for server in cluster.servers.values())
                    print(f"round {number} of seed {seed} ({backend}): {fault}, {phase}\n{logs}", file=sys.stderr)
                    raise
                bar.advance(task)
            counts = dict(sorted(chaos.counts.items()))
    seconds = round(time.monotonic() - begun)
    said = {"chaos": backend, "gpus": list(gpus), "seed": seed, "rounds": rounds}
    return {**said, "seconds": seconds, "counts": counts}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Faults on real processes")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", choices=("tcp", "shm", "cuda_ipc"), default="tcp")
    parser.add_argument("--gpus", type=int, nargs=2, default=(), help="of prefill and of decode; none = the CPU")
    parser.add_argument("--faults", nargs="+", default=("",), choices=("", "kill", "stop", "cut"), help="only these")
    args = parser.parse_args(words)
    print(json.dumps(run(args.rounds, args.seed, args.backend, args.gpus, args.faults)))


if __name__ == "__main__":
    main()
