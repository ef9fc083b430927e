"""The other process, held by the story."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FAR = Path(__file__).with_name("far.py")


class Far:
    """The process of far.py."""

    def __init__(self, name: str, pages: int, strip_bytes: int, fill: int) -> None:
        words = [sys.executable, str(FAR), name, str(pages), str(strip_bytes), str(fill)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.endpoint = bytes.fromhex(self.heard())

    def heard(self) -> str:
        """The next answer of the other process."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("FAR "):
                return line[4:].strip()
        raise AssertionError(f"the other process ended with {self.process.wait()}")

    def tell(self, *words: object) -> None:
        """Send a command to the other process."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def ask(self, *words: object) -> str:
        """An order and its answer."""
        self.tell(*words)
        return self.heard()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def far() -> Iterator[Callable[..., Far]]:
    """Starts other processes; they end with the test."""
    started: list[Far] = []

    def start(name: str, pages: int = 64, strip_bytes: int = 4096, fill: int = 10) -> Far:
        started.append(Far(name, pages, strip_bytes, fill))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        for pipe in (process.process.stdin, process.process.stdout):
            if pipe is not None:
                pipe.close()
