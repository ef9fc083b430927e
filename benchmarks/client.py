"""What the load generator of `serinus bench serve` costs: CPU per streamed token, while it shares the machine.

    python benchmarks/client.py [--fast]

A stub server (own process) sends 16 streams of ready-made events, one write per token, as fast as they are taken; the
client drives and then reads them. Floor: the same bytes taken by recv() on one blocking socket per stream, nothing
understood. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import subprocess
import time
from multiprocessing.connection import Connection

from serinus.cli.bench import DIALECTS, Load, Prompt, Target, drive, read_answer
from serinus.cli.bench.dialect import Asking
from serinus.core.clock import WallClock

STREAMS = 16
GOAL_US = 50.0
"""1 % of two cores at 400 tokens/s."""


def stream(tokens: int) -> list[bytes]:
    """The chunks of one native answer."""
    chunks = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]
    for n in range(tokens):
        meta = {"prompt_tokens": 8, "completion_tokens": n + 1, "cached_tokens": 0, "finish_reason": None}
        event = b"data: " + json.dumps({"text": "word " * (n + 1), "output_ids": [1], "meta_info": meta}).encode()
        chunks.append(b"%x\r\n%s\n\n\r\n" % (len(event) + 2, event))
    return [*chunks, b"0\r\n\r\n"]


def serve(pipe: Connection, tokens: int) -> None:
    """The stub: answers every request with the same stream, a pause of the loop between two tokens."""
    chunks = stream(tokens)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def client_seconds(port: int, tokens: int) -> tuple[float, float]:
    """CPU seconds of driving, and of reading afterwards."""
    prompt = Prompt(ids=tuple(range(8)), token_count=8, output_tokens=tokens)
    body = DIALECTS["serinus"].body(prompt, Asking(model="m"))
    target = Target(url=f"http://127.0.0.1:{port}")
    begin = time.process_time()
    result = asyncio.run(drive(target, "/generate", [body] * STREAMS, Load(), WallClock(), lambda _: None))
    driven = time.process_time()
    answers = [read_answer(prompt, got, native=True) for got in result.traces]
    assert [answer.output_tokens for answer in answers] == [tokens] * STREAMS, answers[0].error
    return driven - begin, time.process_time() - driven


def floor_seconds(port: int) -> float:
    """CPU seconds of recv() alone, one stream after the other."""
    request = b"POST /generate HTTP/1.1\r\nHost: x\r\n\r\n"
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(STREAMS)]
    begin = time.process_time()
    for sock in sockets:
        sock.sendall(request)
    for sock in sockets:
        while sock.recv(1 << 16):
            pass
        sock.close()
    return time.process_time() - begin


def main() -> None:
    """Measure, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="a quarter of the tokens")
    tokens = 128 if parser.parse_args().fast else 512
    ours, theirs = multiprocessing.Pipe()
    stub = multiprocessing.Process(target=serve, args=(theirs, tokens), daemon=True)
    stub.start()
    port = ours.recv()
    client_seconds(port, tokens)  # warm
    driving, reading = min(client_seconds(port, tokens) for _ in range(3))
    floor = floor_seconds(port)
    stub.terminate()
    stub.join()
    count = STREAMS * tokens
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    line = {
        "benchmark": "client",
        "commit": commit.stdout.strip() or "unknown",
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, python {platform.python_version()}",
        "streams": STREAMS,
        "client_us_per_token": round(driving / count * 1e6, 2),
        "reading_afterwards_us_per_token": round(reading / count * 1e6, 2),
        "floor_us_per_token": round(floor / count * 1e6, 2),
        "goal_us": GOAL_US,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
