"""Random cases of the Triton column beside the reference. On a GPU, or in Triton's interpreter:

TRITON_INTERPRET=1 python -m tests.kernels.triton_cases COUNT

prints, as JSON, what differs by case and seed. The interpreter takes more than the compiler does, so `compile` instead
of a count compiles the kernels for an H100, on any machine. A new kernel gets a function here and an entry of CASES.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from serinus.kernels.triton.words import carry

from .canary_case import PAGE, make_case, outcome
from .interpreted import speed_up
from .triton_attention_cases import (
    latent_attention,
    latent_heads,
    long_chunks,
    paged_attention,
    watched_attention,
    watched_batch,
)
from .triton_columns import columns, dtype_of, page_first
from .triton_exchange_cases import peer_exchange
from .triton_host_cases import choose_tokens, hashed_pages, pages, pull_pages, top_tokens
from .triton_layer_cases import (
    experts,
    gates,
    latent_rope_store,
    linears,
    norms,
    qk_rope_store,
    quantized_experts,
    quantized_linears,
    rounded_rows,
    rows_of_linears,
)
from .triton_shapes import NoProducts, call_all, call_pulls, call_quantized
from .triton_watch_cases import canary_watch, watched_pass

COMPILED = 2
"""Seeds of a case that are compiled: one of decodes, one of chunks."""

__all__ = ["CASES", "differences", "pretend_gpu"]


def canary(seed: int, device: str) -> str:
    """Stamps, digests, plans and violations of one random case."""
    case = make_case(seed, device)
    ref, fast = columns(device, "canary_verify", "canary_bind", "canary_write")
    halves, laid = len(case.kv[0]), page_first(random.Random(seed), [half for each in case.kv for half in each], PAGE)
    kv = [tuple(laid[at : at + halves]) for at in range(0, len(laid), halves)]
    expected, found = outcome(ref, case), outcome(fast, replace(case, kv=kv))
    return ", ".join(name for name in expected if expected[name] != found[name])


def masks(seed: int, device: str) -> str:
    """Logits under masks of some rows, in any order of rows and with gaps between them."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    expected_by, found_by = columns(device, "mask_logits")
    count, vocab = rng.choice((1, 5)), rng.choice((1, 31, 32, 100, 5000, 9001))
    rows = rng.sample(range(count), rng.randint(seed < 2, count))
    words = numbers.integers(-(1 << 31), 1 << 31, (len(rows), (vocab + 31) // 32)).astype(np.int32)
    words[: len(rows) // 2] = rng.choice((0, -1))
    logits = torch.randn((count, vocab + rng.choice((0, 3))), generator=torch.Generator().manual_seed(seed))
    logits = logits.to(dtype_of(rng, device)).to(device)[:, :vocab]
    logits = logits if rng.random() < 0.7 else logits.T.contiguous().T
    expected = logits.clone()
    expected_by.mask_logits(expected, rows, words)
    found_by.mask_logits(logits, rows, words)
    return "" if torch.equal(logits, expected) else f"masks of {rows} of {count} rows, {vocab} tokens"


def words(seed: int, device: str) -> str:
    """Some words, between a device and its host where there are two."""
    there = torch.arange(seed, seed + (1, 511, 512, 1300)[seed % 4], device=device)
    here = torch.zeros(len(there), dtype=torch.int64, pin_memory=device != "cpu")
    back = torch.zeros_like(there)
    carry(here, there)
    if device != "cpu":
        torch.cuda.synchronize()
    carry(back, here)
    return "" if torch.equal(back, there) and torch.equal(here, there.cpu()) else f"{len(there)} words"


CASES: dict[str, Callable[[int, str], str]] = {
    each.__name__: each
    for each in (
        canary,
        masks,
        words,
        watched_attention,
        watched_batch,
        paged_attention,
        latent_attention,
        latent_heads,
        long_chunks,
        norms,
        gates,
        experts,
        linears,
        rows_of_linears,
        quantized_experts,
        quantized_linears,
        rounded_rows,
        qk_rope_store,
        latent_rope_store,
        choose_tokens,
        top_tokens,
        pages,
        hashed_pages,
        pull_pages,
        peer_exchange,
        canary_watch,
        watched_pass,
    )
}
"""By name: (seed, device) -> what differs, in words; empty = nothing."""


def differences(name: str, device: str, seeds: range) -> dict[int, str]:
    """What differs of one case, by seed; seeds without a difference are left out."""
    found = {seed: CASES[name](seed, device) for seed in seeds}
    return {seed: words for seed, words in found.items() if words}


def call_cases() -> None:
    """Some seeds of every case."""
    for case in CASES.values():
        for seed in range(COMPILED):
            case(seed, "cpu")


def pretend_gpu(capability: int = 90) -> None:
    """From now on Triton's kernels are made for an H100, or such a GPU, and none is started."""
    utils = SimpleNamespace(
        load_binary=lambda *_: (0, 0, 0, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 227 << 10},
        unload_module=lambda _: None,
    )
    machine = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        launcher_cls=lambda *_: lambda *_: None,
        utils=utils,
    )
    triton.runtime.driver.set_active(machine)


def run_cases(argument: str, *variables: str) -> str:
    """What this file prints in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    command = ["env", *variables, sys.executable, "-m", "tests.kernels.triton_cases", argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    compiled = {"compile": call_cases, "shapes": call_all, "pull": call_pulls, "ampere": call_quantized}
    if sys.argv[1] in compiled:
        pretend_gpu(80 if sys.argv[1] == "ampere" else 90)
        with NoProducts():  # what is computed means nothing
            compiled[sys.argv[1]]()
    else:
        speed_up()
        seeds = range(*map(int, sys.argv[1].split(":")))
        sys.stdout.write(json.dumps({name: differences(name, "cpu", seeds) for name in CASES}))
