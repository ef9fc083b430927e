"""All tests or all benchmarks of a GPU in one command: each piece in a process of its own, which is ended at its limit;
what it had said by then counts. Ends with a line for each piece, and the whole output in files.

    python -m benchmarks.gpu_session tests [--limit SECONDS] [--total 560] [--only NAME ...] [--out FOLDER]
    python -m benchmarks.gpu_session tests_of_gpus      (those that need two GPUs)
    python -m benchmarks.gpu_session benchmarks
    python -m benchmarks.gpu_session benchmarks_of_gpus (slices on two GPUs, and each of the two alone)

`--limit`: seconds for a piece, by default 480 of tests and 150 of benchmarks. `--total`: seconds for all pieces; those
that have none left are named, for a call with `--only`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from serinus.cli.up import gpu_env
from serinus.core.clock import WallClock
from serinus.core.cores import threads_env

__all__ = ["BENCHMARKS_OF_GPUS", "PIECES", "Piece", "run_pieces"]

CLOCK = WallClock()
TESTS = {
    "shared": "e2e/test_gpu.py e2e/test_gpu_http.py pd kernels/test_triton.py kernels/test_peer_exchange.py models"
    " runner engine/test_gpu_overlap.py engine/test_gpu_tiers.py canary pool",
    "memory": "engine/test_gpu_memory.py",
}  # fmt: skip
_PROCESSES = {"shared": min(16, os.cpu_count() or 1)}
"""Of a piece; one by default, which has the card to itself. These compile, or wait for servers, most of their time, and
each has half a gigabyte of the card and more."""
BENCHMARKS = {
    "server": "gpu_server --rounds 2", "engine_64": "gpu_engine --batch 64 --canary none rotating:16",
    "canary": "gpu_canary", "handoff": "gpu_handoff --pairs 3", "tiers": "gpu_tiers --rounds 2",
    "engine": "gpu_engine --batch 1 16 256 --canary none", "kernels": "gpu_kernels", "models": "gpu_models",
    "canary_step": "canary_gpu_step", "load": "gpu_load",
}  # fmt: skip
BENCHMARKS_OF_GPUS = {"slices": (0, 1), "first": (0,), "second": (1,)}
"""The GPUs of an engine, by piece. Those of one kind differ by 2 %, and slices go with the slower one."""
_GRACE_S = 5.0
_LIMITS_S = {"tests": 480.0, "tests_of_gpus": 480.0, "benchmarks": 150.0, "benchmarks_of_gpus": 150.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One process."""

    name: str
    words: tuple[str, ...]
    gpus: tuple[int, ...] = ()
    """Those that it sees; empty = all."""


def _tests(name: str, paths: str, marks: str) -> Piece:
    words = f"-m pytest -p no:benchmark -n {_PROCESSES.get(name, 0)} --dist worksteal --durations 10 -vv -m".split()
    return Piece(name=name, words=(*words, marks, *(f"tests/{path}" for path in paths.split())))


def _benchmark(name: str, words: str, gpus: tuple[int, ...] = ()) -> Piece:
    return Piece(name=name, words=("-m", *f"benchmarks.{words}".split()), gpus=gpus)


PIECES = {
    "tests": [_tests(name, paths, "gpu and not gpus") for name, paths in TESTS.items()],
    "tests_of_gpus": [_tests(name, paths, "gpus") for name, paths in TESTS.items()],
    "benchmarks": [_benchmark(name, words) for name, words in BENCHMARKS.items()],
    "benchmarks_of_gpus": [
        _benchmark(name, f"gpu_engine --batch 64 --canary rotating:16 --tp-size {len(gpus)}", gpus)
        for name, gpus in BENCHMARKS_OF_GPUS.items()
    ],
}  # fmt: skip


def run_pieces(pieces: list[Piece], out: Path, *, limit_s: float, total_s: float) -> list[str]:
    """A line for each: how it ended, in how many seconds, and the last words that it said."""
    out.mkdir(parents=True, exist_ok=True)
    begun, told = CLOCK.now(), []
    for piece in pieces:
        left = min(limit_s, total_s - (CLOCK.now() - begun))
        told.append(f"{piece.name}: not begun" if left <= 0 else _run(piece, out, left))
    return told


def _run(piece: Piece, out: Path, limit_s: float) -> str:
    file, begun = out / f"{piece.name.replace('/', '_')}.txt", CLOCK.now()
    env = gpu_env(piece.gpus, threads_env(1) if "pytest" in piece.words else os.environ)
    with file.open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-u", *piece.words], stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=env,
        )  # fmt: skip
        try:
            how = {0: "ok", 5: "no test"}.get(code := child.wait(limit_s), f"code {code}")
        except subprocess.TimeoutExpired:
            how = "ended at its limit"
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    said = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    results = sum(line.startswith('{"benchmark"') for line in said)
    last = said[-1][:120] if said and not results else f"{results} results"
    return f"{piece.name}: {how}, {CLOCK.now() - begun:.0f} s, {last}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=PIECES)
    parser.add_argument("--limit", type=float)
    parser.add_argument("--total", type=float, default=560)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--out", type=Path, default=Path("build/gpu_session"))
    given = parser.parse_args()
    pieces = [each for each in PIECES[given.what] if not given.only or each.name in given.only]
    limit_s = _LIMITS_S[given.what] if given.limit is None else given.limit
    told = run_pieces(pieces, given.out, limit_s=limit_s, total_s=given.total)
    print("\n".join(told))
    return int(not all(": ok" in line or ": no test" in line for line in told))


if __name__ == "__main__":
    sys.exit(main())
