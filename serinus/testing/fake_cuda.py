"""A GPU that runs what is queued in any order which its streams and events leave open."""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable

from serinus.core.rng import Rng
from serinus.kernels import CudaLibrary


class FakeCuda(CudaLibrary):
    """Streams are queues of what they do next, which says whether it was done."""

    def __init__(self, rng: Rng, stream_count: int = 5, slow: int | None = None) -> None:
        """`slow`: a stream that goes on, nine times of ten, when no other one can."""
        self._marks = defaultdict(deque)
        self.rng, self.slow = rng, slow
        self.streams: list[deque[Callable[[], bool]]] = [deque() for _ in range(stream_count)]
        self.recorded = [0]
        """By event: its records, and..."""
        self.passed = [set[int]({0})]
        """...those that have passed."""
        self.destroyed = self.time = 0
        self.passed_at: dict[int, int] = {}

    def __enter__(self) -> FakeCuda:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def queue(self, stream: int, work: Callable[[], object]) -> None:
        """What a kernel or a copy does, when its stream comes to it."""

        def done() -> bool:
            work()
            return True

        self.streams[stream].append(done)

    def step(self) -> bool:
        """One stream goes on, if one can; which, is chance."""
        self.time += 1
        order = self.rng.sample(range(len(self.streams)), len(self.streams))
        if self.slow is not None and self.rng.random() < 0.9:
            order.sort(key=lambda which: which == self.slow)
        for stream in [self.streams[which] for which in order]:
            if stream and stream[0]():
                stream.popleft()
                return True
        return False

    def run(self) -> None:
        """Until nothing is queued."""
        while any(self.streams):
            assert self.step(), "streams wait for each other"

    def is_idle(self, stream: int) -> bool:
        return not self.streams[stream]

    def event(self, *, timed: bool, sleeps: bool = False) -> int:
        self.recorded.append(0)
        self.passed.append({0})
        return len(self.passed) - 1

    def destroy(self, event: int) -> None:
        assert self.has_passed(event), "of a job under way"
        self.destroyed += 1

    def record(self, event: int, stream: int) -> None:
        self.recorded[event] += 1
        number = self.recorded[event]

        def passes() -> None:
            self.passed[event].add(number)
            self.passed_at[event] = self.time

        self.queue(stream, passes)

    def wait(self, stream: int, event: int) -> None:
        number = self.recorded[event]
        self.streams[stream].append(lambda: number in self.passed[event])

    def has_passed(self, event: int) -> bool:
        return self.recorded[event] in self.passed[event]

    def synchronize(self, event: int) -> None:
        while not self.has_passed(event):
            assert self.step(), "the host waits for what cannot run"

    def seconds(self, begin: int, end: int) -> float:
        return float(self.passed_at[end] - self.passed_at[begin])

    def send(self, target: int, source: int, byte_count: int, stream: int) -> None:
        self.queue(stream, lambda: ctypes.memmove(target, source, byte_count))

    fetch = send
