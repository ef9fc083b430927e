"""What people's side costs: CPU of HTTP, detokenizer and router per streamed token, of tokenizer per prompt token.

And time: what HTTP adds to one token of an engine that answers at once, on a connection that is kept.

    python benchmarks/front.py [--fast]

A fake engine (own process) makes one token for each of 16 streams every 10 ms; a front (own process) streams them; a
client counts. The figure is the front's own CPU time, from /proc, over the tokens that arrived. Floor: one send() of
the same chunk over loopback TCP, which no server can save. `share_of_two_cores` is what the front takes of 2 cores at
450 tokens/s, the rate a 221M model has there at 16 streams. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STREAMS = 16
GOAL_US = 60.0
ROUTER_GOAL_US = 100.0
ANSWER_GOAL_MS = 2.0
RATE = 450.0
VOCAB = 2048
STEP_S = 0.01


def run_engine(endpoint: str, step_s: str) -> None:
    """Role `engine`: a fake one, until stdin closes."""
    from serinus.testing.fake_engine import FakeEngine

    def ascii_token(prompt: object, seed: int, position: int, vocab: int) -> int:
        return 97 + (seed + position * 7) % 26

    with FakeEngine(
        endpoint=endpoint,
        vocab_size=VOCAB,
        context_length=1 << 20,
        max_total_tokens=1 << 24,
        step_s=float(step_s),
        token=ascii_token,
    ):
        print("up", flush=True)
        sys.stdin.read()


def run_front(endpoint: str, folder: str) -> None:
    """Role `front`: prints its port, serves until stdin closes."""
    from serinus.front import EngineClient, FrontSettings, HttpServer, bind, create_app

    sock = bind("127.0.0.1", 0)
    app = create_app(
        FrontSettings(model_path=folder, served_model_name="bench"),
        EngineClient(endpoint),
        on_ready=lambda ready: print(sock.getsockname()[1], flush=True),
    )
    serve_until_stdin_closes(HttpServer(app, sock))


def run_router(url: str) -> None:
    """Role `router`: the same."""
    from serinus.front import HttpServer, RouterSettings, bind, create_router_app

    sock = bind("127.0.0.1", 0)
    server = HttpServer(create_router_app(RouterSettings(decode_urls=(url,))), sock)
    print(sock.getsockname()[1], flush=True)
    serve_until_stdin_closes(server)


def serve_until_stdin_closes(server: object) -> None:
    """Serve; end when the parent lets go."""
    threading.Thread(target=lambda: (sys.stdin.read(), server.stop(now=True)), daemon=True).start()
    server.run_here()


@contextmanager
def role(*words: str) -> Iterator[tuple[int, str]]:
    """A process of this script in a role: its pid and the line it says when it is up."""
    process = subprocess.Popen(
        [sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process.pid, process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(20)


def cpu_us(pid: int) -> float:
    """Time on a CPU of all threads of a process, microseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e3


