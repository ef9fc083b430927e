"""Ranks as processes that add up, gather and broadcast through shared memory, all at once: what a test starts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

from serinus.kernels.ref.linear import pack_linear
from serinus.pd.backends.cuda_driver import CudaDriver
from serinus.ranks import peer_exchange

__all__ = ["exchanged"]

_SHAPES = ((2,), (100,), (2048,), (3, 4096), (1, 2), (2, 100), (3, 2500))
_PRODUCTS = ((1, 512, 64), (5, 256, 192), (16, 512, 128), (20, 128, 3072), (33, 128, 96), (64, 192, 160))
"""Rows, inputs and outputs of linears: with the inner dimension cut, and by tiles that wait for nothing else."""


def exchanged(devices: Sequence[str], seed: int, calls: int, timeout_s: float) -> list[str]:
    """What went wrong, of so many calls in random order, a process for each of `devices`."""
    context: Any = mp.get_context("spawn")
    said, all_come = context.SimpleQueue(), context.Barrier(len(devices))
    inboxes = [context.SimpleQueue() for _ in devices]
    ranks = [
        context.Process(target=_run, args=(i, device, inboxes, all_come, seed, calls, said))
        for i, device in enumerate(devices)
    ]
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


def _memories(index: int, device: torch.device, inboxes: Sequence[Any]) -> tuple[list[torch.Tensor], list[int]]:
    """What is to be kept, this rank's memory first, and where that of each rank lies for this one. Memory of a GPU is
    opened as by an engine's ranks."""
    from serinus.kernels.triton.peer_words import exchange_memory

    memory = exchange_memory(str(device))
    shared: Any = memory.share_memory_()
    if device.type == "cuda":
        torch.cuda.synchronize()
        allocation = CudaDriver("cuda").share(memory.data_ptr())
        offset = memory.data_ptr() - allocation.address
        shared = [offset, allocation.address, allocation.byte_count, *allocation.handle]
    for inbox in inboxes:
        inbox.put((index, shared))
    got: dict[int, Any] = dict(inboxes[index].get() for _ in inboxes)
    if device.type == "cuda":
        return [memory], [peer_exchange._opened("cuda", got[i], memory, own=i == index) for i in range(len(got))]
    kept = [memory if i == index else got[i] for i in range(len(got))]
    return [memory, *kept], [each.data_ptr() for each in kept]


def _linear(
    exchange: Any, shape: Sequence[int], index: int, ranks: int, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """A product of small whole numbers, and what it is: that of each rank rounds to 16 bits, and so does the sum."""
    rows, inner, outs = shape
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16  # it cuts bf16 off
    total, found = torch.zeros(rows, outs), None
    for rank in range(ranks):
        x, weight = (torch.randint(-3, 4, size, generator=generator).float() for size in ((rows, inner), (outs, inner)))
        bias = torch.randint(-200, 200, (outs,), generator=generator).float() if rank == 0 else None
        total += F.linear(x, weight, bias).to(dtype).float()
        if rank == index:
            on_device = bias if bias is None else bias.to(device, dtype)
            found = exchange.linear_all_reduce(x.to(device, dtype), pack_linear(weight.to(device, dtype), on_device))
    return found, total.to(dtype)


def _run(index: int, name: str, inboxes: Sequence[Any], all_come: Any, seed: int, calls: int, said: Any) -> None:
    """One rank. All draw the same calls; what each computes between them, and so when it comes, is its own."""
    device, own = torch.device(name), random.Random(f"{seed} {index}")
    if device.type == "cpu":
        from tests.kernels.interpreted import speed_up

        speed_up()
    else:
        torch.cuda.set_device(device)
    from serinus.kernels.triton.peer_exchange import PeerExchange

    kept_memory, addresses = _memories(index, device, inboxes)
    exchange = PeerExchange(kept_memory[0], addresses, index, 60.0)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kept: list[tuple[str, torch.Tensor | None, torch.Tensor]] = []
    whats = ("sum", "linear", "gather", "broadcast", "broadcast")
    for number in range(calls):
        what, shape = rng.choice(whats), rng.choice(_SHAPES)
        parts = [torch.randn(shape, generator=generator) for _ in inboxes]
        x = parts[index].clone().to(device)
        if own.random() < 0.3:
            torch.randn(own.randrange(1, 3_000_000)).sum()
        found: torch.Tensor | None = x
        if what == "sum":
            assert exchange.all_reduce(x)
            expected = sum(parts, torch.zeros(shape))
        elif what == "broadcast":
            assert exchange.broadcast(x)
            expected = parts[0]
        elif what == "linear":
            shape = rng.choice(_PRODUCTS)
            found, expected = _linear(exchange, shape, index, len(inboxes), generator, device)
        else:
            found, expected = exchange.gather_last(x), torch.cat(parts, -1)
        kept.append((f"call {number} of rank {index}, a {what} of {shape}", found, expected))
    wrong = [call for call, found, expected in kept if found is not None and not torch.equal(found.cpu(), expected)]
    wrong += [f"{call} gave nothing" for call, x, _ in kept if x is None and (index == 0 or "gather" not in call)]
    said.put(wrong)
    all_come.wait()  # others may be reading what this one shares
