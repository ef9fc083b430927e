"""Ranks as processes that add up and gather through shared memory, all at once: what a test starts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.multiprocessing as mp

__all__ = ["exchanged"]

_SHAPES = ((2,), (100,), (2048,), (3, 4096), (1, 2), (2, 100), (3, 2500))


def exchanged(devices: Sequence[str], seed: int, calls: int, timeout_s: float) -> list[str]:
    """What went wrong, of so many sums and gathers in random order, a process for each of `devices`."""
    from serinus.kernels.triton.peer_exchange import exchange_memory

    memories = [exchange_memory(device) for device in devices]
    for memory in memories:
        memory.share_memory_()
    context: Any = mp.get_context("spawn")
    said = context.SimpleQueue()
    ranks = [context.Process(target=_run, args=(i, memories, seed, calls, said)) for i in range(len(devices))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout_s)
    wrong = [f"rank {i} did not come to an end" for i, rank in enumerate(ranks) if rank.exitcode is None]
    for rank in ranks:
        rank.kill()
    while not said.empty():
        wrong += said.get()
    return wrong + [f"rank {i} ended with {rank.exitcode}" for i, rank in enumerate(ranks) if rank.exitcode]


def _run(index: int, memories: list[torch.Tensor], seed: int, calls: int, said: Any) -> None:
    """One rank. All draw the same calls; what each computes between them, and so when it comes, is its own."""
    device, own = memories[index].device, random.Random(f"{seed} {index}")
    if device.type == "cpu":
        from tests.kernels.interpreted import speed_up

        speed_up()
    else:
        torch.cuda.set_device(device)
    from serinus.kernels.triton.peer_exchange import PeerExchange

    exchange = PeerExchange(memories[index], [memory.data_ptr() for memory in memories], index, 60.0)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kept: list[tuple[str, torch.Tensor | None, torch.Tensor]] = []
    for call in range(calls):
        is_sum, shape = rng.random() < 0.6, rng.choice(_SHAPES)
        parts = [torch.randn(shape, generator=generator) for _ in memories]
        x = parts[index].clone().to(device)
        if own.random() < 0.3:
            torch.randn(own.randrange(1, 3_000_000)).sum()
        if is_sum:
            assert exchange.all_reduce(x)
            found: torch.Tensor | None = x
        else:
            found = exchange.gather_last(x)
        expected = sum(parts, torch.zeros(shape)) if is_sum else torch.cat(parts, -1)
        kept.append((f"call {call} of rank {index}, {'a sum' if is_sum else 'a gather'} of {shape}", found, expected))
    wrong = [what for what, found, expected in kept if found is not None and not torch.equal(found.cpu(), expected)]
    wrong += [f"{what} gave nothing" for what, found, _ in kept if found is None and (index == 0 or "sum" in what)]
    said.put(wrong)
