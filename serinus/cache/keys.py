"""The name of each cached page outside the engine: a digest chained over namespace and all tokens up to its end.

Storage keys and the block hashes of KV events are these. Everything that shapes the bytes is in the namespace (model
and revision, dtype, page size, layout, shard) or in the tokens; the part is told beside the key.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from serinus.cache.node import Node
from serinus.core.stamps import CHAIN_ANCHOR, ChainHashes

HASH_BYTES = 16


class PageKeys:
    """Makes keys, and remembers those of nodes in the nodes."""

    def __init__(self, namespace: str, page_size: int, hashes: ChainHashes | None = None) -> None:
        """`hashes`: makes the chain hashes by which a canary knows pages on their way to the storage."""
        self.namespace, self._hashes = namespace, hashes
        self._stride = page_size * 4

    def seed(self, ns: bytes) -> bytes:
        """What stands before the first page of a sequence in request namespace `ns`."""
        digest = blake2b(digest_size=HASH_BYTES, person=b"serinus-kv")
        for name in (self.namespace.encode(), ns):
            digest.update(len(name).to_bytes(4, "little") + name)
        return digest.digest()

    def chain(self, before: bytes, data: bytes | memoryview) -> bytes:
        """Keys of the pages with these tokens, 16 bytes each, that come after the page with key `before`.

        Cost: about a microsecond a page.
        """
        stride, keys, key = self._stride, bytearray(), before
        for at in range(0, len(data), stride):
            key = blake2b(data[at : at + stride], digest_size=HASH_BYTES, key=key).digest()
            keys += key
        return bytes(keys)

    def of(self, node: Node) -> bytes:
        """Keys of a node's pages. Cost: those of its ancestors that never had theirs made, once."""
        unnamed: list[Node] = []
        above: Node | None = node
        while above is not None and above.hashes is None and above.parent is not None:
            unnamed.append(above)
            above = above.parent
        for each in reversed(unnamed):
            each.hashes = self.chain(self.before(each), each.tokens)
        return node.hashes or b""

    def chain_before(self, node: Node) -> int | None:
        """The chain hash of all tokens before a node; None where there is nothing to make it with. Cost: a hash of the
        tokens of those above it for which none was made, once."""
        if self._hashes is None:
            return None
        above: list[Node] = []
        each = node
        while each.chain is None and each.parent is not None and each.parent.parent is not None:
            above.append(each)
            each = each.parent
        if each.chain is None:
            each.chain = CHAIN_ANCHOR
        for below in reversed(above):
            assert each.chain is not None, "cache: a chain hash that was not made"
            below.chain = int(self._hashes(each.token_ids(), each.start, each.chain)[-1])
            each = below
        return each.chain

    def chain_of(self, tokens: NDArray[np.int32]) -> int | None:
        """The chain hash of these tokens, from position 0; None where there is nothing to make it with."""
        if self._hashes is None:
            return None
        return int(self._hashes(tokens, 0, CHAIN_ANCHOR)[-1]) if len(tokens) else CHAIN_ANCHOR

    def chain_after(self, tokens: NDArray[np.int32], start: int, chain: int | None) -> int | None:
        """The chain hash behind these tokens, of which the first stands at `start`."""
        if self._hashes is None or chain is None or not len(tokens):
            return chain
        return int(self._hashes(tokens, start, chain)[-1])

    def split(self, keys: bytes) -> set[bytes]:
        """Each of some chained keys by itself."""
        return {keys[at : at + HASH_BYTES] for at in range(0, len(keys), HASH_BYTES)}

    def before(self, node: Node) -> bytes:
        """The key of the page before a node's first one; its parent's keys are made."""
        parent = node.parent
        assert parent is not None, "cache: a root has no pages to name"
        if parent.parent is None:
            return self.seed(parent.key)
        return self.of(parent)[-HASH_BYTES:]
