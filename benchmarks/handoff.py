"""What handing over a prompt costs: shm and tcp between two processes, beside a memory copy and a bare socket.

    python benchmarks/handoff.py [--fast] [--tokens 2000]

The real ports, machines and device pools, of the benchmark model's shape (12 layers, 8 KV heads of 128, bf16, pages of
16); the prompt is "computed" beforehand, so what is left is the handoff: gather, digest, move, scatter, digest again.
Ceilings of the same run: one copy of as many bytes within this process, and the same bytes through a bare socket into a
ready buffer. `of_prefill` is the handoff's share of the prompt's prefill time at the measured matmul rate (goal 10 %).
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from report import emit, matmul_rate

from serinus.core.clock import WallClock
from serinus.core.ids import new_incarnation
from serinus.core.parts import PageSpan, Part
from serinus.core.request import Request
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.pd import (
    AddPrefill,
    ChunkComputed,
    DecodePort,
    Landed,
    PdSettings,
    PrefillPort,
    StartHandoff,
    host_identity,
    make_backends,
)
from serinus.pool import DevicePool, PoolSpec
from serinus.wire import Post, ZmqChannel
from serinus.wire.messages import LayoutSignature

CLOCK = WallClock()
PAGE = 16
LAYERS, KV_HEADS, HEAD = 12, 8, 128
PARAMETERS = 221e6
GOAL = 0.10


def pool_of(pages: int) -> DevicePool:
    """A pool of the model's shape, every page touched."""
    kernels = load("cpu")
    spec = PoolSpec(
        layer_count=LAYERS, kv_head_count=KV_HEADS, head_size=HEAD, page_size=PAGE, page_count=pages + 1,
        dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip
    pool = DevicePool(spec, kernels)
    ids = np.arange(1, pages + 1)
    pool.write_pages(ids, np.random.default_rng(1).integers(0, 256, (pages, pool.page_bytes), dtype=np.uint8))
    return pool


def settings_of(name: str, incarnation: int, pool: DevicePool, backend: str) -> PdSettings:
    """Equal on both sides but for the name."""
    layout = LayoutSignature(
        model="bench", kv_dtype="bfloat16", page_size=PAGE, layer_count=LAYERS, kv_head_count=KV_HEADS, head_size=HEAD
    )
    return PdSettings(
        engine=name, incarnation=incarnation, layout=layout, vocab_size=32_000,
        backends=(backend,), host=host_identity(),
    )  # fmt: skip


def prefill_process(backend: str, pages: int) -> None:
    """Serves prompts whose KV is there already, until it is killed."""
    torch.set_num_threads(1)
    pool, incarnation, channel = pool_of(pages), new_incarnation(), ZmqChannel("tcp://127.0.0.1:0")
    post = Post(channel, incarnation=incarnation, clock=CLOCK)
    settings = settings_of("prefill", incarnation, pool, backend)
    port = PrefillPort(settings, post=post, backends=make_backends(backend), store=pool, clock=CLOCK)
    print(channel.address, flush=True)
    while True:
        for result in port.poll(0.1):
            if isinstance(result, AddPrefill):
                ids = np.arange(1, pages + 1, dtype=np.int32)
                port.handle(ChunkComputed(xid=result.xid, spans=spans_of(ids), last=True, token=7))


def socket_process(address: str, byte_count: int) -> None:
    """Sends the same bytes whenever it is asked with one byte."""
    data = np.ones(byte_count, dtype=np.uint8)
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as line:
        while line.recv(1):
            line.sendall(data)


def spans_of(pages: NDArray[np.int32]) -> tuple[PageSpan, ...]:
    """The pages of a whole prompt."""
    return (PageSpan(part=Part.FULL, first=0, pages=pages),)


def spawn(*args: str) -> subprocess.Popen[str]:
    """This file as another process."""
    return subprocess.Popen([sys.executable, __file__, *args], stdout=subprocess.PIPE, text=True)


def median_seconds(work: Callable[[], float], rounds: int) -> float:
    """Of `rounds` calls, after one that does not count."""
    work()
    return statistics.median(work() for _ in range(rounds))


def handoff(backend: str, pages: int, tokens: int, rounds: int) -> dict[str, float]:
    """Seconds of a whole handoff, and of decode's part of it, in the median."""
    child = spawn("--prefill-process", backend, str(pages))
    assert child.stdout is not None
    address = child.stdout.readline().strip()
    pool, incarnation = pool_of(pages), new_incarnation()
    post = Post(ZmqChannel(), incarnation=incarnation, clock=CLOCK)
    settings = settings_of("decode", incarnation, pool, backend)
    port = DecodePort(settings, post=post, backends=make_backends(backend), store=pool, clock=CLOCK)
    request = Request(rid="r", prompt=np.zeros(tokens, dtype=np.int32), sampling=SamplingParams(), seed=0)
    ids = np.arange(1, pages + 1, dtype=np.int32)
    copying: list[float] = []

    def once() -> float:
        begin = CLOCK.now()
        port.handle(StartHandoff(rid="r", request=request, address=address, held=0, spans=spans_of(ids)))
        while True:
            for result in port.poll(1.0):
                if isinstance(result, Landed):
                    copying.append(result.copy_seconds)
                    return CLOCK.now() - begin
                assert not hasattr(result, "code"), f"the handoff failed: {result}"

    seconds = median_seconds(once, rounds)
    port.close()
    child.kill()
    child.wait()
    return {"seconds": seconds, "decode_copy_seconds": statistics.median(copying[1:])}


def bare_socket(byte_count: int, rounds: int) -> float:
    """Seconds for the same bytes through a loopback socket into a ready buffer."""
    buffer = np.zeros(byte_count, dtype=np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = spawn("--socket-process", f"127.0.0.1:{server.getsockname()[1]}", str(byte_count))
        line, _ = server.accept()
        with line:

            def once() -> float:
                begin = CLOCK.now()
                line.sendall(b"?")
                view = buffer.data
                while len(view):
                    view = view[line.recv_into(view) :]
                return CLOCK.now() - begin

            seconds = median_seconds(once, rounds)
    child.kill()
    child.wait()
    return seconds


def memory_copy(byte_count: int, rounds: int) -> float:
    """Seconds to copy as many bytes once, one thread."""
    source, target = np.ones(byte_count, dtype=np.uint8), np.zeros(byte_count, dtype=np.uint8)

    def once() -> float:
        begin = CLOCK.now()
        np.copyto(target, source)
        return CLOCK.now() - begin

    return median_seconds(once, rounds)


def main() -> None:
    """Measure, print a table, end with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fast", action="store_true", help="fewer rounds")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the prompt")
    parser.add_argument("--prefill-process", nargs=2, metavar=("BACKEND", "PAGES"), help=argparse.SUPPRESS)
    parser.add_argument("--socket-process", nargs=2, metavar=("ADDRESS", "BYTES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prefill_process:
        prefill_process(args.prefill_process[0], int(args.prefill_process[1]))
    if args.socket_process:
        socket_process(args.socket_process[0], int(args.socket_process[1]))
        return
    rounds = 5 if args.fast else 25
    prefill_seconds = args.tokens * 2 * PARAMETERS / matmul_rate(load("cpu"), torch.bfloat16)
    torch.set_num_threads(1)
    pages = -(-args.tokens // PAGE)
    byte_count = pages * PAGE * LAYERS * 2 * KV_HEADS * HEAD * 2
    ceilings = {"copy": memory_copy(byte_count, rounds), "socket": bare_socket(byte_count, rounds)}
    rows = {backend: handoff(backend, pages, args.tokens, rounds) for backend in ("shm", "tcp")}
    for name, seconds in ceilings.items():
        print(f"{name:8}{byte_count / seconds / 1e9:7.2f} GB/s  {seconds * 1e3:8.1f} ms")
    for name, row in rows.items():
        share = row["seconds"] / prefill_seconds
        print(
            f"{name:8}{byte_count / row['seconds'] / 1e9:7.2f} GB/s  {row['seconds'] * 1e3:8.1f} ms"
            f"  (decode busy {row['decode_copy_seconds'] * 1e3:.1f} ms)  {share:6.1%} of prefill"
        )
    emit(
        "handoff",
        tokens=args.tokens,
        bytes=byte_count,
        shm_gb_s=round(byte_count / rows["shm"]["seconds"] / 1e9, 3),
        tcp_gb_s=round(byte_count / rows["tcp"]["seconds"] / 1e9, 3),
        decode_busy_ms={name: round(row["decode_copy_seconds"] * 1e3, 2) for name, row in rows.items()},
        ceiling={name: round(byte_count / seconds / 1e9, 3) for name, seconds in ceilings.items()},
        of_prefill={name: round(row["seconds"] / prefill_seconds, 4) for name, row in rows.items()},
        goal=GOAL,
        met=rows["shm"]["seconds"] / prefill_seconds <= GOAL,
    )


if __name__ == "__main__":
    main()
