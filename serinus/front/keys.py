"""API keys: which of them open what, and the check of a request's own."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from serinus.core.errors import Unauthorized
from serinus.front.exchange import HttpExchange

__all__ = ["Keys", "check_key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of one server; empty = none is set."""

    user: str = ""
    """Opens generation and information; where it is empty, both are open to all."""
    admin: str = ""
    """Opens operations too; where it is empty, the user's key does."""

    @property
    def operator(self) -> str:
        """The key that opens operations; empty = they are open to all."""
        return self.admin or self.user

    def that_open(self, what: str) -> tuple[str, ...]:
        """The keys that open endpoints marked user, admin or none; () = no key is asked for."""
        if what == "admin":
            return (self.operator,) if self.operator else ()
        return tuple(key for key in (self.user, self.admin) if self.user and key and what == "user")


def check_key(exchange: HttpExchange, keys: tuple[str, ...]) -> None:
    """Raises Unauthorized unless one of `keys` is given; comparing takes the same time for any key. () = open."""
    if not keys:
        return
    scheme, _, value = exchange.header("authorization").partition(" ")
    given = value.strip() if scheme.lower() == "bearer" else exchange.header("x-api-key")  # Anthropic's clients
    matches = [hmac.compare_digest(given.encode(), key.encode()) for key in keys]
    if not any(matches):
        raise Unauthorized("authorization: got no key or a wrong one, expected `Authorization: Bearer KEY`")
