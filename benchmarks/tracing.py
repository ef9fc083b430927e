"""What traces cost a server: CPU time and throughput with `--otlp-traces-endpoint` and without, in turns.

    python benchmarks/tracing.py [--rounds 12] [--fast]

Two servers with the demo's model; the one that traces sends its spans to a collector (gRPC) in this process. A round is
64 requests, 8 at a time, of 40 prompt and 32 output tokens: short ones on a small model, whose spans weigh most. The
figure is CPU time of all processes of a server, from /proc, so what the client and the collector take is not in it.
Claim: a request that is traced costs less than 1 ms of CPU; one that is not sampled, none of it. Beside it: what a
request costs that is not traced. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from report import emit

import serinus
from serinus.core.clock import WallClock
from serinus.testing.servers import Server
from tests.e2e.otlp import Receiver

CLOCK = WallClock()
MODEL = Path(serinus.__file__).parent / "cli" / "demo" / "model"
REQUESTS, AT_ONCE, PROMPT, OUTPUT = 64, 8, 40, 32
SETTINGS = (
    "--max-total-tokens", "16384", "--page-size", "8", "--max-running-requests", "8", "--decode-log-interval", "0",
    "--skip-tokenizer-init", "--threads", "1",
)  # fmt: skip
HEADERS = {
    "off": {},
    "traced": {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    "not sampled": {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"},
}


def cpu_s(session: int) -> float:
    """CPU seconds of all processes of a session."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(after_name[3]) == session:
            total += int(after_name[11]) + int(after_name[12])
    return total / os.sysconf("SC_CLK_TCK")


def window(server: Server, client: httpx.Client, number: int, headers: dict[str, str]) -> tuple[float, float]:
    """CPU ms of the server for each request, and seconds of the round."""

    def ask(index: int) -> None:
        prompt = [5 + (number * 131 + index * 17 + at * 7) % 200 for at in range(PROMPT)]
        sampling = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        assert client.post(f"{server.url}/generate", json=body, headers=headers).status_code == 200

    begin, before = CLOCK.now(), cpu_s(server.process.pid)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(ask, range(REQUESTS)))
    seconds = CLOCK.now() - begin
    return 1e3 * (cpu_s(server.process.pid) - before) / REQUESTS, seconds


def main() -> None:
    """Measure, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--fast", action="store_true", help="two rounds")
    arguments = parser.parse_args()
    rounds = 2 if arguments.fast else arguments.rounds
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in HEADERS}
    plain_words = ("serve", str(MODEL), *SETTINGS)
    with Receiver() as receiver, httpx.Client(timeout=120) as client:
        words = (*plain_words, "--otlp-traces-endpoint", receiver.grpc_url)
        with Server(*plain_words) as plain, Server(*words) as traced:
            for number in range(-1, rounds):
                for name, headers in HEADERS.items():
                    turn = window(plain if name == "off" else traced, client, number, headers)
                    if number >= 0:  # the first round warms up
                        found[name].append(turn)
        spans = len(receiver.spans)
    cpu = {name: statistics.median(turn[0] for turn in turns) for name, turns in found.items()}
    rate = {
        name: statistics.median(off[1] / turn[1] for off, turn in zip(found["off"], turns, strict=True))
        for name, turns in found.items()
    }
    emit(
        "tracing", rounds=rounds, requests=REQUESTS, prompt=PROMPT, output=OUTPUT,
        spans_per_request=round(spans / (REQUESTS * (rounds + 1)), 1), off_cpu_ms=round(cpu["off"], 2),
        traced_cpu_ms=round(cpu["traced"] - cpu["off"], 2),
        not_sampled_cpu_ms=round(cpu["not sampled"] - cpu["off"], 2),
        traced_throughput=round(rate["traced"], 3), not_sampled_throughput=round(rate["not sampled"], 3), goal_ms=1.0,
    )  # fmt: skip


if __name__ == "__main__":
    main()
