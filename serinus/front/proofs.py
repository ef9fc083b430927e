"""What a router tells an engine beside a request, and the proof that a router did: an HMAC for each secret it knows.

The prefill engine that may help: a decode engine connects to the address, so a client must not choose it. The share:
the API key that the request came with. The engine looks for a proof by a secret of its own (the operator's key, the
cluster secret, that of the user on this machine). Addresses that the decode engine was configured with need no proof.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

PREFILL_HEADER = "x-serinus-prefill"
"""Carries the control address of the prefill engine that the router suggests."""
PROOF_HEADER = "x-serinus-proof"
"""Proves that the suggestion comes from the router."""
SHARE_HEADER = "x-serinus-share"
"""Carries the share that a request counts for, as JSON."""
SHARE_PROOF_HEADER = "x-serinus-share-proof"
"""Proves that the router says so."""
TOKENS_HEADER = "x-serinus-tokens"
"""In an answer to a router: tokens of prompt and answer. Streams end with a comment of that name instead."""
PREFILL = "prefill engine"
SHARE = "share"
_PROOFS_MAX = 8


def proof_of(said: str, secrets: Sequence[str], about: str = PREFILL) -> str:
    """The value of a proof header."""
    return " ".join(_mac(said, secret, about) for secret in secrets if secret)


def proves(proof: str, said: str, secrets: Sequence[str], about: str = PREFILL) -> bool:
    """Whether one of the secrets made this proof of what is said. Takes the same time for any proof of one length."""
    proofs = proof.split(" ")[:_PROOFS_MAX]
    matches = [
        hmac.compare_digest(_mac(said, secret, about).encode(), given.encode())
        for secret in secrets
        for given in proofs
    ]
    return any(matches)


class SuggestionCheck:
    """Which suggestions of prefill engines a front passes on to its engine."""

    def __init__(self, *, secrets: Sequence[str], addresses: Sequence[str]) -> None:
        """`secrets`: any of them proves a suggestion; `addresses`: need no proof."""
        self._secrets = tuple(secret for secret in secrets if secret)
        self._addresses = frozenset(addresses)

    def accepts(self, address: str, proof: str) -> bool:
        """Whether the engine may connect to this address."""
        return address in self._addresses or proves(proof, address, self._secrets)


def _mac(said: str, secret: str, about: str) -> str:
    return hmac.digest(secret.encode(), about.encode() + b"\0" + said.encode(), "sha256").hex()
