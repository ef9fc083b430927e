"""How long a stream waits while another client sends many megabytes: the longest gap between two of its tokens.

    python benchmarks/front_gap.py [--fast]

A fake engine (own process) makes a token every 10 ms for one stream; a front (own process) streams it; meanwhile a
second client sends one long request after the other. `grown_ms` is the longest gap under each load less the longest one
of as many seconds without. The physical floor is 0. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path

from front import role

GOAL_MS = 50.0
VOCAB = 2048
STEP_S = 0.01
WORDS = "The capital of France is Paris, and a cache is proved intact. "


class Stream:
    """One stream, read by a thread: when each of its events came."""

    def __init__(self, port: int) -> None:
        body = json.dumps({"prompt": "x", "max_tokens": 200_000, "stream": True, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        self._sock = socket.create_connection(("127.0.0.1", port), 60)
        self._sock.sendall(head + body)
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while self._sock.recv(1 << 16):
            self.times.append(time.perf_counter())

    def longest(self, work: Callable[[], None]) -> float:
        """Milliseconds of the longest gap while `work` is done."""
        first = len(self.times) - 1
        work()
        time.sleep(0.1)
        times = self.times[first:]
        return max(after - before for before, after in pairwise(times)) * 1e3

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()


def post_all(port: int, path: str, body: bytes, expected: int, repeats: int) -> None:
    """Send a request so many times; each must get this status."""
    for _ in range(repeats):
        connection = HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()[:200]
        connection.close()
        assert answer.status == expected, f"benchmark: {path} got {answer.status} {said!r}, expected {expected}"


def loads() -> dict[str, tuple[str, bytes, int]]:
    """Path, body and the status it gets, by name."""
    ask = {"max_tokens": 1}
    million = {"prompt": [7] * 1_000_000, **ask}
    return {
        "text_30_mb": ("/v1/completions", _json({"prompt": WORDS * 484_000, **ask}), 400),
        "text_10_mb": ("/v1/completions", _json({"prompt": "a b c d " * 1_250_000, **ask}), 400),
        "text_served": ("/v1/completions", _json({"prompt": WORDS * 6_000, **ask}), 200),
        "tokenize": ("/tokenize", _json({"prompt": WORDS * 6_000}), 200),
        "chat_950000_messages": ("/v1/chat/completions", _json({"messages": [_message("a")] * 950_000, **ask}), 400),
        "chat_10000_messages": ("/v1/chat/completions", _json({"messages": [_message(WORDS)] * 10_000, **ask}), 200),
        "ids_15000000": ("/v1/completions", b'{"prompt": [' + b"7," * 15_000_000 + b"7]}", 400),
        "ids_1000000": ("/v1/completions", _json(million), 200),
    }


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def main() -> None:
    """Run all, print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="each request once")
    repeats = 1 if parser.parse_args().fast else 3
    from serinus.models.small_checkpoints import make_tokenizer

    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as home:
        make_tokenizer(Path(home), vocab=VOCAB)
        endpoint = f"ipc://{home}/engine"
        with role("engine", endpoint, str(STEP_S)), role("front", endpoint, home) as (_, port):
            stream = Stream(int(port))
            time.sleep(1.0)
            for name, (path, body, expected) in loads().items():
                send = partial(post_all, int(port), path, body, expected, repeats)
                send()  # warm
                begin = time.perf_counter()
                gap = stream.longest(send)
                spent = time.perf_counter() - begin
                alone = stream.longest(partial(time.sleep, max(1.0, spent)))
                found[name] = {"gap_ms": gap, "alone_ms": alone, "grown_ms": max(0.0, gap - alone)}
                found[name]["s"] = spent / repeats
            stream.close()
    print(f"{'':24}{'alone':>10}{'under it':>10}{'grown':>10}{'request':>10}")
    for name, row in found.items():
        print(f"{name:24}{row['alone_ms']:8.1f}ms{row['gap_ms']:8.1f}ms{row['grown_ms']:8.1f}ms{row['s']:9.2f}s")
    from report import emit  # torch, which nothing that is measured here needs

    worst = max(row["grown_ms"] for row in found.values())
    emit(
        "front_gap",
        goal_ms=GOAL_MS,
        grown_ms=round(worst, 1),
        alone_ms=round(max(row["alone_ms"] for row in found.values()), 1),
        met=worst <= GOAL_MS,
        loads={name: {key: round(value, 2) for key, value in row.items()} for name, row in found.items()},
    )


if __name__ == "__main__":
    main()