def stream(port: int, path: str, body: dict, counts: list[int]) -> None:
    """One streaming client over a raw socket; adds the events it read."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), 30) as sock:
        sock.sendall(head + raw)
        seen = 0
        rest = b""
        while data := sock.recv(1 << 16):
            data = rest + data
            seen += data.count(b"data: {")
            rest = data[-7:] if b"data: {" not in data[-7:] else b""
    counts.append(seen)


def cost(pids: list[int], port: int, path: str, body: dict, tokens: int) -> list[float]:
    """Microseconds of CPU per token of each process, for one round of 16 streams."""
    counts: list[int] = []
    before = [cpu_us(pid) for pid in pids]
    clients = [threading.Thread(target=stream, args=(port, path, body, counts)) for _ in range(STREAMS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    spent = [cpu_us(pid) - low for pid, low in zip(pids, before, strict=True)]
    # tokens that came together leave as one event
    assert sum(counts) >= 0.95 * STREAMS * tokens, f"benchmark: {counts} events, expected {tokens} from each stream"
    return [us / (STREAMS * tokens) for us in spent]


def median_ms(work: object, runs: int) -> float:
    """Milliseconds of a call: the median of `runs`, after a few to warm up."""
    times = []
    for turn in range(runs + 10):
        at = time.perf_counter()
        work()
        if turn >= 10:
            times.append(time.perf_counter() - at)
    return statistics.median(times) * 1e3


def answer_ms(port: int, body: dict, status: int, runs: int) -> float:
    """One POST after the other on one connection, each from its first byte to the last of its answer."""
    raw = json.dumps(body).encode()
    request = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw
    with socket.create_connection(("127.0.0.1", port), 30) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def ask() -> None:
            sock.sendall(request)
            answer = sock.recv(1 << 16)
            head, _, rest = answer.partition(b"\r\n\r\n")
            assert head.split()[1] == str(status).encode(), f"benchmark: {answer!r}, expected status {status}"
            missing = int(head.lower().split(b"content-length: ")[1].split()[0]) - len(rest)
            while missing > 0:
                missing -= len(sock.recv(1 << 16))

        return median_ms(ask, runs)


def engine_answer_ms(endpoint: str, runs: int) -> float:
    """The same token asked of the engine itself, without HTTP and text."""
    import asyncio

    import numpy as np

    from serinus.core.ids import new_rid
    from serinus.core.request import Request
    from serinus.core.sampling import SamplingParams
    from serinus.front import EngineClient

    with asyncio.Runner() as runner:
        client = EngineClient(endpoint)
        runner.run(client.start())
        prompt, params = np.arange(16, dtype=np.int32), SamplingParams(max_new_tokens=1)

        async def ask() -> None:
            queue = client.submit([Request(rid=new_rid(), prompt=prompt, sampling=params, seed=0)])
            while not any(delta.finish for delta in await queue.take()):
                pass

        spent = median_ms(lambda: runner.run(ask()), runs)
        client.stop()
    return spent


def answers(home: str, folder: str, runs: int) -> dict[str, float]:
    """Milliseconds of whole answers on kept connections, by front and by router, and of the engine alone."""
    endpoint = f"ipc://{home}/quick"
    one, wrong = {"prompt": "hello the world", "max_tokens": 1}, {"prompt": "x", "max_tokens": -1}
    with (
        role("engine", endpoint, "0"),
        role("front", endpoint, folder) as (_, port),
        role("router", f"http://127.0.0.1:{port}") as (_, router_port),
    ):
        time.sleep(2.5)
        return {
            "engine_answer_ms": engine_answer_ms(endpoint, runs),
            "answer_ms": answer_ms(int(port), one, 200, runs),
            "refusal_ms": answer_ms(int(port), wrong, 400, runs),
            "router_answer_ms": answer_ms(int(router_port), one, 200, runs),
        }


def send_floor_us(runs: int) -> float:
    """One send() of a chunk over loopback TCP."""
    chunk = b"x" * 240
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        drain = threading.Thread(target=lambda: [None for _ in iter(lambda: far.recv(1 << 16), b"")], daemon=True)
        drain.start()
        begin = time.thread_time()
        for _ in range(runs):
            near.send(chunk)
        spent = time.thread_time() - begin
        near.close()
        drain.join()
        far.close()
    return spent / runs * 1e6


def text_costs(folder: str, runs: int) -> dict[str, float]:
    """Tokenizer, template and detokenizer alone."""
    from serinus.text import load_tokenizer

    begin = time.perf_counter()
    tokenizer = load_tokenizer(folder)
    load_ms = (time.perf_counter() - begin) * 1e3
    text = "hello the abc world, " * 50
    ids = tokenizer.encode(text)
    chat = [{"role": "user", "content": text}]

    def us(work: object, per: int) -> float:
        times = []
        for _ in range(runs):
            at = time.perf_counter()
            work()
            times.append(time.perf_counter() - at)
        return statistics.median(times) / per * 1e6

    def feed() -> None:
        detokenizer = tokenizer.detokenizer()
        for token_id in ids:
            detokenizer.feed((token_id,))

    return {
        "tokenizer_load_ms": load_ms,
        "tokenize_us_per_token": us(lambda: tokenizer.encode(text), len(ids)),
        "chat_template_us": us(lambda: tokenizer.template.render(chat), 1),
        "detokenize_us_per_token": us(feed, len(ids)),
    }


def main() -> None:
    """Run all, print a table and the JSON line."""
    if len(sys.argv) > 2:
        {"engine": run_engine, "front": run_front, "router": run_router}[sys.argv[1]](*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="a quarter of the tokens")
    tokens = 100 if parser.parse_args().fast else 400
    from serinus.testing.small_tokenizers import make_byte_tokenizer

    chat = {"messages": [{"role": "user", "content": "hello the world"}]}
    plain = {"max_tokens": tokens, "stream": True}
    loads = {
        "completions": ("/v1/completions", {"prompt": "hello the world", **plain}),
        "chat": ("/v1/chat/completions", {**chat, **plain}),
        "chat_stop_texts": ("/v1/chat/completions", {**chat, **plain, "stop": ["###", "\n\nUser:"]}),
        "chat_logprobs": ("/v1/chat/completions", {**chat, **plain, "logprobs": True, "top_logprobs": 5}),
        "native": ("/generate", {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": tokens}}),
    }
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as home:
        folder = str(make_byte_tokenizer(Path(home) / "tokenizer"))
        endpoint = f"ipc://{home}/engine"
        with (
            role("engine", endpoint, str(STEP_S)),
            role("front", endpoint, folder) as (front, port),
            role("router", f"http://127.0.0.1:{port}") as (router, router_port),
        ):
            time.sleep(2.5)  # the router's first look
            for name, (path, body) in loads.items():
                cost([front], int(port), path, body, tokens)  # warm
                found[f"front_{name}_us"] = cost([front], int(port), path, body, tokens)[0]
            found["router_us"] = cost([front, router], int(router_port), *loads["chat"], tokens)[1]
        found |= text_costs(folder, 50)
        found |= answers(home, folder, 2 * tokens)
    found["kept_connection_ms"] = found["answer_ms"] - found["engine_answer_ms"]
    floor = send_floor_us(20_000)
    goals = {
        "front_completions_us": GOAL_US,
        "front_chat_us": GOAL_US,
        "router_us": ROUTER_GOAL_US,
        "kept_connection_ms": ANSWER_GOAL_MS,
    }
    print(f"{'':28}{'here':>10}{'goal':>10}{'floor':>10}")
    for name, value in found.items():
        low = floor if name in goals and name.endswith("_us") else float("nan")
        print(f"{name:28}{value:10.2f}{goals.get(name, float('nan')):10.1f}{low:10.2f}")
    share = found["front_chat_us"] * RATE / 2e6
    print(f"{'share_of_two_cores':28}{share:10.4f}{0.05:10.2f}")
    from report import emit  # torch, which nothing that is measured here needs

    emit(
        "front",
        streams=STREAMS,
        send_floor_us=round(floor, 2),
        share_of_two_cores=round(share, 5),
        figures={
            name: {"value": round(value, 2), "goal": goals.get(name), "met": value <= goals.get(name, value)}
            for name, value in found.items()
        },
    )


if __name__ == "__main__":
    main()
