"""Admission to the cluster: a MAC over HELLO and HELLO_OK, keyed with the secret that all engines share. Pure.

The MAC covers the whole greeting, the sender's incarnation, its role, and a fresh nonce of the other side, so that a
greeting that was overheard cannot be used again. An engine with a secret greets only peers that know it.
"""

from __future__ import annotations

import hmac

import msgspec

from serinus.wire.messages import Hello, HelloOk

_ENCODER = msgspec.msgpack.Encoder()


def greeting_mac(secret: str, message: Hello | HelloOk, incarnation: int, nonce: bytes) -> bytes:
    """HMAC-SHA256 of a greeting for the side that said `nonce`."""
    bare = msgspec.structs.replace(message, mac=b"")
    text = b"".join((type(message).__name__.encode(), b"\0", incarnation.to_bytes(8, "little"), nonce, b"\0"))
    return hmac.digest(secret.encode(), text + _ENCODER.encode(bare), "sha256")


def is_genuine(secret: str, message: Hello | HelloOk, incarnation: int, nonce: bytes) -> bool:
    """Whether its MAC is the one that the secret gives for this nonce."""
    return bool(nonce) and hmac.compare_digest(greeting_mac(secret, message, incarnation, nonce), message.mac)
