"""How many files and sockets this process may hold open at a time."""

from __future__ import annotations

import contextlib
import resource

_WANTED = 65_536
"""More than any server here needs; some programs walk through all numbers up to the limit."""


def descriptor_limit() -> int:
    """Descriptors this process may hold open at a time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _WANTED if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> int:
    """Raise the soft limit as far as the hard one allows, to 65,536 at most; children inherit it. Returns the limit.

    Shells give 1,024 by default, which a thousand clients use up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a bound besides: what is allowed now stays allowed
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return descriptor_limit()
