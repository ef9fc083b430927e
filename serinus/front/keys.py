"""API keys: which of them open what, the check of a request's own, and what it counts against.

A request that a router of ours passes on shows no key of a client: the router says the share that it counts for, and
proves that it is our router (proofs.py). Its limits were counted there.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from serinus.core.errors import SerinusError, Unauthorized
from serinus.core.request import Share
from serinus.front.exchange import ClientGone, HttpExchange
from serinus.front.key_file import ApiKey, KeyFile
from serinus.front.key_limits import KeyLimits, LimitReached
from serinus.front.metrics import HttpMetrics
from serinus.front.proofs import SHARE, SHARE_HEADER, SHARE_PROOF_HEADER, proof_of, proves

_SHARES = msgspec.json.Decoder(Share)
_UNKNOWN = "authorization: got no key or a wrong one, expected `Authorization: Bearer KEY`"


def share_headers(share: Share, secrets: Sequence[str]) -> list[tuple[str, str]]:
    """What a router tells an engine of the API key of a request. `secrets`: any that an engine may know."""
    said = msgspec.json.encode(share).decode()
    return [(SHARE_HEADER, said), (SHARE_PROOF_HEADER, proof_of(said, secrets, SHARE))]


class Keys:
    """The keys of one server; without any all endpoints are open to all."""

    def __init__(self, *, user: str = "", admin: str = "", file: str = "", secrets: Sequence[str] = ()) -> None:
        """
        Args:
            user: opens generation and information.
            admin: opens operations too; where it is empty, `user` does.
            file: more keys that open generation and information, each with its limits (key_file.py).
            secrets: what a router proves itself with.

        Raises ConfigError: the file is wrong.
        """
        self._user = user
        self._admin = admin
        self._file = KeyFile(file) if file else None
        self._secrets = tuple(filter(None, (self.operator, *secrets)))
        self._limits = KeyLimits()

    @property
    def has_file(self) -> bool:
        """Whether some come from a file, which `refresh` reads again."""
        return self._file is not None

    @property
    def operator(self) -> str:
        """The key that opens operations; empty = there is none: they are open to all, or with a file closed."""
        return self._admin or self._user

    def asked_for(self, what: str) -> bool:
        """Whether endpoints marked user, admin or none ask for a key."""
        if what == "admin":
            return bool(self.operator or self._file)
        return what == "user" and bool(self._user or self._file)

    def refresh(self, now: float, *, asked: bool = False) -> None:
        """Read the file again where it has changed, or where an operator asks for it."""
        if self._file is not None:
            self._file.refresh(now, asked=asked)

    def check(self, exchange: HttpExchange, what: str) -> ApiKey | None:
        """Let a request to an endpoint marked user, admin or none in: notes its share; the key with limits that it
        has. Comparing takes the same time for any key. Raises Unauthorized."""
        proven = self._share_of(exchange) if what == "user" else None
        if proven is not None:
            exchange.share, exchange.tells_tokens = proven, True
            return None
        if not self.asked_for(what):
            return None
        scheme, _, value = exchange.header("authorization").partition(" ")
        given = value.strip() if scheme.lower() == "bearer" else exchange.header("x-api-key")  # Anthropic's clients
        known = (self.operator,) if what == "admin" else (self._user, self._admin)
        matches = [hmac.compare_digest(given.encode(), key.encode()) for key in known if key]
        if any(matches):
            return None
        found = self._file.find(given) if self._file is not None and what == "user" else None
        if found is not None:
            exchange.share = found.share
            return found
        if what == "admin" and not self.operator:
            raise Unauthorized("authorization: this server has no --admin-api-key, which operations need here")
        raise Unauthorized(_UNKNOWN)

    def _share_of(self, exchange: HttpExchange) -> Share | None:
        """The share of a request, as a router of ours says."""
        said = exchange.header(SHARE_HEADER)
        if not said or not proves(exchange.header(SHARE_PROOF_HEADER), said, self._secrets, SHARE):
            return None
        try:
            return _SHARES.decode(said)
        except msgspec.DecodeError:  # of another version
            return None

    @contextmanager
    def counted(self, key: ApiKey | None, exchange: HttpExchange, metrics: HttpMetrics, now: float) -> Iterator[None]:
        """Count a request that generates against the limits of its key. Raises LimitReached."""
        if key is None:
            yield
            return
        declared = exchange.header("content-length")
        try:
            held = self._limits.begin(key, int(declared) if declared.isdecimal() else 0, now)
        except LimitReached as err:
            metrics.key_limited(key.name, err.limit)
            raise
        metrics.key_running(key.name, self._limits.running_of(key.name))
        refused = False
        try:
            yield
        except SerinusError as err:
            refused = not isinstance(err, ClientGone)
            raise
        finally:
            refused = refused or exchange.status >= 400
            tokens = exchange.tokens() if exchange.tokens is not None else 0 if refused else None
            self._limits.end(key, held, tokens)
            metrics.key_ended(key.name, tokens or 0, self._limits.running_of(key.name))
