"""EngineDriver: turns one real engine in this thread, as its process loop would, and keeps what clients get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from serinus.core.request import FinishReason, Request, TokenDelta
from serinus.core.sampling import SamplingParams
from serinus.core.trace import SpanRecord
from serinus.engine.built import Built
from serinus.engine.messages import FrontMessage
from serinus.ranks.tier_parts import pause
from serinus.wire.messages import Abort, Generate

_FRONT = "test"
_WAIT_S = 0.05


class EngineDriver:
    """Requests are taken by the next turn; `deltas` holds what came back, by request."""

    def __init__(self, built: Built) -> None:
        self.built, self.engine, self.line = built, built.engine, built.line
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.spans: list[SpanRecord] = []
        """What it recorded of requests that are traced."""
        self._messages: list[FrontMessage] = []

    def send(self, request: Request) -> None:
        """Give a client's request to the next turn."""
        self.deltas[request.rid] = []
        self._messages.append(FrontMessage(front=_FRONT, message=Generate(request=request)))

    def add(
        self, rid: str, prompt: Sequence[int], count: int = 8, *, seed: int = 7, prefill: str = "",
        stream: bool = False, **sampling: Any,
    ) -> None:  # fmt: skip
        """A client's request, greedy unless told otherwise. `prefill`: address of an engine that may compute it."""
        params = SamplingParams(**{"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **sampling})
        ids = np.asarray(prompt, np.int32)
        self.send(Request(rid=rid, prompt=ids, sampling=params, seed=seed, prefill_address=prefill, stream=stream))

    def abort(self, rid: str, *, matched: bool = False) -> None:
        """Give a client's abort to the next turn. `matched`: its front found a stop text, behind all that it got."""
        abort = Abort(rid=rid, reason="test", matched_stop=matched, kept=len(self.tokens(rid)))
        self._messages.append(FrontMessage(front=_FRONT, message=abort))

    def turn(self) -> list[TokenDelta]:
        """One turn of the engine and the work it gave to the ranks; what clients get of it."""
        messages, self._messages = self._messages, []
        output = self.built.turn(messages)
        self.spans.extend(output.spans)
        deltas = [delta for _, each in output.deltas for delta in each]
        for delta in deltas:
            assert self.finish(delta.rid) is None, f"testing: {delta} after the end of {delta.rid}"
            self.deltas[delta.rid].append(delta)
        self.line.flush()
        return deltas

    @property
    def stalled(self) -> bool:
        """No message waits, and without one nothing will happen any more."""
        return not self._messages and self.engine.stalled

    def wait(self) -> None:
        """Wait a moment for other ranks or for copies, where the engine has nothing else to do."""
        if (wait_s := self.engine.wait_s) <= 0:
            return
        if self.line.under_way or self.line.size > 1:
            self.line.pump(min(wait_s, _WAIT_S))
        else:  # copies are carried by threads of their own: leave them the cores
            pause(min(wait_s, _WAIT_S))

    def run(self) -> None:
        """Turn until nothing is left to do."""
        while self.turn() or not self.stalled:
            self.wait()

    def tokens(self, rid: str) -> list[int]:
        """What a request was answered; nothing of one that came from another engine."""
        return [token for delta in self.deltas.get(rid, ()) for token in delta.token_ids]

    def finish(self, rid: str) -> FinishReason | None:
        """How the request ended; None = it has not."""
        return self.deltas[rid][-1].finish if self.deltas[rid] else None
