"""What serving costs beside the engine itself: HTTP, tokenizer and detokenizer at 16 streams; a handoff; a start.

Claims: `serinus serve` reaches 95 % of the offline engine's tokens per second at 16 streams, clients on the same
machine; handing 2,000 tokens of the 221M model from a prefill to a decode engine (shm) costs at most 10 % of their
prefill time; `serinus up` is ready within 10 s. Peer of each number: the same job without that part, in the same run.

    python benchmarks/serving.py [--rounds 3] [--checkpoint DIR]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from model import checkpoint_221m
from report import emit

from serinus.core.clock import WallClock
from serinus.core.rng import Rng
from serinus.testing.servers import Server

CLOCK = WallClock()
STREAMS, PROMPT, OUTPUT, HANDED = 16, 256, 64, 2000

_OFFLINE = """
import json, sys
from serinus import LLM, SamplingParams
from serinus.core.clock import WallClock
from serinus.core.rng import Rng
clock, rng = WallClock(), Rng(7)
path, rounds, streams, prompt, output = sys.argv[1], *map(int, sys.argv[2:])
llm = LLM(path, max_total_tokens=16384, threads=2)
sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
for _ in range(rounds + 1):
    prompts = [[rng.randrange(5, 32000) for _ in range(prompt)] for _ in range(streams)]
    begin = clock.now()
    llm.generate(prompts, sampling, use_tqdm=False)
    print(json.dumps(streams * output / (clock.now() - begin)), flush=True)
"""


def offline(path: Path, rounds: int) -> list[float]:
    """Output tokens per second of LLM.generate, a process of its own; the first round is a warm-up."""
    words = [sys.executable, "-c", _OFFLINE, str(path), *map(str, (rounds, STREAMS, PROMPT, OUTPUT))]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()][1:]


def online(server: Server, rounds: int) -> list[float]:
    """The same over HTTP: streamed token by token, by `serinus bench serve`."""
    rates = []
    for index in range(rounds + 1):
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as out:
            subprocess.run(
                [
                    sys.executable, "-m", "serinus", "bench", "serve", "--base-url", server.url, "--backend", "serinus",
                    "--dataset-name", "random", "--num-prompts", str(STREAMS), "--random-input-len", str(PROMPT),
                    "--random-output-len", str(OUTPUT), "--random-range-ratio", "1.0", "--seed", str(index),
                    "--warmup-requests", "0", "--output-file", out.name,
                ],
                capture_output=True,
                text=True,
                check=True,
            )  # fmt: skip
            rates.append(float(json.loads(Path(out.name).read_text().splitlines()[-1])["output_throughput"]))
    return rates[1:]


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
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--checkpoint", default="", help="directory to use, or to make")
    args = arguments.parse_args()
    path = checkpoint_221m(args.checkpoint)
    before = offline(path, args.rounds)
    with Server("serve", str(path), "--max-total-tokens", "16384", "--threads", "2") as server:
        served = online(server, args.rounds)
    without = statistics.median(before + offline(path, args.rounds))
    emit(
        "serving",
        offline_tok_per_s=round(without, 1),
        http_tok_per_s=round(statistics.median(served), 1),
        http_overhead=round(1 - statistics.median(served) / without, 4),
        **handoff(path, args.rounds),
    )


if __name__ == "__main__":
    main()
