"""EngineDriver: turns one real engine in this thread, as its process loop would, and keeps what clients get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from serinus.core.request import Request, TokenDelta
from serinus.core.sampling import SamplingParams
from serinus.engine.build import Built
from serinus.engine.messages import FrontMessage
from serinus.testing.builders import Answer
from serinus.wire.messages import Abort

__all__ = ["EngineDriver"]

_FRONT = "test"
_WAIT_S = 0.05


class EngineDriver:
    """Requests are taken by the next turn; `answers` holds what came back, by request."""

    def __init__(self, built: Built) -> None:
        self.built, self.engine, self.line = built, built.engine, built.line
        self.answers: dict[str, Answer] = {}
        self._messages: list[FrontMessage] = []

    def send(self, request: Request) -> None:
        """Give a client's request to the next turn."""
        self._messages.append(FrontMessage(front=_FRONT, message=request))

    def add(self, rid: str, prompt: Sequence[int], count: int = 8, **sampling: Any) -> None:
        """A client's request, greedy unless told otherwise."""
        params = SamplingParams(**{"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **sampling})
        self.send(Request(rid=rid, prompt=np.asarray(prompt, np.int32), sampling=params, seed=7))

    def abort(self, rid: str) -> None:
        """Give a client's abort to the next turn."""
        self._messages.append(FrontMessage(front=_FRONT, message=Abort(rid=rid, reason="test")))

    def turn(self) -> list[TokenDelta]:
        """One turn of the engine and the work it gave to the ranks; what clients get of it."""
        messages, self._messages = self._messages, []
        output = self.built.turn(messages)
        deltas = [delta for _, each in output.deltas for delta in each]
        for delta in deltas:
            self.answers.setdefault(delta.rid, Answer()).take(delta)
        self.line.flush()
        return deltas

    @property
    def stalled(self) -> bool:
        """No message waits, and without one nothing will happen any more."""
        return not self._messages and self.engine.stalled

    def wait(self) -> None:
        """Wait a moment for other ranks or for copies, where the engine has nothing else to do."""
        if (wait_s := self.engine.wait_s) > 0:
            self.line.pump(min(wait_s, _WAIT_S))

    def run(self) -> None:
        """Turn until nothing is left to do."""
        while self.turn() or not self.stalled:
            self.wait()

    def tokens(self, rid: str) -> list[int]:
        """What a request was answered."""
        return self.answers[rid].tokens
