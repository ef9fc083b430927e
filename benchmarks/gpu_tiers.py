"""The host tier beside a GPU: pages of Qwen3-8B's shape through the mover to pinned memory and back, GB/s, alone, both
ways at once, and beside a decode of 64 requests, with what a decode step then loses. One JSON line each, beside a plain
pinned copy of 1 GiB on the same card.

Beside a decode: one engine (dummy weights, CUDA graphs) generates in turns without and with copies of other pools of
the same shape under way, which its own thread asks for before each step, as the engine does. A step is the mean
of those from the 16th to the 144th token; the loss is the median over the rounds of the ratio of neighbouring turns.
The same with plain pinned copies of 512 MB, one behind another: what a step loses whoever copies.

`asks_ms`: what the engine's thread spends to ask for all pages in one copy, and at most in one call of the mover where
there are eight such behind one another.

    python -m benchmarks.gpu_tiers [--pages 1024] [--rounds 5] [--canary none|rotating:16|full] [--ways out in both] \
        [--no-engine]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_engine import MODELS, config_in, step_ms
from benchmarks.report import emit
from serinus import LLM
from serinus.core.clock import WallClock
from serinus.core.moves import Move, MoveKind
from serinus.core.parts import Part
from serinus.kernels import load
from serinus.pool import DeviceMover, DevicePool, HostPool, PoolSpec

CLOCK = WallClock()
_Event: Any = torch.cuda.Event
_Stream: Any = torch.cuda.Stream
MODEL = "qwen3-8b"
LAYERS, KV_HEADS = (MODELS[MODEL][name] for name in ("num_hidden_layers", "num_key_value_heads"))
SIZE = MODELS[MODEL]["head_dim"]
BATCH, CONTEXT, SHORT, LONG = 64, 1024, 16, 144
OP_PAGES = 64
"""Pages of one copy: 151 MB."""
UNDER_WAY = 8
"""Copies of each direction beside a decode, 23 ms: each begins behind the steps that were queued when it was asked
for."""
PLAIN_BYTES, PLAIN_UNDER_WAY = 1 << 29, 3
WAYS = {"out": (MoveKind.BACKUP,), "in": (MoveKind.LOAD,), "both": (MoveKind.BACKUP, MoveKind.LOAD)}


def plain_gb_s(kind: MoveKind) -> float:
    """Of one large pinned copy, the better of four."""
    there, here = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"), torch.empty(1 << 30, dtype=torch.uint8)
    here, best = here.pin_memory(), 0.0
    for _ in range(4):
        torch.cuda.synchronize()
        begin = CLOCK.now()
        (here if kind is MoveKind.BACKUP else there).copy_(there if kind is MoveKind.BACKUP else here)
        torch.cuda.synchronize()
        best = max(best, here.nbytes / (CLOCK.now() - begin) / 1e9)
    return best


class Counted:
    """Traffic of which bytes are counted, those of one way, from the moment on at which the first had come."""

    _moved, _seconds, _since = 0, 0.0, 0.0

    def count_anew(self) -> None:
        """Nothing has come yet."""
        self._moved, self._seconds, self._since = 0, 0.0, 0.0

    def ended(self, byte_count: int) -> None:
        """So many bytes came since the last call, of all ways together."""
        if byte_count and self._since:
            self._moved += byte_count
            self._seconds = CLOCK.now() - self._since
        elif byte_count:
            self._since = CLOCK.now()

    def gb_s(self, ways: int) -> float:
        """Of each of so many ways."""
        return self._moved / ways / self._seconds / 1e9


class Traffic(Counted):
    """Copies between pools of their own, one op behind another."""

    def __init__(self, pages: int) -> None:
        spec = PoolSpec(
            layer_count=LAYERS, kv_head_count=KV_HEADS, head_size=SIZE, page_size=16, page_count=pages + 1,
            dtype=torch.bfloat16, device="cuda", stamped=True,
        )  # fmt: skip
        begin = CLOCK.now()
        self.host = HostPool(spec, pages + 1)
        self.pin_s = CLOCK.now() - begin
        self.device = DevicePool(spec, load("cuda"))
        self.mover = DeviceMover({Part.FULL: self.device}, {Part.FULL: self.host}, (Part.FULL,) * LAYERS)
        order = np.random.default_rng(0)
        self.pages, self.rows = (order.permutation(np.arange(1, pages + 1, dtype=np.int32)) for _ in range(2))
        self.page_bytes = spec.page_bytes
        self._ops = 0
        self._under_way: dict[MoveKind, list[int]] = {}
        self._at: dict[MoveKind, int] = {}

    def submit(self, kind: MoveKind, at: int, count: int) -> int:
        """Begin one copy of so many pages; its number."""
        span = np.arange(at, at + count) % len(self.pages)
        pages, rows = self.pages[span], self.rows[span]
        source, target = (pages, rows) if kind is MoveKind.BACKUP else (rows, pages)
        self._ops += 1
        self.mover.submit([Move(op=self._ops, kind=kind, part=Part.FULL, source=source, target=target)])
        return self._ops

    def alone_gb_s(self, kinds: tuple[MoveKind, ...]) -> float:
        """Each way, the better of three: all pages in ops of OP_PAGES."""
        best, half = 0.0, len(self.pages) // len(kinds)
        for _ in range(3):
            torch.cuda.synchronize()
            begin = CLOCK.now()
            ops = [
                self.submit(kind, i * half + at, OP_PAGES)
                for at in range(0, half - OP_PAGES + 1, OP_PAGES)
                for i, kind in enumerate(kinds)
            ]
            failed = [done.error for done in self.mover.wait(ops) if not done.ok]
            assert not failed, failed[0]
            best = max(best, len(ops) * OP_PAGES * self.page_bytes / len(kinds) / (CLOCK.now() - begin) / 1e9)
        return best

    def asks_ms(self, kind: MoveKind) -> list[float]:
        """To ask for all pages in one copy, and at most for a call, `poll` too, where there are eight such."""
        self.mover.wait([self.submit(kind, 0, 1)])
        spent, left = list[float](), 8
        while left:
            begin = CLOCK.now()
            if len(spent) < 8:
                self.submit(kind, 0, len(self.pages))
            else:
                ended = self.mover.poll()
                assert all(done.ok for done in ended)
                left -= len(ended)
            spent.append(round((CLOCK.now() - begin) * 1e3, 2))
        return [spent[0], max(spent)]

    def begin(self, kinds: tuple[MoveKind, ...]) -> None:
        """Copies these ways from now on, as `turn` asks for them."""
        self.count_anew()
        self._under_way, self._at = {kind: list[int]() for kind in kinds}, dict.fromkeys(kinds, 0)

    def turn(self) -> None:
        """See what has ended, and have UNDER_WAY copies of each direction again."""
        ended, half = self.mover.poll(), len(self.pages) // len(self._under_way)
        failed = [done.error for done in ended if not done.ok]
        assert not failed, failed[0]
        self.ended(sum(done.byte_count for done in ended))
        gone = {done.op for done in ended}
        for i, (kind, ops) in enumerate(self._under_way.items()):
            left = [op for op in ops if op not in gone]
            while len(left) < UNDER_WAY:
                left.append(self.submit(kind, i * half + self._at[kind], OP_PAGES))
                self._at[kind] = (self._at[kind] + OP_PAGES) % half
            self._under_way[kind] = left

    def end(self) -> None:
        """Wait for those that are open."""
        self.mover.wait([op for ops in self._under_way.values() for op in ops])

    def close(self) -> None:
        """Give the memory back."""
        self.mover.close()
        self.host.close()


class PlainTraffic(Counted):
    """Plain copies of one large piece, PLAIN_UNDER_WAY of each direction at a time."""

    def __init__(self) -> None:
        there = [torch.empty(PLAIN_BYTES, dtype=torch.uint8, device="cuda") for _ in MoveKind]
        here = [torch.empty(PLAIN_BYTES, dtype=torch.uint8).pin_memory() for _ in MoveKind]
        self._pairs = {
            kind: (one, other) if kind is MoveKind.BACKUP else (other, one)
            for kind, one, other in zip(MoveKind, here, there, strict=True)
        }
        self._streams: dict[MoveKind, Any] = {kind: _Stream() for kind in MoveKind}
        self._under_way: dict[MoveKind, list[Any]] = {}

    def begin(self, kinds: tuple[MoveKind, ...]) -> None:
        """As Traffic."""
        self.count_anew()
        self._under_way = {kind: [] for kind in kinds}

    def turn(self) -> None:
        """As Traffic."""
        ended = 0
        for kind, events in self._under_way.items():
            while events and events[0].query():
                events.pop(0)
                ended += 1
            with torch.cuda.stream(self._streams[kind]):
                while len(events) < PLAIN_UNDER_WAY:
                    target, source = self._pairs[kind]
                    target.copy_(source, non_blocking=True)
                    events.append(_Event())
                    events[-1].record()
        self.ended(ended * PLAIN_BYTES)

    def end(self) -> None:
        """Wait for those that are open."""
        torch.cuda.synchronize()


def beside(llm: LLM, traffic: Traffic | PlainTraffic, way: str, rounds: int) -> dict[str, float]:
    """Steps of a decode of BATCH in turns without and with copies, and the GB/s of these."""
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 150_000) for _ in range(CONTEXT)] for _ in range(BATCH)]
    once = partial(step_ms, llm, prompts, SHORT, LONG)
    once()
    alone, with_copies, rates = [], [], []
    engine: Any = llm
    for _ in range(rounds):
        alone.append(once())
        traffic.begin(WAYS[way])
        turn = llm._turn
        engine._turn = lambda *given, turn=turn: (traffic.turn(), turn(*given))[1]  # `once` takes it away
        with_copies.append(once())
        rates.append(traffic.gb_s(len(WAYS[way])))
        traffic.end()
    losses = [b / a - 1 for a, b in zip(alone, with_copies, strict=True)]
    return {
        "step_ms": round(statistics.median(alone), 3), "step_with_copies_ms": round(statistics.median(with_copies), 3),
        "loss": round(statistics.median(losses), 4), "gb_s_each_way": round(statistics.median(rates), 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--canary", choices=["none", "rotating:16", "full"], default="none")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    parser.add_argument("--no-engine", action="store_true", help="copies alone")
    arguments = parser.parse_args()
    said: dict[str, Any] = {"gpu": torch.cuda.get_device_name()}
    said |= {f"plain_{way}_gb_s": round(plain_gb_s(WAYS[way][0]), 1) for way in ("out", "in")}
    torch.cuda.empty_cache()
    traffic = Traffic(arguments.pages)
    said |= {"page_bytes": traffic.page_bytes, "pin_gb_s": round(traffic.host.data_PY.nbytes / traffic.pin_s / 1e9, 1)}
    for way in arguments.ways:
        emit("gpu_tiers_alone", **said, way=way, gb_s_each_way=round(traffic.alone_gb_s(WAYS[way]), 1))
    asks = {kind.name.lower(): traffic.asks_ms(kind) for kind in MoveKind}
    emit("gpu_tiers_asks", **said, pages=arguments.pages, asks_ms=asks)
    if not arguments.no_engine:
        settings: dict[str, Any] = {"kv_canary": "none"}
        if arguments.canary != "none":
            settings = {"kv_canary": "heal", "kv_canary_coverage": arguments.canary}
        with tempfile.TemporaryDirectory() as folder, LLM(
            config_in(Path(folder), MODEL), load_format="dummy", skip_tokenizer_init=True, device="cuda",
            dtype="bfloat16", max_running_requests=BATCH, chunked_prefill_size=8192, max_total_tokens=100_000,
            **settings,
        ) as llm:  # fmt: skip
            ways: dict[str, Traffic | PlainTraffic] = {"mover": traffic, "plain": PlainTraffic()}
            for way, (name, each) in product(arguments.ways, ways.items()):
                found = beside(llm, each, way, arguments.rounds)
                told = {"way": way, "copies": name, "canary": arguments.canary, "batch": BATCH}
                emit("gpu_tiers_beside_decode", **said, **told, **found)
    traffic.close()


if __name__ == "__main__":
    main()
