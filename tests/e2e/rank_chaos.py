"""Abort storms and lost ranks on real engines of several ranks, round after round.

    python -m tests.e2e.rank_chaos --rounds 200 --seed 1             # one engine
    python -m tests.e2e.rank_chaos --rounds 100 --seed 1 --pairs     # prefill and decode behind their router

A storm: many requests at once; some clients hang up, some requests are aborted by their id, the others must get what
the oracle says; afterwards every gauge of every rank is zero, every page is free or cached, and no rank has more open
files than at the start. Every few rounds a rank, the leader too, is killed or stopped in the middle of a storm: the
engine ends as a whole within 10 s with exit code 3 and names the rank, every client has the right answer or an error in
words, and no process is left. A lost engine is started again in the next shape. Of a pair, one engine loses a rank: the
other stays, `serinus up` starts the lost one again, and prompts are handed over as before.
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
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from serinus.testing.servers import Server

from .cluster import HTTP, busy, engines, handed_over, until
from .grid import MISSED_SOON, SMALL, all_gone, prompts, ranks_of, right, toy

SHAPES = ((2, 1), (1, 2), (2, 2), (1, 3))
"""(TP, PP) of engines, in turn."""
PAIRS = (((1, 2), (1, 1)), ((2, 2), (2, 1)), ((2, 1), (1, 2)))
"""(TP, PP) of prefill and of decode engines, in turn."""
END_S = 10.0
"""A lost rank ends its engine within this time."""
FILES_MORE = 6
"""Open files that a rank may have more than after its first storm."""


ENDS = ("stay", "stay", "leave", "abort")
"""What clients of a storm do, equally often."""


class Storm:
    """Requests to one engine, some of which are left or aborted."""

    def __init__(
        self, url: str, checkpoint: Path, rng: random.Random, count: int, *, ends: Sequence[str] = ENDS
    ) -> None:  # fmt: skip
        self.seen: Counter[str] = Counter()
        self._url = url
        self._checkpoint = checkpoint
        self._rng = rng
        self._plans = [
            (f"storm-{rng.randrange(1 << 40)}", prompt, rng.choice(ends))
            for prompt in prompts(count, rng.randrange(1 << 30))
        ]

    def begin(self, pool: ThreadPoolExecutor) -> list[Future[str]]:
        """Send all requests of the storm."""
        rng = self._rng
        asked = [pool.submit(self._ask, *plan, rng.randint(1, 24), rng.randint(0, 3)) for plan in self._plans]
        for (rid, _, end), answer in zip(self._plans, asked, strict=True):
            if end == "abort":
                pool.submit(self._abort, rid, answer)
        return asked

    def _abort(self, rid: str, answer: Future[str]) -> None:
        """End a request by its id, in whatever state it is, as soon as its front knows it."""
        with contextlib.suppress(httpx.TransportError, KeyError):
            while not answer.done():
                if HTTP.post(f"{self._url}/abort_request", json={"rid": rid}).json()["aborted"]:
                    return

    def _ask(self, rid: str, prompt: list[int], end: str, count: int, events: int) -> str:
        """One client; what became of it, `wrong: ...` where that should not be."""
        count += 100 if end == "abort" else 0
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling}
        try:
            if end == "leave":
                return self._leave(body, events)
            return self._judged(HTTP.post(f"{self._url}/generate", json=body), prompt, count)
        except httpx.TransportError as error:
            return f"cut: {type(error).__name__}"

    def _leave(self, body: dict[str, Any], events: int) -> str:
        with HTTP.stream("POST", f"{self._url}/generate", json={**body, "stream": True}) as answer:
            if answer.status_code >= 400:
                return f"said {answer.status_code}"
            for seen, _ in enumerate(answer.iter_lines()):
                if seen >= events:
                    break
        return "left"

    def _judged(self, answer: httpx.Response, prompt: list[int], count: int) -> str:
        if answer.status_code != 200:
            words = answer.json().get("error", {}).get("message", "")
            return f"said {answer.status_code}" if words else f"wrong: {answer.status_code} without words"
        said, expected = answer.json(), right(self._checkpoint, prompt, count)
        if said["output_ids"] == expected:
            return "right"
        aborted = said["meta_info"]["finish_reason"]["type"] == "abort"
        if aborted and said["output_ids"] == expected[: len(said["output_ids"])]:
            return "aborted"
        return f"wrong: {said['output_ids']}, expected {expected}"

    def judge(self, futures: Sequence[Future[str]], *, calm: bool) -> None:
        """Wait for all answers. With `calm`, no connection may be cut and no answer may say that the engine is gone."""
        for future in futures:
            what = future.result(60)
            self.seen[what] += 1
            assert not what.startswith("wrong"), what
            assert not calm or what in ("right", "aborted", "left"), what


class Engine:
    """One engine under test, by its shape."""

    def __init__(self, checkpoint: Path, shape: tuple[int, int]) -> None:
        tp, pp = shape
        self.server = Server("serve", str(checkpoint), "--tp-size", str(tp), "--pp-size", str(pp), *SMALL, *MISSED_SOON)
        self.server.__enter__()
        self.url = self.server.url
        self.ranks = {name: int(rank["pid"]) for name, rank in ranks_of(self.url).items()}
        self._files: dict[str, int] = {}

    def check(self) -> None:
        """Nothing is left of a storm, on any rank."""
        until(lambda: not busy(self.url), f"all gauges of all ranks are zero: {busy(self.url)}", 30)
        for name, pid in self.ranks.items():
            files = len(os.listdir(f"/proc/{pid}/fd"))
            first = self._files.setdefault(name, files)
            assert files <= first + FILES_MORE, f"{name} has {files} open files, {first} after its first storm"

    def lose(self, name: str, number: signal.Signals) -> float:
        """Kill or stop a rank; seconds until the engine has ended as it should."""
        begun = time.monotonic()
        os.kill(self.ranks[name], number)
        code = self.server.process.wait(END_S)
        seconds = time.monotonic() - begun
        assert code == 3, f"exit code {code} after {number.name} to {name}, expected 3:\n{self.server.output}"
        said = self.server.wait_line(r"the engine unified-0 (ended|died|has lost)", 5)
        assert name in said, f"{said}: expected {name}"
        all_gone(list(self.ranks.values()))
        return seconds


class Pair:
    """A prefill and a decode engine of several ranks, with the face of an Engine."""

    def __init__(self, checkpoint: Path, shape: tuple[tuple[int, int], tuple[int, int]]) -> None:
        words = ["up", str(checkpoint), "--disaggregation-min-tokens", "4", *SMALL, *MISSED_SOON]
        for role, (tp, pp) in zip(("prefill", "decode"), shape, strict=True):
            words += [f"--{role}-tp-size", str(tp), f"--{role}-pp-size", str(pp)]
        self.server = Server(*words)
        self.server.__enter__()
        self.url = self.server.url
        self._look()

    def _look(self) -> None:
        seen = engines(self.url)
        self._lives = {name: info["incarnation"] for name, info in seen.items()}
        self.ranks = {
            f"{name} {rank['name']}": int(rank["pid"]) for name, info in seen.items() for rank in info["ranks"]
        }

    def check(self) -> None:
        """Nothing is left of a storm, on any rank of both; prompts are handed over."""
        until(lambda: not busy(self.url), f"all gauges of all ranks are zero: {busy(self.url)}", 60)
        until(lambda: handed_over(self.url, list(range(40))), "prompts are handed over", 60)

    def lose(self, name: str, number: signal.Signals) -> float:
        """Kill or stop a rank; seconds until its engine has ended. Returns when that engine is back."""
        engine, rank = name.split(" ", 1)
        own = [pid for each, pid in self.ranks.items() if each.startswith(engine)]
        begun = time.monotonic()
        os.kill(self.ranks[name], number)
        all_gone(own)
        seconds = time.monotonic() - begun
        assert seconds < END_S, f"{name} was lost, its engine ended after {seconds:.1f} s"
        said = self.server.wait_line(rf"{engine} .*the engine {engine} (ended|died|has lost).*{rank}", 10)
        assert said

        def is_back() -> bool:
            info = engines(self.url).get(engine)
            return info is not None and info["incarnation"] != self._lives[engine]

        until(is_back, f"{engine} is back", 120)
        self._look()
        return seconds


def run(rounds: int, seed: int, every: int, count: int, *, pairs: bool = False) -> dict[str, Any]:
    """All rounds; what happened. Raises AssertionError for whatever should not."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    ends: dict[str, list[float]] = {}
    engine: Engine | Pair | None = None
    shapes = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2 * count) as pool:
        checkpoint = toy(Path(folder))
        try:
            for index in range(1, rounds + 1):
                if engine is None:
                    if pairs:
                        engine = Pair(checkpoint, PAIRS[shapes % len(PAIRS)])
                    else:
                        engine = Engine(checkpoint, SHAPES[shapes % len(SHAPES)])
                    shapes += 1
                storm = Storm(engine.url, checkpoint, rng, count)
                asked = storm.begin(pool)
                loses = index % every == 0
                if loses:
                    name, number = rng.choice(list(engine.ranks)), rng.choice((signal.SIGKILL, signal.SIGSTOP))
                    ends.setdefault(number.name, []).append(engine.lose(name, number))
                storm.judge(asked, calm=not loses)
                seen += storm.seen
                if loses and (not pairs or index % (3 * every) == 0):
                    engine.server.kill()
                    engine = None
                else:
                    engine.check()
                print(f"round {index}: {dict(storm.seen)}", file=sys.stderr, flush=True)
        finally:
            if engine is not None:
                engine.server.kill()
    return {
        "rounds": rounds,
        "seed": seed,
        "requests": sum(seen.values()),
        "seen": dict(seen),
        "lost": {name: {"count": len(times), "slowest_s": round(max(times), 2)} for name, times in ends.items()},
    }


def main() -> int:
    """Parse the command line and run the rounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=4, help="a rank is lost in each such round")
    parser.add_argument("--count", type=int, default=24, help="requests of a storm")
    parser.add_argument("--pairs", action="store_true", help="prefill and decode engines behind their router")
    arguments = parser.parse_args()
    result = run(arguments.rounds, arguments.seed, arguments.every, arguments.count, pairs=arguments.pairs)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
