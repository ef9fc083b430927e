"""No process outlives the one that started it, and one that stands still can be asked where."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Ask the kernel for a signal when the parent (process id `parent`) ends; at once where it has ended already.

    Linux only: elsewhere the parent has to say it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), number)


def leave_terminal_to_parent() -> None:
    """Ctrl-C and the end of the terminal reach the whole group of processes: the parent decides what follows."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def show_stacks_at(number: signal.Signals) -> None:
    """At this signal write the stacks of all threads to stderr, also while none of them runs Python."""
    faulthandler.register(number, all_threads=True)


def end_now(code: int) -> NoReturn:
    """End this process with an exit code, once everything that must be let go of has been.

    What the interpreter would tear down besides (torch above all) takes seconds on a busy machine, and is not needed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
