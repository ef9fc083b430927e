"""The prefill engine that a router names to a decode engine, and the proof that a router did.

A decode engine connects to the address, so a client must not choose it: the router adds an HMAC of the address for each
secret that it knows, and the decode engine looks for one of a secret of its own (the operator's key, the cluster
secret, that of the user on this machine). Addresses that the decode engine was configured with need no proof.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

__all__ = ["PREFILL_HEADER", "PROOF_HEADER", "SuggestionCheck", "proof_of"]

PREFILL_HEADER = "x-serinus-prefill"
"""Carries the control address of the prefill engine that the router suggests."""
PROOF_HEADER = "x-serinus-proof"
"""Proves that the suggestion comes from the router."""
_PROOFS_MAX = 8


def proof_of(address: str, secrets: Sequence[str]) -> str:
    """The value of PROOF_HEADER."""
    return " ".join(_mac(address, secret) for secret in secrets if secret)


class SuggestionCheck:
    """Which suggestions a front passes on to its engine."""

    def __init__(self, *, secrets: Sequence[str], addresses: Sequence[str]) -> None:
        """`secrets`: any of them proves a suggestion; `addresses`: need no proof."""
        self._secrets = tuple(secret for secret in secrets if secret)
        self._addresses = frozenset(addresses)

    def accepts(self, address: str, proof: str) -> bool:
        """Whether the engine may connect to this address. Takes the same time for any proof of the same length."""
        if address in self._addresses:
            return True
        proofs = proof.split(" ")[:_PROOFS_MAX]
        matches = [
            hmac.compare_digest(_mac(address, secret).encode(), given.encode())
            for secret in self._secrets
            for given in proofs
        ]
        return any(matches)


def _mac(address: str, secret: str) -> str:
    return hmac.digest(secret.encode(), b"prefill engine\0" + address.encode(), "sha256").hex()
