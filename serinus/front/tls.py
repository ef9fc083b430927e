"""Certificates: a server's own, taken anew when their files change, and those by which a client trusts a server."""

from __future__ import annotations

import ssl
from functools import lru_cache
from pathlib import Path

from serinus.core.errors import ConfigError
from serinus.core.log import get_logger
from serinus.core.settings import ServerSettings

_log = get_logger("front")

_LOOK_EVERY_S = 1.0
"""Between two looks at the files of a certificate."""


class ServerTls:
    """What a server shows its clients: TLS 1.2 or later, with a certificate (and its chain) and the key to it."""

    def __init__(self, certfile: str, keyfile: str = "") -> None:
        """PEM files; without `keyfile` the key stands in `certfile`. Raises ConfigError: they cannot be read, or the
        key is not that of the certificate."""
        self._files = (certfile, keyfile or certfile)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        """For the server's sockets; stays the same."""
        self._seen = self._versions()
        self._looked_at = 0.0
        try:
            self.context.load_cert_chain(*self._files)
        except (OSError, ValueError) as err:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"front: --ssl-certfile {certfile!r} with --ssl-keyfile {keyfile!r}: {err}, expected a certificate and"
                " its key, in PEM"
            ) from err

    def _versions(self) -> tuple[tuple[int, int, int], ...]:
        """What changes where a file is written or replaced, links followed. Zeros for one that is not there."""
        found = []
        for file in self._files:
            try:
                stat = Path(file).stat()
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)

    def refresh(self, now: float) -> bool:
        """Take the certificate of new connections from the files, where these have changed; at most once a second.
        Returns whether it did. Files that do not fit each other (one is not replaced yet) change nothing."""
        if now - self._looked_at < _LOOK_EVERY_S:
            return False
        self._looked_at = now
        versions = self._versions()
        if versions == self._seen:
            return False
        self._seen = versions
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)  # first elsewhere: it may not fit
            self.context.load_cert_chain(*self._files)
        except (OSError, ValueError) as err:
            _log.error(
                "front: the certificate %s has changed and cannot be used (%s): the old one stays", self._files[0], err
            )
            return False
        _log.info("front: took the new certificate %s", self._files[0])
        return True


def server_tls(settings: ServerSettings) -> ServerTls | None:
    """The certificate of these settings; None = plain http. Raises ConfigError."""
    return ServerTls(settings.ssl_certfile, settings.ssl_keyfile) if settings.ssl_certfile else None


def client_tls(ca_certs: str = "") -> ssl.SSLContext:
    """How a client checks the certificates of servers: by those of the system (or SSL_CERT_FILE), and those in the PEM
    file `ca_certs`, which is read anew where it has changed.

    Raises ConfigError: it cannot be read. Cost: 20 ms, once a version of the file.
    """
    try:
        return _client_tls(ca_certs, Path(ca_certs).stat().st_mtime_ns if ca_certs else 0)
    except OSError as err:
        raise ConfigError(f"front: --ssl-ca-certs {ca_certs!r}: {err}, expected certificates in PEM") from err


@lru_cache(maxsize=4)
def _client_tls(ca_certs: str, version: int) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if ca_certs:
        context.load_verify_locations(ca_certs)
    return context
