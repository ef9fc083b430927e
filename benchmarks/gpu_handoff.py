r"""KV from one process to another on one GPU, by backend cuda_ipc or nixl: GB/s of a pull beside a copy on the same
card, and what handing a prompt over takes beside computing it. One JSON line each.

    python -m benchmarks.gpu_handoff [--backend nixl] [--tokens 2000] [--rounds 30] [--pairs 9] [--no-engine] \
        [--two-gpus]

Real ports, machines and pools of the shape of Qwen3-8B in two processes (handoff_pair.py), on a card of 48 GB. GB/s are
bytes that were moved, each read once and written once: of the pull, with its sums, and in turns of a plain copy of as
many bytes; one by one (4,096 tokens, and `long`: 8,192), and some under way at a time; of pulls of half the heads (rows
of 1 KB), as ranks of unequal engines read. `busy`: the other process keeps the card busy with matrix products; the two
take turns on it. A handoff is from the request until all pages are confirmed; its share is of the first token of the
same prompt from `LLM`. Which cores two processes get makes it a tenth faster or slower, so pairs of processes are made
anew, and the median of their medians counts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.handoff_pair import CLOCK, Pair, Shape, prefill_process
from benchmarks.report import emit
from serinus.core.parts import Part
from serinus.pd.backends import OpState
from serinus.pd.slices import Slice

MODEL = Shape(layers=36, heads=8, head_size=128, device="cuda")
SCRIPT = ("-m", "benchmarks.gpu_handoff")
PAGES = 512
"""Of each pool: 1.2 GB."""
PULLED = 256
"""Pages of one pull..."""
LONG = PAGES
"""...and of one of a long prompt."""
TOGETHER = 8
"""Pulls under way at a time, as of as many handoffs."""
GOALS = {"idle_gb_s": 1200, "busy_gb_s": 500, "open_ms": 5.0, "of_prefill": 0.03}


def seconds_of(job: Callable[[], object]) -> float:
    """Of one call and all that it queued."""
    torch.cuda.synchronize()
    begin = CLOCK.now()
    job()
    torch.cuda.synchronize()
    return CLOCK.now() - begin


def puller(
    pair: Pair, count: int = 1, between: tuple[Slice, Slice] | None = None, page_count: int = PULLED
) -> Callable[[], None]:
    """So many reads of scattered pages into scattered pages, begun together, until all are said to be over; of slices
    of them, where some are given."""
    backend: Any = pair.backends[0]
    given = () if between is None else (between,)
    read = backend.read if between is None else backend.read_slice
    (peer,) = backend._peers
    rng = np.random.default_rng(1)
    pages, sources = (rng.permutation(np.arange(1, PAGES + 1, dtype=np.int32))[:page_count] for _ in range(2))

    def once() -> None:
        ops = [read(peer, Part.FULL, *given, pages, sources, 1234567) for _ in range(count)]
        while ops:
            states = {op: backend.poll(op).state for op in ops}
            assert set(states.values()) <= {OpState.PENDING, OpState.DONE}
            ops = [op for op, state in states.items() if state is OpState.PENDING]

    return once


def half_heads() -> tuple[Slice, Slice]:
    """The second half of the heads of every layer, as a rank of two reads it from an engine of one rank, put where it
    lies in an engine of one rank."""
    row = MODEL.heads * MODEL.head_size * 2
    one = Slice(
        strips=range(2 * MODEL.layers), strip_count=2 * MODEL.layers, tokens=MODEL.page_size, token_bytes=row,
        start=row // 2, row_bytes=row // 2,
    )  # fmt: skip
    return one, one


def copier(byte_count: int, count: int, owner: str) -> Callable[[], object]:
    """So many plain copies of so many bytes from the owner's GPU, queued together."""
    source, target = (
        torch.randint(0, 256, (byte_count,), dtype=torch.uint8, device=each) for each in (owner, "cuda:0")
    )
    return lambda: [target.copy_(source) for _ in range(count)]


