"""Which kernels an engine on a GPU would compile, on a machine without one.

python -m tests.engine.kernel_variants FOLDER SETTINGS

An engine of this small checkpoint runs with the Triton column. No kernel is compiled or started: Triton tells
of each launch under which key it would look for the compiled kernel, which names the kernel, its constants, and what it
is specialised for (dtypes, numbers that are 1 or multiples of 16, aligned addresses). Prints, as JSON, how many keys a
start touches, and the launches of requests behind it whose keys are others. Tokens mean nothing: all are one.
"""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton

import serinus.canary.make
import serinus.ranks.build
from serinus import LLM, SamplingParams
from serinus.canary.ring import RingNews
from serinus.core.grammar import Grammar
from serinus.core.request import FinishReason, Request
from serinus.engine.messages import FrontMessage
from serinus.kernels import load
from serinus.pool import PoolSpec
from serinus.ranks.build import graph_sizes
from serinus.runner import Runner
from tests.kernels.triton_cases import pretend_gpu

CHUNK = 4096
TOKEN = 40


class Keys:
    """The keys of launches, with the arguments and what each of them is specialised for."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        self.launches = 0

    def __call__(self, *, fn: Any, key: str, compile: dict[str, Any], **_: Any) -> bool:
        """A launch that finds no compiled kernel: True = none is wanted."""
        self.launches += 1
        if key not in self.seen:
            self.seen[key] = f"{fn.name} {said_of(fn.jit_function, compile)}"
        return True


def said_of(function: Any, compile: dict[str, Any]) -> str:
    """A launch in words: the constants, and which of the other arguments are aligned, multiples of 16 or 1."""
    names = [each.name for each in function.params]
    constants = {names[path[0]]: value for path, value in compile["constants"].items()}
    (attributes,) = compile["configs"]
    aligned = sorted(names[path[0]] for path, told in attributes.items() if told)
    types = {name: kind for name, kind in compile["signature"].items() if kind != "constexpr"}
    words = f"{constants} of 16: {aligned} {types} {compile['num_warps']}"
    return re.sub(r"[{}'\[\],]", "", words)


def pretend(keys: Keys) -> None:
    """Kernels are looked for as on a GPU, and none is started; what torch computes is zeros, what lies where a GPU has
    it lies there; the canary takes for checked what was due."""
    pretend_gpu()
    triton.knobs.runtime.jit_cache_hook = keys  # type: ignore[assignment]
    kernels = load("cpu", "triton", own=("choose_tokens",))
    one = replace(kernels, choose_tokens=lambda *given: kernels.choose_tokens(*given).fill_(TOKEN))
    serinus.ranks.build.load = serinus.canary.make.load = lambda device, column="": one
    PoolSpec.is_page_first = property(lambda self: True)  # type: ignore[assignment, method-assign]
    RingNews.is_whole = property(lambda self: True)  # type: ignore[assignment, method-assign]

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x.new_zeros((*x.shape[:-1], len(weight)))

    F.linear = linear


GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.8}, {"temperature": 0.8, "top_k": 7, "top_p": 0.9}, {"temperature": 0.7, "min_p": 0.1},
    {**GREEDY, "logprobs": 3}, {**GREEDY, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 0.5, "min_new_tokens": 4, "logit_bias": {3: 1.0, 5: -2.0}},
    {**GREEDY, "prompt_logprobs": 2}, {"temperature": 0.5, "grammar": Grammar("regex", "(.|\\n){200}")},
]  # fmt: skip
"""How requests are sampled that are not plainly greedy."""
Come = list[tuple[int, dict[str, Any]]]


def histories(rng: random.Random) -> list[tuple[int, Come]]:
    """Turns to wait before each, and the requests that then come together: of so many tokens, sampled so."""

    def some(count: int, longest: int, *, plain: bool = False) -> Come:
        sizes = [rng.choice((1, 2, 16, 17, rng.randint(1, longest))) for _ in range(count)]
        return [(size, GREEDY if plain else rng.choice(KINDS)) for size in sizes]

    found = [(0, some(1, 1, plain=True)), (3, some(1, 2, plain=True)), (1, [(CHUNK * 2 + 77, GREEDY)])]
    for turn in range(24):
        found.append((rng.randint(0, 2), some(rng.choice((1, 1, 2, 3, 16)), 700, plain=turn % 2 == 0)))
    return [*found, (30, some(40, 90, plain=True)), (2, some(30, 90))]


def drive(llm: LLM, seed: int) -> int:
    """Requests, most of which begin as another one begins; each turn is a step. Returns how many were answered."""
    rng, number, ended = random.Random(seed), 0, 0
    texts = [
        np.array([rng.randrange(llm._built.spec.vocab_size) for _ in range(CHUNK * 3)], np.int32) for _ in range(3)
    ]

    def turn(come: list[Request]) -> int:
        output = llm._turn([FrontMessage(front="f", message=each) for each in come])
        return sum(delta.finish is FinishReason.LENGTH for _, deltas in output.deltas for delta in deltas)

    for turns, requests in histories(rng):
        ended += sum(turn([]) for _ in range(turns))
        come = []
        for size, sampling in requests:
            prompt = rng.choice(texts)[:size].copy()
            prompt[rng.randrange(size) :] ^= rng.random() < 0.5
            number += 1
            params = SamplingParams(max_new_tokens=rng.randint(4, 12), **{"ignore_eos": True, **sampling})
            come.append(Request(rid=f"r{number}", prompt=prompt, sampling=params, seed=number, stream=True))
        ended += turn(come)
    while not llm._engine.idle:
        ended += turn([])
    assert ended == number, f"{ended} of {number} requests were answered"
    return number


def main(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    keys = Keys()
    pretend(keys)
    with LLM(
        folder, dtype="bfloat16", load_format="dummy", max_total_tokens=60_000, chunked_prefill_size=CHUNK,
        page_size=16, **{"max_running_requests": 64, **settings},
    ) as llm:  # fmt: skip
        runner = llm._built.line.body._runner._runner
        assert isinstance(runner, Runner)
        if not llm.config.kernels.disable_cuda_graph:
            runner.record(graph_sizes(llm.config))
        runner.rehearse(graph_sizes(llm.config) if llm.config.kernels.disable_cuda_graph else ())
        started, launches = dict(keys.seen), keys.launches
        requests = drive(llm, 0)
    later = sorted(words for key, words in keys.seen.items() if key not in started)
    return {"started": len(started), "requests": requests, "launches": keys.launches - launches, "later": later}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
