"""Ctrl-C that waits for the end of a step: an engine interrupted within one does not know what its pages hold."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupt:
    """`with Interrupt() as interrupt:` the body looks at `interrupt.came` where it can stop, and ends.

    KeyboardInterrupt is raised when the body has ended; at once where Ctrl-C comes a second time. A program that
    handles SIGINT itself keeps its handler. In a thread that is not the main one nothing changes: Python raises nothing
    there.
    """

    def __init__(self) -> None:
        self.came = False
        self._held = False

    def __enter__(self) -> Interrupt:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, self._note)
            except ValueError:  # not the main thread
                return self
            self._held = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self._held:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.came and kind is None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
