"""Mutants of the data backends (when is an operation over, what does a fence end, when are staged bytes given up), and
of what makes an engine from its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from serinus.pd.backends import MooncakeBackend, NixlBackend, OpResult, OpState, Staged
from serinus.pd.backends.shm import _ShmSender
from tests.sim.canary_mutants import damaged
from tests.sim.hunting import mutant, replaced


@mutant("a read is over when it has begun", "pull")
def read_over_at_once() -> Iterator[None]:
    """Completion is reported before the bytes have moved."""
    settle = NixlBackend._settle

    def settled(self: NixlBackend, op: int, state: str) -> None:
        settle(self, op, "DONE" if state == "PROC" else state)

    with replaced(NixlBackend, "_settle", settled):
        yield


@mutant("a read that failed is over", "pull")
def failed_read_over() -> Iterator[None]:
    """The agent lives on, and with it the pieces of the read that are still under way."""
    settle = NixlBackend._settle

    def settled(self: NixlBackend, op: int, state: str) -> None:
        if state in ("PROC", "DONE"):
            settle(self, op, state)
            return
        self._ops.pop(op).handle.release()
        self._ended[op] = OpResult(state=OpState.FAILED, error=state)

    with replaced(NixlBackend, "_settle", settled):
        yield


@mutant("a write is over when it was handed on", "push")
def write_over_at_once() -> Iterator[None]:
    """Completion is reported before the bytes have moved."""
    poll = MooncakeBackend.poll

    def polled(self: MooncakeBackend, op: int) -> OpResult:
        result = poll(self, op)
        if result.state is not OpState.PENDING:
            return result
        del self._ops[op]
        return OpResult(state=OpState.DONE)

    with replaced(MooncakeBackend, "poll", polled):
        yield


@mutant("a write that failed is over", "push")
def failed_write_over() -> Iterator[None]:
    """Some of its bytes are still on their way."""
    poll = MooncakeBackend.poll

    def polled(self: MooncakeBackend, op: int) -> OpResult:
        result = poll(self, op)
        return OpResult(state=OpState.FAILED, error=result.error) if result.state is OpState.LOST else result

    with replaced(MooncakeBackend, "poll", polled):
        yield


@mutant("a fence that keeps the old engine", "push")
def engine_kept() -> Iterator[None]:
    """Something still refers to it, so its connections are not closed."""
    end, kept = MooncakeBackend._end, []

    def ended(self: MooncakeBackend) -> None:
        kept.append(self._engine)
        end(self)

    with replaced(MooncakeBackend, "_end", ended):
        yield


@mutant("staged bytes are given up before they were fetched", "shm", "tcp")
def staged_given_up() -> Iterator[None]:
    """The place of a piece in the sender's area is handed out again at once."""
    from serinus.pd.backends.tcp import _TcpSender

    def stage(of: Any) -> Any:
        def staged(self: Any, byte_count: int) -> Staged | None:
            found: Staged | None = of(self, byte_count)
            if found is not None:
                self._spans.give(found.key)
            return found

        return staged

    with (
        replaced(_ShmSender, "stage", stage(_ShmSender.stage)),
        replaced(_ShmSender, "release", lambda self, key: None),
        replaced(_TcpSender, "stage", stage(_TcpSender.stage)),
        replaced(_TcpSender, "release", lambda self, key: None),
    ):
        yield


@mutant("an engine is made without the end of an answer")
def no_end() -> Iterator[None]:
    """What the model says of its last token does not reach the scheduler."""
    import serinus.engine.build as build

    settings = build._sched_settings
    with replaced(build, "_sched_settings", lambda parts, depth: replace(settings(parts, depth), eos_ids=())):
        yield


@mutant("an engine is made without the check of arrivals", world=damaged)
def no_check_of_arrivals() -> Iterator[None]:
    """The canary is there, and its role does not know."""
    import serinus.engine.build as build

    parts = build.HandoffParts
    with replaced(build, "HandoffParts", lambda **more: parts(**{**more, "arrived": None})):
        yield
