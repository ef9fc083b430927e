"""mutants: planted weaknesses of the canary. A self-test that stays green under one of them proves nothing about it.

A weakness is a patch of public names for as long as its `with` lasts. The self-test knows none of them; `grade` runs it
under each, and the first line that is not as it must be ends that run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch

from serinus.cache import PrefixCache
from serinus.canary import ArrivalVerdict, CanaryLead
from serinus.canary.perturb import Injection
from serinus.canary.ring import Ring
from serinus.core.errors import SerinusError
from serinus.kernels import Reason, StampLane
from serinus.pool import DevicePool
from serinus.selftest.matrix import Subject, plan_matrix, run_cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Weakness:
    """One way in which a canary could look at less than it says."""

    name: str
    apply: Callable[[], AbstractContextManager[None]]
    """The canary is that weak inside of what it returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What the self-test said under one weakness."""

    weakness: str
    seen_by: str
    """The first line of the matrix that was not as it must be; empty = the self-test was blind to it."""
    said: str = ""
    """What was wrong there."""
    cells: int = 0
    """Lines that were run until then."""


lanes_file: Any = import_module("serinus.canary.lanes")
make_file: Any = import_module("serinus.canary.make")
rank_file: Any = import_module("serinus.canary.rank")
build_file: Any = import_module("serinus.ranks.build")
_NOTHING = 1
"""A window in which nothing lies before the token itself."""


def grade(subjects: Sequence[Subject], each: Weakness, *, faults: int = 2, seed: int = 0) -> Grade:
    """Run the self-test under one weakness until a line is not as it must be. Cost: seconds; a whole run where it is
    blind."""
    count = 0
    with each.apply():
        for subject in subjects:
            for cell in plan_matrix(subject):
                count += 1
                try:
                    run_cell(cell, subject, faults=faults, seed=seed)
                except (SerinusError, AssertionError) as error:
                    cell.error = f"{type(error).__name__}: {error}"
                if not cell.perfect:
                    line = f"{cell.model}: {cell.mode} {cell.part.lower()} in {cell.side}"
                    said = cell.error or next(iter(cell.alarms), f"latency {cell.latency} of {cell.promise}")
                    return Grade(weakness=each.name, seen_by=line, said=said, cells=count)
    return Grade(weakness=each.name, seen_by="", cells=count)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


# ---- digests --------------------------------------------------------------------------------------------------------


@contextmanager
def _digested(seen: Callable[[Any], None]) -> Iterator[None]:
    """`seen` sets to zero the coefficients [L, half, sum, lane] of what is not looked at."""
    original = lanes_file.digest_coefficients

    def weak(*rest: Any, **more: Any) -> Any:
        factors = original(*rest, **more)
        seen(factors)
        return factors

    with _replaced(lanes_file, "digest_coefficients", weak):
        yield


# ---- reasons --------------------------------------------------------------------------------------------------------


@contextmanager
def _taken(change: Callable[[list[list[int]], int], tuple[list[list[int]], int]]) -> Iterator[None]:
    """`change` makes of (rows, lost) of a ring what the canary is told."""
    original = Ring.take

    def take(self: Ring, *marked: Any) -> Any:
        news = original(self, *marked)
        if news is None:
            return None
        rows, lost = change(news.rows, news.lost)
        return replace(news, rows=rows, lost=lost)

    with _replaced(Ring, "take", take):
        yield


def _without(reason: Reason) -> AbstractContextManager[None]:
    def change(rows: list[list[int]], lost: int) -> tuple[list[list[int]], int]:
        left = [[row[0], row[1] & ~int(reason), *row[2:]] for row in rows]
        return [row for row in left if row[1]], lost

    return _taken(change)


@contextmanager
def _oracle_ignored() -> Iterator[None]:
    original = build_file.make_canary_rank

    def made(*rest: Any, **more: Any) -> Any:
        return original(*rest, **{**more, "oracle": None})

    with _replaced(build_file, "make_canary_rank", made):
        yield


# ---- checks ---------------------------------------------------------------------------------------------------------


@contextmanager
def _unverified(lane: StampLane) -> Iterator[None]:
    """The watches of all parts do not verify that lane, nor the one beside it."""
    original = make_file.load

    class Blind:
        def __init__(self, watch: Any) -> None:
            self.watch = watch

        def __getattr__(self, name: str) -> Any:
            return getattr(self.watch, name)

        def verify(self, of: int) -> None:
            if of != lane:
                self.watch.verify(of)

        def verify_and_write(self, of: int) -> None:
            self.verify(of)
            self.watch.write(of)

    def weak(device: str) -> Any:
        kernels = original(device)
        make = kernels.canary_watch
        return replace(kernels, canary_watch=lambda *rest, **more: Blind(make(*rest, **more)))

    with _replaced(make_file, "load", weak):
        yield


@contextmanager
def _arrival_ignored() -> Iterator[None]:
    with _replaced(CanaryLead, "arrived", lambda self, rid, own: ArrivalVerdict()):
        yield


@contextmanager
def _read(change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """`change` edits what `reads_of` is asked."""
    original = rank_file.reads_of

    def weak(rows: Any, starts: Any, wholes: Any, chains: Any, **more: Any) -> Any:
        asked = {"rows": rows, "starts": starts, "wholes": wholes, **more}
        change(asked)
        reads = original(asked.pop("rows"), asked.pop("starts"), asked.pop("wholes"), chains, **asked)
        if more["window"] is not None and asked["window"] == _NOTHING:
            reads[3] = reads[2]
        return reads

    with _replaced(rank_file, "reads_of", weak):
        yield


@contextmanager
def _residue_skipped() -> Iterator[None]:
    original = make_file.load

    def weak(device: str) -> Any:
        kernels = original(device)

        def skipping(due: Any, reads: Any, page_size: int) -> Any:
            ends, strides = reads[3:5]
            kept = (strides == 1) | (ends % strides != 0)
            bound_5B = due(reads, page_size).bound_5B.copy()
            return due(np.ascontiguousarray(reads[:, kept]), page_size)._replace(bound_5B=bound_5B)

        def watch(*given: Any) -> Any:
            made = kernels.canary_watch(*given)
            made.due = partial(skipping, made.due)
            return made

        return replace(kernels, canary_due=partial(skipping, kernels.canary_due), canary_watch=watch)

    with _replaced(make_file, "load", weak):
        yield


@contextmanager
def _never_due(is_blind: Callable[[Any, int], bool]) -> Iterator[None]:
    """Of (settings, rank) those that `is_blind` says have turns that no request lives to see."""
    original = build_file.make_canary_rank

    def made(config: Any, spec: Any, shards: Any, rank: int, *rest: Any, **more: Any) -> Any:
        if is_blind(config, rank):
            config = replace(config, canary=replace(config.canary, kv_canary_coverage=f"rotating:{1 << 20}"))
        return original(config, spec, shards, rank, *rest, **more)

    with _replaced(build_file, "make_canary_rank", made):
        yield


@contextmanager
def _none_failed() -> Iterator[None]:
    original = CanaryLead.judge

    def judge(self: CanaryLead, findings: Any) -> Any:
        original(self, findings)
        return ()

    with _replaced(CanaryLead, "judge", judge):
        yield


# ---- sweeps and movers ----------------------------------------------------------------------------------------------


@contextmanager
def _walked(change: Callable[..., Any]) -> Iterator[None]:
    """`change`(original, cache, cursor, budget, more) is the walk of a sweep; walks for other purposes are whole."""
    original = PrefixCache.walk

    def walk(self: PrefixCache, cursor: int, budget: int, **more: Any) -> Any:
        if not more.get("unlocked_only") or budget > 1 << 30:
            return original(self, cursor, budget, **more)
        return change(original, self, cursor, budget, more)

    with _replaced(PrefixCache, "walk", walk):
        yield


def _one_page() -> AbstractContextManager[None]:
    def change(original: Any, cache: PrefixCache, cursor: int, budget: int, more: Any) -> Any:
        found = original(cache, 0, 1 << 30, **more)
        one = slice(0, cache.page_size)
        return replace(found, slots=found.slots[one], positions=found.positions[one], previous=found.previous[one])

    return _walked(change)


@contextmanager
def _lane_left() -> Iterator[None]:
    def kept(method: Callable[..., Any], inward: Callable[..., bool]) -> Callable[..., Any]:
        def moved(self: DevicePool, *rest: Any, **more: Any) -> Any:
            stamps = self.stamps_LS4
            if stamps is None or not inward(*rest, **more):
                return method(self, *rest, **more)
            before = stamps[StampLane.HEAD_V].clone()
            found = method(self, *rest, **more)
            with torch.inference_mode():
                stamps[StampLane.HEAD_V] = before
            return found

        return moved

    always = lambda *rest, **more: True  # noqa: E731
    hashed = lambda pages, rows, seed, inward=False: inward  # noqa: E731
    with ExitStack() as stack:
        for name, inward in (("write_pages", always), ("copy_stamps_in", always), ("hashed_pages", hashed)):
            method = getattr(DevicePool, name)
            stack.enter_context(_replaced(DevicePool, name, kept(method, inward)))
        yield


# ---- ranks ----------------------------------------------------------------------------------------------------------


@contextmanager
def _judged(change: Callable[[int], int | None]) -> Iterator[None]:
    """The leader takes what a rank found as that of rank `change`(rank); None = it is dropped."""
    original = CanaryLead.judge

    def judge(self: CanaryLead, findings: Any) -> Any:
        taken = [(rank if isinstance(found, Injection) else change(rank), found) for rank, found in findings]
        return original(self, [(rank, found) for rank, found in taken if rank is not None])

    with _replaced(CanaryLead, "judge", judge):
        yield


def _weaknesses(by_name: Mapping[str, Callable[[], AbstractContextManager[None]]]) -> tuple[Weakness, ...]:
    return tuple([Weakness(name=name, apply=apply) for name, apply in by_name.items()])


WEAKNESSES = _weaknesses(
    {
        "only the first layer is digested": partial(_digested, lambda factors: factors[1:].fill(0)),
        "only keys are digested": partial(_digested, lambda factors: factors[:, 1].fill(0)),
        "only values are digested": partial(_digested, lambda factors: factors[:, 0].fill(0)),
        "only 2 bytes of each row are digested": partial(_digested, lambda factors: factors[..., 1:].fill(0)),
        "only the first head is digested": partial(
            _digested, lambda factors: factors[..., factors.shape[-1] // 2 :].fill(0)
        ),
        "the chain of hashes is ignored": partial(_without, Reason.VERIFY_CHAIN_HASH),
        "positions are ignored": partial(_without, Reason.VERIFY_POSITION),
        "tokens are ignored": partial(_without, Reason.VERIFY_TOKEN),
        "what the ring could not hold is dropped": partial(_taken, lambda rows, lost: (rows, 0)),
        "of each reading of a ring only the first violation is told": partial(
            _taken, lambda rows, lost: (rows[:1], lost)
        ),
        "the token oracle is not asked": _oracle_ignored,
        "HEAD is never verified": partial(_unverified, StampLane.HEAD_K),
        "TAIL is never verified": partial(_unverified, StampLane.TAIL_K),
        "what arrives is not verified": _arrival_ignored,
        "what comes back from a tier, or by a prefix hit, waits for its turn": partial(
            _read, lambda asked: asked.update(wholes=[False] * len(asked["rows"]))
        ),
        "sliding layers are not verified": partial(
            _read, lambda asked: asked.update(window=None if asked["window"] is None else _NOTHING)
        ),
        "the last position that a request reads is not verified": partial(
            _read, lambda asked: asked.update(starts=[max(0, start - 1) for start in asked["starts"]])
        ),
        "turns leave one residue out": _residue_skipped,
        "a prefill engine does not look at itself": partial(_never_due, lambda config, rank: config.role == "prefill"),
        "no request is failed for what is found": _none_failed,
        "one page is swept": _one_page,
        "every sweep begins at the first page again": partial(
            _walked, lambda original, cache, cursor, budget, more: original(cache, 0, budget, **more)
        ),
        "one lane of stamps is not moved with its page": _lane_left,
    }
)
RANK_WEAKNESSES = _weaknesses(
    {
        "only the leader's rank looks at what it has in use": partial(_never_due, lambda config, rank: rank > 0),
        "what other ranks than the leader's find is dropped": partial(_judged, lambda rank: None if rank else rank),
        "every violation is told as one of the leader's rank": partial(_judged, lambda rank: 0),
    }
)
"""Those that only engines of several ranks can have."""
