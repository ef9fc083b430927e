"""Random cases of what ranks exchange by the Triton column: one of them runs, the words of the others are there."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serinus.kernels.ref.linear import pack_linear
from serinus.kernels.triton import peer_exchange as module
from serinus.kernels.triton.peer_words import NAN, NOTHING, REGION, TURNS, WORDS, exchange_memory

__all__ = ["peer_exchange"]

_PRODUCTS = ((16, 512, 128, 64), (64, 128, 96, 32))
"""Rows, inputs and outputs of linears, and outputs of one program."""


@dataclass(frozen=True)
class _Call:
    """A call of all ranks."""

    name: str
    words: list[list[Tensor]]
    """What each rank has to say, by program."""
    tells: Callable[[int, int], bool]
    """Whether a rank needs what another one says."""
    run: Callable[[], Tensor | None]
    """What the rank that runs finds; None: what it did is wrong."""
    expected: Tensor


class _Draw:
    """Calls of so many ranks, of which one runs; some with words of all bits."""

    def __init__(self, seed: int, device: str) -> None:
        self.rng, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.device, self.ranks = device, self.rng.choice((2, 2, 3))
        self.index = self.rng.randrange(self.ranks)
        self.shared = [exchange_memory(device) for _ in range(self.ranks)]
        addresses = [memory.data_ptr() for memory in self.shared]
        self.exchange = module.PeerExchange(self.shared[self.index], addresses, self.index, 10.0)

    def call(self) -> _Call:
        return self.rng.choice((self._sum, self._linear, self._gather, self._broadcast))()

    def _parts(self, *shape: int) -> list[Tensor]:
        dtypes = (torch.float32, torch.float16, *[torch.bfloat16] * (self.device != "cpu"))  # it cuts bf16 off
        dtype = self.rng.choice(dtypes)
        parts = [torch.randn(shape, generator=self._generator).to(self.device, dtype) for _ in range(self.ranks)]
        if self.rng.random() < 0.3:
            parts[self.rng.randrange(self.ranks)].view(-1).view(torch.int32)[0] = NOTHING
        return parts

    def _sum(self) -> _Call:
        parts = self._parts(self.rng.choice((2, 100, 2048, 6144, 5000)))
        x = parts[self.index].clone()
        name, words = f"sum of {x.dtype}, {x.shape}", [_sent(part) for part in parts]
        return _Call(name, words, lambda *_: True, lambda: x if self.exchange.all_reduce(x) else None, _total(parts))

    def _linear(self) -> _Call:
        dtype = torch.float16 if self.device == "cpu" else torch.bfloat16
        rows, inner, outs, tile = self.rng.choice(_PRODUCTS)
        factors = [(self._whole(rows, inner), self._whole(outs, inner)) for _ in range(self.ranks)]
        parts = [F.linear(*pair).to(self.device, dtype) for pair in factors]
        words = [[words for each in part.split(tile, 1) for words in _sent(each)] for part in parts]
        x, weight = (factor.to(self.device, dtype) for factor in factors[self.index])
        packed = pack_linear(weight, None)
        name = f"product of {rows}, {inner}, {outs}"
        return _Call(name, words, lambda *_: True, lambda: self.exchange.linear_all_reduce(x, packed), _total(parts))

    def _whole(self, *shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=self._generator).float()

    def _gather(self) -> _Call:
        parts, is_first = self._parts(2, self.rng.choice((2, 100, 5000))), self.index == 0
        words = [[words for row in part for words in _sent(row)] for part in parts]
        expected = torch.cat(parts, -1) if is_first else torch.zeros(1)

        def run() -> Tensor | None:
            x = parts[self.index]
            found = self.exchange.gather_last(x) if self.exchange.gathers(x) else None
            return found if is_first else expected if found is None else None

        return _Call(f"gathering of {parts[0].shape}", words, lambda _, rank: rank == 0, run, expected)

    def _broadcast(self) -> _Call:
        parts = [part.view(torch.int16) for part in self._parts(self.rng.choice((2, 100, 2048, 6144, 5000)))]
        words = [list((part.int() & 0xFFFF).split(WORDS)) for part in parts]
        x = parts[self.index].clone()
        run = lambda: x if self.exchange.broadcast(x) else None  # noqa: E731
        return _Call(f"broadcast of {x.shape}", words, lambda source, _: source == 0, run, parts[0])


def _sent(part: Tensor) -> list[Tensor]:
    """The words of each program."""
    words = part.contiguous().view(-1).view(torch.int32).clone()
    words[words == NOTHING] = NAN
    return list(words.split(WORDS))


def _total(parts: list[Tensor]) -> Tensor:
    return sum((part.float() for part in parts), torch.zeros_like(parts[0], dtype=torch.float32)).to(parts[0].dtype)


def peer_exchange(seed: int, device: str) -> str:
    """Sums, linears, gathers and broadcasts of two or three ranks, of which one runs: what the others write into its
    memory is there before. Each call in the turn that is its own."""
    draw = _Draw(seed, device)
    others = {*range(draw.ranks)} - {draw.index}
    turns, wrong = [0] * 8, ""
    nothing = torch.zeros(module._TOLD, dtype=torch.int32, device=device)

    def region(turn: int, program: int, source: int, owner: int) -> Tensor:
        at = program * (draw.ranks - 1) + (source - 1 if source > owner else source)
        return draw.shared[owner].view(TURNS, -1, REGION)[turn, at].view(torch.int32)

    def said(call: _Call, source: int, rank: int, program: int) -> Tensor:
        return call.words[source][program] if call.tells(source, rank) else nothing

    for _ in range(6):
        call = draw.call()
        live = list(enumerate(turns[: len(call.words[0])]))
        for program, turn in live:
            for rank in others:
                place, words = region(turn, program, rank, draw.index), said(call, rank, draw.index, program)
                wrong += "" if bool((place == NOTHING).all()) else f" turn {turn} of {program} was not emptied"
                place.zero_()[: len(words)] = words
        found = call.run()
        is_right = found is not None and torch.equal(found.nan_to_num(7.0), call.expected.nan_to_num(7.0))
        wrong += "" if is_right else f" {call.name}"
        for program, turn in live:
            for rank in others:
                place, words = region(turn, program, draw.index, rank), said(call, draw.index, rank, program)
                wrong += "" if torch.equal(place[: len(words)], words) else f" {rank} was told other words of {program}"
                place.fill_(NOTHING)  # as that rank does
            turns[program] = (turn + 1) % TURNS
    return wrong + _taken_wrongly(draw.exchange, device)


def _taken_wrongly(exchange: Any, device: str) -> str:
    """What an exchange should leave to NCCL, and does not."""
    far = torch.zeros(module._SUM_MAX * WORDS + 1, device=device)
    odd = torch.zeros(5, dtype=torch.half, device=device)
    wrong = [
        f" a sum of {len(x)} {x.dtype}"
        for x in (far, odd, torch.zeros(4, dtype=torch.int64, device=device))
        if exchange.all_reduce(x)
    ]
    x_TI, packed = torch.zeros((65, 128), device=device), pack_linear(torch.zeros((96, 128), device=device), None)
    half = pack_linear(packed.weight.half(), None)
    for rows_TI, weight in ((x_TI[:64], packed), (x_TI.half(), half), (x_TI[:64, None].half(), half)):
        if exchange.linear_all_reduce(rows_TI, weight) is not None:
            wrong.append(f" a linear of {rows_TI.shape} {rows_TI.dtype}")
    bytes_X, many_X = (torch.zeros(n, dtype=t, device=device) for n, t in ((8, torch.int8), (3 << 21, torch.int64)))
    wrong += [f" a broadcast of {x.nbytes} bytes" for x in (bytes_X, many_X) if exchange.broadcast(x)]
    return "".join(wrong) + (" rows of 10 bytes" if exchange.gathers(odd) else "")
