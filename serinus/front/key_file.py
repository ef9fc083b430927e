"""The file of `--api-keys-file`: one JSON object a line, each an API key with its name, its weight and its limits.

    {"name": "team-a", "key": "sk-...", "weight": 2, "max_concurrent_requests": 8, "requests_per_minute": 60}
    {"name": "batch", "sha256": "9f86d0...", "tokens_per_minute": 100000, "max_queued_requests": 16}

Blank lines and lines that begin with # are no keys. Of a key only the hash is kept, and only its name is ever shown.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from serinus.core.errors import ConfigError
from serinus.core.log import get_logger
from serinus.core.request import Share
from serinus.core.shown import shown

_log = get_logger("front")

_LOOK_EVERY_S = 1.0
"""Between two looks at the file."""
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LIMITS = ("max_concurrent_requests", "requests_per_minute", "tokens_per_minute", "max_queued_requests")
_FIELDS = ("name", "key", "sha256", "weight", *_LIMITS)
_LIMIT_MAX = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key: what it is called, and what it may have. A limit of 0 is none."""

    name: str
    """In logs, metrics and messages."""
    weight: float = 1.0
    """Its share of the engine while others have requests in line, against their weights."""
    max_concurrent_requests: int = 0
    """HTTP requests being answered at once."""
    requests_per_minute: int = 0
    """HTTP requests; as many may come at once."""
    tokens_per_minute: int = 0
    """Tokens of prompts and answers; as many may come at once."""
    max_queued_requests: int = 0
    """Sequences that wait in one engine."""

    @property
    def share(self) -> Share:
        """What the queue goes by."""
        return Share(name=self.name, weight=self.weight, queued_max=self.max_queued_requests)


class KeyFile:
    """The keys of one file, by their hashes; read again where it has changed."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError: it cannot be read, or a line is wrong (which line, which field)."""
        self._path = path
        self._looked_at = 0.0
        self._seen = self._version()
        self._keys = _read(path)

    def find(self, key: str) -> ApiKey | None:
        """The key that a client showed; None = it is none of these. What it takes does not depend on the keys, as only
        hashes are compared."""
        return self._keys.get(hashlib.sha256(key.encode()).hexdigest())

    def refresh(self, now: float, *, asked: bool = False) -> bool:
        """Read the file again where it has changed, or where an operator asks for it; at most once a second by itself.
        Returns whether it was taken: of a wrong file nothing is."""
        if not asked and now - self._looked_at < _LOOK_EVERY_S:
            return False
        self._looked_at = now
        version = self._version()
        if version == self._seen and not asked:
            return False
        self._seen = version
        try:
            self._keys = _read(self._path)
        except ConfigError as err:
            _log.error("%s; the old keys stay", err)
            return False
        _log.info("front: took %d API keys from %s", len(self._keys), self._path)
        return True

    def _version(self) -> tuple[int, int, int]:
        """What changes where the file is written or replaced; zeros where it is not there."""
        try:
            stat = Path(self._path).stat()
        except OSError:
            return 0, 0, 0
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _read(path: str) -> dict[str, ApiKey]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"front: --api-keys-file {path!r}: {err}, expected a text file with a key a line") from err
    found: dict[str, ApiKey] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"front: --api-keys-file {path!r}, line {number}"
        digest, key = _key_of(line, where)
        for field, value in (("name", key.name), ("key", digest)):
            if (before := lines.setdefault(f"{field} {value}", number)) != number:
                raise ConfigError(f"{where}: {field} is that of line {before}, expected another one")
        found[digest] = key
    if not found:
        raise ConfigError(f"front: --api-keys-file {path!r} has no key, expected one a line")
    return found


def _key_of(line: str, where: str) -> tuple[str, ApiKey]:
    """The hash of a line's key, and what it says of it. No message shows the key."""
    try:
        said = msgspec.json.decode(line)
    except msgspec.DecodeError as err:
        raise ConfigError(f'{where}: no JSON ({err}), expected an object as in {{"name": "a", "key": "..."}}') from err
    if not isinstance(said, dict):
        raise ConfigError(f"{where}: got no object, expected one with name and key")
    for field in said:
        if field not in _FIELDS:
            raise ConfigError(f"{where}: field {shown(field)} is unknown, expected one of {', '.join(_FIELDS)}")
    name = said.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name is {shown(name)}, expected 1 to 64 of the characters A-Z a-z 0-9 . _ @ -")
    weight = said.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 1e-3 <= weight <= 1e6:
        raise ConfigError(f"{where}: weight is {shown(weight)}, expected a number from 0.001 to 1000000")
    return _digest_of(said, where), ApiKey(
        name=name, weight=float(weight), **{field: _limit_of(said, field, where) for field in _LIMITS}
    )


def _limit_of(said: Mapping[str, Any], field: str, where: str) -> int:
    value = said.get(field, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LIMIT_MAX:
        raise ConfigError(f"{where}: {field} is {shown(value)}, expected an integer from 0 (no limit) to {_LIMIT_MAX}")
    return value


def _digest_of(said: Mapping[str, Any], where: str) -> str:
    key, digest = said.get("key"), said.get("sha256")
    if (key is None) == (digest is None):
        raise ConfigError(f"{where}: key and sha256 are {'both' if key else 'not'} given, expected one of them")
    if digest is not None:
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise ConfigError(f"{where}: sha256 is {shown(digest)}, expected 64 hex digits in lower case")
        return digest
    if not isinstance(key, str) or not key or not key.isascii() or not key.isprintable() or key != key.strip():
        raise ConfigError(f"{where}: key is no text that fits into a header, expected printable ASCII characters")
    return hashlib.sha256(key.encode()).hexdigest()