def rates(pair: Pair, rounds: int, owner: str) -> dict[str, float]:
    """GB/s of pulls one by one and some at a time, of copies in turns with them, and of sums; milliseconds to open the
    owner's memory."""
    byte_count = PULLED * MODEL.page_bytes
    backend: Any = pair.backends[0]
    ids = np.arange(1, PULLED + 1, dtype=np.int32)
    jobs: dict[str, Callable[[], object]] = {
        "pull": puller(pair), "long_pull": puller(pair, page_count=LONG), "pulls": puller(pair, TOGETHER),
        "copy": copier(byte_count, 1, owner), "copies": copier(byte_count, TOGETHER, owner),
        "sums": lambda: backend.digests(Part.FULL, ids, 5),
    }  # fmt: skip
    if backend.capabilities.slices:
        jobs["slices"] = puller(pair, TOGETHER, half_heads())
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            seconds[name].append(seconds_of(job))
    (peer,), (known,) = backend._peers, pair.port._peers.values()
    opening = [seconds_of(lambda: backend.connect(peer, known.endpoints[0])) for _ in range(5)]
    times = {"long_pull": LONG / PULLED, "pulls": TOGETHER, "copies": TOGETHER, "slices": TOGETHER / 2}
    found = {
        f"{name}_gb_s": byte_count * times.get(name, 1) / statistics.median(spent) / 1e9
        for name, spent in seconds.items()
    }
    shares = {
        "of_copy": found["pull_gb_s"] / found["copy_gb_s"],
        "of_copies": found["pulls_gb_s"] / found["copies_gb_s"],
    }
    return {**found, **shares, "open_ms": 1e3 * statistics.median(opening)}


def handoffs(pair: Pair, tokens: int, rounds: int) -> list[float]:
    """Milliseconds of handoffs of so many tokens."""
    return [1e3 * pair.handoff(-(-tokens // MODEL.page_size)) for _ in range(rounds + 3)][3:]


def prefill_ms(tokens: int, rounds: int) -> float:
    """Of the first token of a prompt, through an engine of dummy weights."""
    from benchmarks.gpu_engine import MODELS, config_in
    from serinus import LLM, SamplingParams

    rng = np.random.default_rng(2)
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(
            config_in(Path(folder), "qwen3-8b"), load_format="dummy", skip_tokenizer_init=True, device="cuda",
            dtype="bfloat16", max_running_requests=8, chunked_prefill_size=8192, max_total_tokens=60_000,
            kv_canary="none", disable_cuda_graph=True,
        ) as llm,
    ):  # fmt: skip

        def once() -> None:
            prompt = {"prompt_token_ids": rng.integers(0, MODELS["qwen3-8b"]["vocab_size"], tokens).tolist()}
            llm.generate([prompt], sampling, use_tqdm=False)

        seconds = [seconds_of(once) for _ in range(rounds + 2)]
    return 1e3 * statistics.median(seconds[2:])


def main() -> None:
    """Measure, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", choices=("cuda_ipc", "nixl"), default="cuda_ipc")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the prompt")
    parser.add_argument("--rounds", type=int, default=30, help="of each measurement")
    parser.add_argument("--pairs", type=int, default=9, help="of processes, one after the other")
    parser.add_argument("--no-engine", action="store_true", help="without the prefill that the handoff is compared to")
    parser.add_argument("--two-gpus", action="store_true", help="the owner has a GPU of its own")
    parser.add_argument("--prefill-process", nargs=8, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.prefill_process:
        prefill_process(arguments.prefill_process)
        return
    card = torch.cuda.get_device_name()
    byte_count = -(-arguments.tokens // MODEL.page_size) * MODEL.page_bytes
    computing_ms = 0.0 if arguments.no_engine else prefill_ms(arguments.tokens, 5)
    owner, where = ("cuda:1", {"CUDA_VISIBLE_DEVICES": "1,0"}) if arguments.two_gpus else ("cuda:0", {})
    for busy in (False, True):
        spent, found = list[list[float]](), dict[str, float]()
        for number in range(arguments.pairs):
            with contextlib.closing(Pair(arguments.backend, MODEL, PAGES, script=SCRIPT, busy=busy, **where)) as pair:
                spent.append(handoffs(pair, arguments.tokens, arguments.rounds))
                if number + 1 == arguments.pairs:
                    found = rates(pair, arguments.rounds, owner)
        medians = sorted(map(statistics.median, spent))
        handoff_ms = statistics.median(medians)
        prompt = {"handoff_ms": handoff_ms, "best_ms": min(map(min, spent))}
        if computing_ms:
            prompt |= {"prefill_ms": computing_ms, "of_prefill": handoff_ms / computing_ms}
        say = partial(
            emit, gpu=card, backend=arguments.backend, owner_busy=busy, two_gpus=arguments.two_gpus, goals=GOALS
        )
        of_pairs = [round(each, 3) for each in medians]
        say("gpu_handoff_prompt", tokens=arguments.tokens, bytes=byte_count, **rounded(prompt), pairs_ms=of_pairs)
        say("gpu_handoff_rates", **rounded(found))


def rounded(values: dict[str, float]) -> dict[str, float]:
    """To what is measured."""
    return {name: round(value, 4) for name, value in values.items()}


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
