"""Identities that must never repeat: incarnations, transfer ids, request ids, grants."""

from __future__ import annotations

import secrets
from dataclasses import dataclass


def new_incarnation() -> int:
    """63 random bits naming one life of one process; a restart is a new one. Never 0."""
    return secrets.randbits(63) | 1


def new_xid(attempt: int = 0) -> str:
    """Name of one handoff attempt: 128 random bits, then the attempt number."""
    return f"{secrets.token_hex(16)}.{attempt}"


def new_rid(prefix: str = "req") -> str:
    """A request id for a request that came without one."""
    return f"{prefix}-{secrets.token_hex(12)}"


def new_token() -> bytes:
    """16 random bytes that cannot be guessed."""
    return secrets.token_bytes(16)


@dataclass(slots=True)
class GrantCounter:
    """Numbers that are handed out once and never again within an incarnation."""

    last: int = 0

    def take(self) -> int:
        self.last += 1
        return self.last
