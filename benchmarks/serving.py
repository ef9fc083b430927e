"""What serving costs beside the engine itself: HTTP, tokenizer and detokenizer at 16 streams; a handoff; a start.

Claims: `serinus serve` reaches 97 % of the tokens per second of `LLM` at 16 streams, clients on the same machine, both
with prompts cut to the same longest step (`--max-step-ms`; what that costs stands beside it); handing 2,000 tokens of
the 221M model from a prefill to a decode engine (shm) costs at most 10 % of their prefill time; `serinus up` is ready
within 10 s. Peer of each number: the same job without that part, in the same run. Engines are made anew `--draws`
times: where weights and pools lie makes one up to 4 % slower than another; of a draw the median of its rounds counts,
of the draws the mean.

    python benchmarks/serving.py [--draws 5] [--rounds 3] [--checkpoint DIR]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from model import checkpoint_221m
from report import emit, mean_error

from serinus.core.clock import WallClock
from serinus.core.rng import Rng
from serinus.testing.servers import Server

CLOCK = WallClock()
STREAMS, PROMPT, OUTPUT, HANDED = 16, 256, 64, 2000

_OFFLINE = """
import json, sys
from model import one_model
from serinus import LLM, SamplingParams
from serinus.core.clock import WallClock
from serinus.core.rng import Rng
clock, rng = WallClock(), Rng(7)
path, streams, prompt, output = sys.argv[1], *map(int, sys.argv[2:])
with one_model():
    llms = {name: LLM(path, max_total_tokens=16384, threads=2, **settings)
            for name, settings in {"bounded": {"max_step_ms": None}, "unbounded": {}}.items()}
sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
for line in sys.stdin:
    prompts = [[rng.randrange(5, 32000) for _ in range(prompt)] for _ in range(streams)]
    begin = clock.now()
    llms[line.strip()].generate(prompts, sampling, use_tqdm=False)
    print(json.dumps(streams * output / (clock.now() - begin)), flush=True)
"""


@contextmanager
def offline(path: Path) -> Iterator[Callable[[str], float]]:
    """Output tokens per second of one LLM.generate, in a process of its own: "bounded" cuts prompts to the server's
    longest step, "unbounded" is the LLM as it is by default."""
    words = [sys.executable, "-c", _OFFLINE, str(path), *map(str, (STREAMS, PROMPT, OUTPUT))]
    here = Path(__file__).parent
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=here) as process:
        asked, told = process.stdin, process.stdout
        assert asked is not None
        assert told is not None

        def rate(name: str) -> float:
            print(name, file=asked, flush=True)
            return float(json.loads(told.readline()))

        yield rate
        asked.close()


def online(server: Server, seed: int) -> float:
    """The same over HTTP: streamed token by token, by `serinus bench serve`."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as out:
        subprocess.run(
            [
                sys.executable, "-m", "serinus", "bench", "serve", "--base-url", server.url, "--backend", "serinus",
                "--dataset-name", "random", "--num-prompts", str(STREAMS), "--random-input-len", str(PROMPT),
                "--random-output-len", str(OUTPUT), "--random-range-ratio", "1.0", "--seed", str(seed),
                "--warmup-requests", "0", "--output-file", out.name,
            ],
            capture_output=True,
            text=True,
            check=True,
        )  # fmt: skip
        return float(json.loads(Path(out.name).read_text().splitlines()[-1])["output_throughput"])


def by_http(path: Path, draws: int, rounds: int) -> dict[str, Any]:
    """The job over HTTP and by LLM, in turns; shares are of the rate of the same round, as the machine's drifts."""
    turns = list[tuple[float, float, float]]()
    of_http, of_bound = list[float](), list[float]()
    words = (str(path), "--max-total-tokens", "16384", "--threads", "2")
    for draw in range(draws):
        with offline(path) as llm, Server("serve", *words) as server:
            found = [
                (online(server, draw * (rounds + 1) + index), llm("bounded"), llm("unbounded"))
                for index in range(rounds + 1)
            ][1:]  # the first round warms up
        turns += found
        of_http.append(statistics.median(1 - http / llm for http, llm, _ in found))
        of_bound.append(statistics.median(1 - llm / free for _, llm, free in found))
        print(f"draw {draw}: HTTP {of_http[-1]:.1%}", file=sys.stderr, flush=True)
    served, bounded, free = (statistics.median(column) for column in zip(*turns, strict=True))
    overhead, error = mean_error(of_http)
    return {
        "http_tok_per_s": round(served, 1),
        "offline_tok_per_s": round(bounded, 1),
        "unbounded_tok_per_s": round(free, 1),
        "http_overhead": round(overhead, 4),
        "http_spread": round(error, 4),
        "bound_overhead": round(statistics.fmean(of_bound), 4),
        "turns_tok_per_s": [[round(rate, 1) for rate in turn] for turn in turns],
    }


def first_token(url: str, seed: int) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token of a fresh 2,000-token prompt, and its meta_info."""
    rng = Rng(seed)
    body = {
        "input_ids": [rng.randrange(5, 32000) for _ in range(HANDED)],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
    }
    begin = CLOCK.now()
    answer = httpx.post(f"{url}/generate", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return CLOCK.now() - begin, answer.json()["meta_info"]


def handoff(path: Path, rounds: int, *flags: str) -> dict[str, Any]:
    """Time to first token through a handoff against the same prefill engine answering by itself, in turns."""
    pool = ("--max-total-tokens", "4096")  # small enough that memory is in use, not touched for the first time
    with Server("up", str(path), *pool, "--disaggregation-transfer-backend", "shm", *flags) as up:
        ready = float(re.search(r"ready in ([\d.]+) s", up.wait_line("serinus up: ready in"))[1])  # type: ignore[index]
        members = httpx.get(f"{up.url}/server_info").json()["engines"]
        prefill = next(m["url"] for m in members if m["server_info"]["role"] == "prefill")
        pairs, copies = [], []
        for index in range(rounds + 2):
            own, _ = first_token(prefill, 2 * index)
            handed, meta = first_token(up.url, 2 * index + 1)
            assert meta["handoff_tokens"] == HANDED, meta
            pairs.append((handed, own))
            copies.append(meta["handoff_bytes"] / meta["handoff_seconds"] / 1e9)
    handed, own = (statistics.median(column) for column in zip(*pairs[2:], strict=True))
    return {
        "up_ready_s": ready,
        "handoff_ttft_s": round(handed, 3),
        "local_ttft_s": round(own, 3),
        "handoff_cost_of_prefill": round(handed / own - 1, 4),
        "take_in_gb_s": round(statistics.median(copies[2:]), 2),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--draws", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--handoffs", type=int, default=3)
    arguments.add_argument("--checkpoint", default="", help="directory to use, or to make")
    args = arguments.parse_args()
    path = checkpoint_221m(args.checkpoint)
    emit("serving", **by_http(path, args.draws, args.rounds), **handoff(path, args.handoffs))


if __name__ == "__main__":
    main()
