"""Mutants of the line between a leader and its ranks: each must stop the engine at the header that shows it.

The fault stands where bytes travel (the simulated links) or where a rank obeys; the hash of the line is the product's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from serinus.ranks import RunStep
from serinus.ranks.codec import Header, decode_header, encode_header, pack_commands
from serinus.sim.links import SimLinks
from serinus.wire import Parts
from tests.sim.hunting import mutant, replaced

__all__ = ["STOPPED"]

STOPPED = "has another line than its leader"
"""What the engine says when it stops."""
_AFTER = 6
"""Headers of an engine that travel as they are."""


@contextmanager
def _sending(change: Callable[[list[Parts], Parts], None]) -> Iterator[None]:
    """Each header of the last rank of an engine but the first few is given to `change`, with the list of what is to be
    sent in its place."""
    original = SimLinks.send

    def send(self: SimLinks, rank: int, parts: Parts) -> None:
        out = [parts]
        if rank == len(self._sent) - 1 and decode_header(parts).number > _AFTER:
            out.clear()
            change(out, parts)
        for each in out:
            original(self, rank, each)

    with replaced(SimLinks, "send", send):
        yield


def _changed(out: list[Parts], parts: Parts, change: Callable[[Header], list[object]]) -> None:
    header = decode_header(parts)
    commands = change(header)
    out.append(encode_header(header.number, header.digest, pack_commands(commands)))


@mutant("a header is lost", says=STOPPED)
def header_lost() -> Iterator[None]:
    """One header does not arrive."""
    lost: list[Parts] = []

    def change(out: list[Parts], parts: Parts) -> None:
        (out if lost else lost).append(parts)

    with _sending(change):
        yield


@mutant("a header comes twice", says=STOPPED)
def header_repeated() -> Iterator[None]:
    """Every header arrives twice."""
    with _sending(lambda out, parts: out.extend((parts, parts))):
        yield


@mutant("two headers are exchanged", says=STOPPED)
def headers_exchanged() -> Iterator[None]:
    """One header waits until the next one has left."""
    held: list[Parts] = []
    done: list[bool] = []

    def change(out: list[Parts], parts: Parts) -> None:
        if done or not held:
            (out if done else held).append(parts)
        else:
            done.append(True)
            out.extend((parts, held.pop()))

    with _sending(change):
        yield


@mutant("a command in a header is altered", says=STOPPED)
def command_altered() -> Iterator[None]:
    """A plan names another token."""

    def altered(command: object) -> object:
        if not isinstance(command, RunStep) or not command.plan.work:
            return command
        first, *others = command.plan.work
        other = replace(first, tokens=(first.tokens + 1) % 16)
        return RunStep(plan=replace(command.plan, work=(other, *others)))

    with _sending(lambda out, parts: _changed(out, parts, lambda header: [altered(each) for each in header.commands])):
        yield


@mutant("a command in a header is lost", says=STOPPED)
def command_lost() -> Iterator[None]:
    """The last one of a header is missing."""
    with _sending(lambda out, parts: _changed(out, parts, lambda header: list(header.commands[:-1]))):
        yield


@mutant("a command in a header comes twice", says=STOPPED)
def command_repeated() -> Iterator[None]:
    """The last one of a header is there twice."""
    with _sending(lambda out, parts: _changed(out, parts, lambda header: [*header.commands, *header.commands[-1:]])):
        yield


@mutant("commands in a header change places", says=STOPPED)
def commands_reordered() -> Iterator[None]:
    """The last one comes first."""
    with _sending(lambda out, parts: _changed(out, parts, lambda header: list(reversed(header.commands)))):
        yield


@mutant("a header of another rank", says=STOPPED)
def header_of_another_rank() -> Iterator[None]:
    """What the leader tells one rank alone, another one gets too."""
    original = SimLinks.send
    last: dict[tuple[Any, int], Parts] = {}

    def send(self: SimLinks, rank: int, parts: Parts) -> None:
        number = decode_header(parts).number
        original(self, rank, last.get((self, number), parts) if number > _AFTER else parts)
        last[self, number] = parts

    with replaced(SimLinks, "send", send):
        yield
