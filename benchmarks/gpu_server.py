"""The whole server on a GPU, beside the engine alone: Qwen3-8B's shape with dummy weights, bf16, greedy, under the
default canary. 64 and 256 requests of 512 tokens, 256 answered: through `LLM`, and streamed by `serinus serve` to
`serinus bench serve`, in turns where the card holds both engines (100 GB), else the one after the other; one JSON line
each, with seconds of start by phase and CPU time of the HTTP process.

Claims: HTTP costs at most 5 % at 64 streams; 256 give 8,700 tokens a second.

    python -m benchmarks.gpu_server [--rounds 2] [--streams 64 256]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.gpu_engine import CLOCK, MODELS, config_in
from benchmarks.report import emit
from serinus import LLM, SamplingParams
from serinus.testing.servers import READY, Server

MODEL = "qwen3-8b"
VOCAB = MODELS[MODEL]["vocab_size"]
PROMPT, OUTPUT = 512, 256
SETTINGS: dict[str, Any] = {
    "load_format": "dummy", "device": "cuda", "dtype": "bfloat16", "max_running_requests": 256,
    "chunked_prefill_size": 8192, "max_total_tokens": 210_000,
}  # fmt: skip
BOTH_BYTES = 105 << 30
"""Of two such engines on one card."""


def write_tokenizer(folder: Path) -> None:
    """One that turns every id of the vocabulary into text: all bytes, then pairs and triples of letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys(letters)
    words |= dict.fromkeys(a + b for a in letters for b in letters)
    words |= dict.fromkeys(a + b + c for a in letters[:64] for b in letters[:64] for c in letters[:64])
    vocab = {word: index for index, word in zip(range(VOCAB), words, strict=False)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def online(url: str, streams: int, seed: int) -> dict[str, Any]:
    """What `serinus bench serve` says of so many requests at once."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as out:
        subprocess.run(
            [
                sys.executable, "-m", "serinus", "bench", "serve", "--base-url", url, "--dataset-name", "random",
                "--num-prompts", str(streams), "--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT),
                "--random-range-ratio", "1.0", "--seed", str(seed), "--warmup-requests", "0", "--disable-tqdm",
                "--output-file", out.name,
            ],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        said: dict[str, Any] = json.loads(Path(out.name).read_text().splitlines()[-1])
        return said


def offline(llm: LLM, streams: int, seed: int) -> float:
    """Tokens a second of the same through `LLM`."""
    rng = random.Random(f"{seed} {streams}")
    prompts = [{"prompt_token_ids": [rng.randrange(10, VOCAB) for _ in range(PROMPT)]} for _ in range(streams)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    begin = CLOCK.now()
    llm.generate(prompts, params, use_tqdm=False)
    return streams * OUTPUT / (CLOCK.now() - begin)


def cpu_seconds(pid: int) -> float:
    """Of a process so far, its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--compile", action="store_true", help="begin with `serinus compile`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(config_in(Path(name), MODEL))
        write_tokenizer(folder)
        flags = [word for key, value in SETTINGS.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        begin = CLOCK.now()
        if arguments.compile:
            done = subprocess.run([sys.executable, "-m", "serinus", "compile", str(folder), *flags])
            emit("gpu_server_start", of="compile", seconds=round(CLOCK.now() - begin, 2), code=done.returncode)
        turns = torch.cuda.mem_get_info()[1] > BOTH_BYTES
        with ExitStack() as undo:
            answered = [undo.enter_context(engine_alone(folder))] if turns else []
            server = undo.enter_context(served(folder, flags))
            found = {streams: rounds(streams, arguments.rounds, server, *answered) for streams in arguments.streams}
        if not turns:
            with engine_alone(folder) as alone:
                for streams, each in found.items():
                    each["llm"] = [alone(streams, index) for index in range(arguments.rounds)]
        for streams, each in found.items():
            say(streams, each, turns=turns)


@contextmanager
def engine_alone(folder: Path) -> Iterator[Callable[[int, int], float]]:
    """Tokens a second through `LLM`, by streams and seed."""
    begin = CLOCK.now()
    with LLM(str(folder), skip_tokenizer_init=True, **SETTINGS) as llm:
        phases = {name: round(spent, 2) for name, spent in llm._built.seconds.items()}
        emit("gpu_server_start", of="LLM", seconds=round(CLOCK.now() - begin, 2), phases=phases)
        offline(llm, 16, -1)
        yield lambda streams, seed: offline(llm, streams, seed)


@contextmanager
def served(folder: Path, flags: list[str]) -> Iterator[Server]:
    """A server that has answered some."""
    begin, server = CLOCK.now(), Server("serve", str(folder), *flags)
    try:
        server.wait_line(READY)
        seconds = round(CLOCK.now() - begin, 2)
        said = re.sub(r"^.*?loaded: ", "", server.wait_line("engine .* loaded: "))
        emit("gpu_server_start", of="serve", seconds=seconds, phases=said, memory=server.wait_line("memory of cuda"))
        online(server.url, 16, 1000)
        yield server
    finally:
        server.kill()


def rounds(
    streams: int, count: int, server: Server, alone: Callable[[int, int], float] | None = None
) -> dict[str, list[Any]]:
    """Of so many streams: what `LLM` gave where it takes turns, what came over HTTP, microseconds of CPU a token."""
    found: dict[str, list[Any]] = {"llm": [], "http": [], "cpu_us": []}
    for index in range(count):
        if alone is not None:
            found["llm"].append(alone(streams, index))
        before = cpu_seconds(server.process.pid)
        said = online(server.url, streams, index + streams)
        assert said["completed"] == streams, said
        found["http"].append(said)
        found["cpu_us"].append((cpu_seconds(server.process.pid) - before) / (streams * OUTPUT) * 1e6)
    return found


def say(streams: int, found: dict[str, list[Any]], *, turns: bool) -> None:
    """A line for so many streams: the best round of each."""
    alone, served_at = found["llm"], [float(said["output_throughput"]) for said in found["http"]]
    shown = ("mean_ttft_ms", "median_itl_ms", "p99_itl_ms", "median_tpot_ms")
    last = found["http"][-1]
    emit(
        "gpu_server", gpu=torch.cuda.get_device_name(), streams=streams, llm_tok_s=round(max(alone)),
        http_tok_s=round(max(served_at)), http_cost=round(1 - max(served_at) / max(alone), 4), in_turns=turns,
        front_cpu_us_per_token=round(min(found["cpu_us"]), 1),
        rounds={"llm": [*map(round, alone)], "http": [*map(round, served_at)]},
        **{name: round(last[name], 2) for name in shown if name in last},
    )  # fmt: skip


if __name__ == "__main__":
    main()
