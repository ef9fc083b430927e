"""An engine without a model: a zmq ROUTER in a thread that speaks wire like a real one and makes tokens up by a rule.

For tests and benchmarks of the front. The token at position p of a sequence depends on the prompt, the seed and p alone
(`fake_token`), so that a test knows every answer beforehand.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import zmq

from serinus.core.ids import new_incarnation
from serinus.core.request import FinishReason, KvIntegrity, Request, TokenDelta, TokenLogprobs, Usage
from serinus.core.rng import splitmix64
from serinus.wire import codec
from serinus.wire.messages import (
    Abort,
    EngineCall,
    EngineReply,
    Generate,
    Message,
    Ready,
    StopEngine,
    Tokens,
)
from serinus.wire.watched import PoolCells, WatchFrame


def fake_token(prompt: Sequence[int], seed: int, position: int, vocab_size: int) -> int:
    """The token at `position` (0 = the first of the answer) of the answer to `prompt`."""
    state = splitmix64(seed ^ 0x5EED)
    for token_id in prompt:
        state = splitmix64(state ^ int(token_id))
    return splitmix64(state ^ position) % vocab_size


def fake_continue(prompt: Sequence[int], count: int, *, vocab_size: int, seed: int = 0) -> list[int]:
    """The first `count` tokens of the answer to `prompt`; greedy requests use seed 0."""
    return [fake_token(prompt, seed, position, vocab_size) for position in range(count)]


@dataclass(slots=True, kw_only=True)
class _Sequence:
    peer: bytes
    request: Request
    prompt: list[int]
    sent: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class FakeEngine:
    """Binds `endpoint` and serves until `stop`. `with FakeEngine(...) as engine:` starts and stops it."""

    endpoint: str
    """ipc:// or tcp:// address to bind."""
    engine: str = "fake-0"
    """Name of the engine in its answers."""
    role: str = "unified"
    """Role of the engine: unified, prefill or decode."""
    vocab_size: int = 256
    """Tokens are below this."""
    context_length: int = 512
    """Tokens of a sequence at most."""
    max_total_tokens: int = 4096
    """What it says of its pool."""
    pd_address: str = ""
    """What it says of its control address."""
    step_s: float = 0.0
    """Pause between two steps, seconds: 0 makes tokens as fast as they are taken."""
    stall: bool = False
    """Take requests, but make no tokens until `let_go`."""
    token: Callable[[Sequence[int], int, int, int], int] = fake_token
    """The rule: prompt, seed, position, vocab_size -> token."""
    refuse: str = ""
    """Refuse every request with this text."""
    refuse_status: int = 400
    """The status of that."""
    convicts: tuple[int, ...] = ()
    """Prompts with one of these tokens fail after their first token, as those that a canary convicts (status 500)."""
    kv_canary: str = "none"
    """What it says of its canary; with one, each answer has a receipt."""
    breaks: str = ""
    """Say, when a request comes, that the engine has broken, with this text."""
    mute: bool = False
    """Answer no calls before it ends, as an engine that stands in a step."""
    degraded: str = ""
    """What it says of its health."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end an answer."""
    sampling_defaults: dict[str, int | float] = field(default_factory=dict)
    """What it says of its checkpoint's defaults."""
    frames: int = 0
    """Frames that dashboards asked for."""
    received: list[Message] = field(default_factory=list)
    """Every message that came, in order."""
    garble: bool = False
    """Send tokens in frames whose last byte is wrong."""
    prefill_engine: str = ""
    """What it says of where prompts were computed."""
    running: dict[str, _Sequence] = field(default_factory=dict)
    """Sequences being answered, by rid."""
    _stopping: threading.Event = field(default_factory=threading.Event)
    _go: threading.Event = field(default_factory=threading.Event)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _socket: zmq.Socket[bytes] | None = None
    _incarnation: int = 0
    _seq: int = 0
    _late: list[tuple[bytes, EngineCall]] = field(default_factory=list)

    def __enter__(self) -> FakeEngine:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Bind, then serve in a thread."""
        self._incarnation = new_incarnation()
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        socket.linger = 0
        socket.sndhwm = 0
        socket.bind(self.endpoint)
        self._socket = socket
        self._thread = threading.Thread(target=self._serve, name="fake-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the socket."""
        self._stopping.set()
        self._go.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def let_go(self) -> None:
        """End a stall: answer what waits."""
        self.stall = False
        self._go.set()

    def wait_for(self, seen: Callable[[FakeEngine], bool], seconds: float = 60.0) -> None:
        """Block until `seen` holds; it is asked after every message and every step. Fails after `seconds`."""
        with self._changed:
            assert self._changed.wait_for(lambda: seen(self), seconds), "testing: the fake engine never saw it"

    def of(self, kind: type[Message]) -> list[Message]:
        """Messages of one type that came."""
        return [message for message in self.received if isinstance(message, kind)]

    # ---- the engine's thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._socket is not None
        while not self._stopping.is_set():
            while self._late and not self.mute:
                self._answer(*self._late.pop(0))
            idle = not self.running or self.stall
            while self._socket is not None and self._socket.poll(20 if idle else 0):
                peer, *parts = self._socket.recv_multipart()
                message = codec.decode(parts).message
                with self._changed:
                    self._take(peer, message)
                    self.received.append(message)
                    self._changed.notify_all()
                idle = False
            if self.running and not self.stall:
                with self._changed:
                    self._step()
                    self._changed.notify_all()
                if self.step_s:
                    self._stopping.wait(self.step_s)

    def _send(self, peer: bytes, message: Message) -> None:
        assert self._socket is not None
        self._seq += 1
        parts = [bytes(part) for part in codec.encode(message, self._incarnation, self._seq)]
        if self.garble and isinstance(message, Tokens):
            parts[-1] = parts[-1][:-1] + bytes([parts[-1][-1] ^ 1])
        self._socket.send_multipart([peer, *parts])

    def _take(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Generate):
            request = message.request
            if self.breaks:
                self._send(peer, EngineReply(call=0, ok=False, body=self.breaks.encode()))
                return
            if self.refuse:
                out = TokenDelta(rid=request.rid, finish=FinishReason.ERROR, error=self.refuse,
                                 error_status=self.refuse_status)  # fmt: skip
                self._send(peer, Tokens(deltas=(out,)))
                return
            self.running[request.rid] = _Sequence(peer=peer, request=request, prompt=request.prompt.tolist())
        elif isinstance(message, Abort):
            for rid in list(self.running) if message.all else [message.rid]:
                sequence = self.running.pop(rid, None)
                if sequence is not None and not message.silent:
                    usage = self._usage(sequence, ends=True)
                    out = TokenDelta(rid=rid, finish=FinishReason.ABORT, error=message.reason, usage=usage)
                    self._send(sequence.peer, Tokens(deltas=(out,)))
        elif isinstance(message, EngineCall) and self.mute and message.what != "ready":
            self._late.append((peer, message))
        elif isinstance(message, EngineCall):
            self._answer(peer, message)
        elif isinstance(message, StopEngine):
            self._stopping.set()

    def _answer(self, peer: bytes, call: EngineCall) -> None:
        if call.what == "ready":
            self._send(peer, self._ready())
            return
        ok, body = True, b""
        if call.what == "flush_cache" and self.running:
            ok, body = False, f"{len(self.running)} requests are running".encode()
        elif call.what == "metrics":
            where = f'engine="{self.engine}",role="{self.role}",rank="tp0"'
            body = (
                "# HELP serinus:num_running_reqs Requests running\n# TYPE serinus:num_running_reqs gauge\n"
                f"serinus:num_running_reqs{{{where}}} {len(self.running)}\n"
            ).encode()
        elif call.what == "canary":
            body = json.dumps({"mode": "none", "engine": self.engine}).encode()
        elif call.what == "perturb":
            ok = b"tier_bytes" not in call.body
            body = json.dumps({"engine": self.engine, "order": call.body.decode()}).encode() if ok else b"no tier"
        elif call.what == "cache":
            tree = {"total": len(self.running), "nodes": [], "limit": call.limit}
            body = json.dumps({"engine": self.engine, "role": self.role, "pools": [], "tree": tree}).encode()
        elif call.what == "watch":
            self.frames += 1
            raw = {"rates": b'{"number":%d}' % self.frames}
            pool = PoolCells(tier="device", part="full", state=bytes([5, 2, 0]), seen=bytes(12))
            body = msgspec.msgpack.encode(WatchFrame(now=1.0 + self.frames, pools=(pool,), sections=raw))
        elif call.what == "look":
            ok = b"99" not in call.body
            found = {"order": msgspec.json.decode(call.body), "tokens": [104, 105], "before": [72]}
            body = json.dumps(found).encode() if ok else b"page: got 99, expected less"
        elif call.what in ("info", "load"):
            load = {"num_running_reqs": len(self.running), "num_queue_reqs": 0, "degraded": self.degraded}
            body = json.dumps(load).encode()
        self._send(peer, EngineReply(call=call.call, ok=ok, body=body))

    def _ready(self) -> Ready:
        return Ready(
            engine=self.engine,
            incarnation=self._incarnation,
            role=self.role,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            max_total_tokens=self.max_total_tokens,
            page_size=16,
            pd_address=self.pd_address,
            eos_ids=self.eos_ids,
            sampling_defaults=self.sampling_defaults,
            seconds={"imports": 0.5},
            info={"dtype": "none", "kv_canary": self.kv_canary},
        )

    def _usage(self, sequence: _Sequence, *, ends: bool = False) -> Usage:
        cached = {"device": min(16, len(sequence.prompt) - 1)} if len(sequence.prompt) > 16 else {}
        return Usage(
            prompt_tokens=len(sequence.prompt),
            completion_tokens=len(sequence.sent),
            cached_tokens=cached,
            prefill_engine=self.prefill_engine,
            handoff_pages=3 if self.prefill_engine else 0,
            kv_integrity=self._receipt(sequence) if ends and self.kv_canary != "none" else None,
        )

    def _receipt(self, sequence: _Sequence) -> KvIntegrity:
        horizon = len(sequence.prompt) + len(sequence.sent) - 1
        sources = {"device": 0, "host": 0, "storage": 0, "peer": 0, "computed": horizon}
        return KvIntegrity(
            coverage="full", slots_due=9, slots_checked=9, horizon=horizon, sources=sources, heals=1,
            heal_reasons=("KV integrity: healed",), repaired_from={"computed": 2}, chain_hash="0123456789abcdef",
        )  # fmt: skip

    def _step(self) -> None:
        """One token for every running sequence, in one message per front."""
        by_peer: dict[bytes, list[TokenDelta]] = {}
        for rid, sequence in list(self.running.items()):
            out = self._next(rid, sequence)
            if out.finish:
                del self.running[rid]
            by_peer.setdefault(sequence.peer, []).append(out)
        for peer, outs in by_peer.items():
            self._send(peer, Tokens(deltas=tuple(outs)))

    def _next(self, rid: str, sequence: _Sequence) -> TokenDelta:
        sampling = sequence.request.sampling
        if sequence.sent and set(self.convicts) & set(sequence.prompt):
            return TokenDelta(rid=rid, finish=FinishReason.ERROR, error="KV integrity: convicted", error_status=500,
                              wrong_token=None if self.kv_canary == "none" else 0)  # fmt: skip
        seed = 0 if sampling.temperature == 0 else sequence.request.seed
        token_id = self.token(sequence.prompt, seed, len(sequence.sent), self.vocab_size)
        first = not sequence.sent
        sequence.sent.append(token_id)
        limit = self.context_length - len(sequence.prompt)
        if sampling.max_new_tokens is not None:
            limit = min(limit, sampling.max_new_tokens)
        stops = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *self.eos_ids)
        stopped = token_id in stops and len(sequence.sent) > sampling.min_new_tokens
        ends = len(sequence.sent) >= limit
        finish = FinishReason.STOP if stopped else FinishReason.LENGTH if ends else None
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.logprobs is not None:
            about = {"last": 3.0, "mean": 4.0, "cls": 5.0}[sampling.pooling]
            hidden = struct.pack("<2f", about, len(sequence.prompt)) if sampling.hidden_state else b""
            logprobs = (replace(self._lp(token_id, sampling.logprobs), hidden=hidden),)
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if first and sampling.prompt_logprobs is not None:
            rest = [self._lp(i, sampling.prompt_logprobs) for i in sequence.prompt[1:]]
            prompt_logprobs = (TokenLogprobs(logprob=None), *rest)
        return TokenDelta(
            rid=rid,
            token_ids=(token_id,),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish=finish,
            matched_stop=token_id if stopped else None,
            usage=self._usage(sequence, ends=finish is not None) if first or finish else None,
        )

    def _lp(self, token_id: int, top: int) -> TokenLogprobs:
        ids = tuple((token_id + k) % self.vocab_size for k in range(top))
        return TokenLogprobs(logprob=-0.5, top_ids=ids, top_logprobs=tuple(-0.5 - k for k in range(top)))
