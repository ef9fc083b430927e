"""TensorDigests: what a model's weights are, as a number for each tensor, made of every byte while it is loaded.

A digest is XXH3 (128 bits) of a tensor as it is stored, with name, type and shape: the same for every dtype that it is
converted to, for every way to cut the model into ranks, for every order of loading and every cut into files. Ranks of
one machine share the work; what ranks of several machines make of copies of their own must agree. It tells models
apart that differ by mistake; it is no cryptography.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b

import torch
import xxhash

from serinus.core.errors import ConfigError, InvariantError
from serinus.parallel.comm import Comm

__all__ = ["TensorDigests"]

_NONE = 1 << 128
"""Where a rank has made no digest: more than any."""


class TensorDigests:
    """The digests that one rank makes of the tensors that it takes. A thread makes them beside what becomes of the
    tensors; `close` ends it."""

    def __init__(self, *, index: int = 0, count: int = 1) -> None:
        """`count` ranks of one machine take the same tensors and share the work; this is number `index` of them."""
        self._index, self._count = index, count
        self._stored: dict[str, None] = {}
        self._made: dict[str, int] = {}
        self._taken: set[str] = set()
        self._open: tuple[str, Future[int]] | None = None
        self._thread = ThreadPoolExecutor(1, "serinus-weights")
        self.byte_count = 0
        """Bytes that were digested here."""

    def expect(self, names: Iterable[str]) -> None:
        """The checkpoint has these tensors; a model need not take them all."""
        self._stored = dict.fromkeys(sorted(names))

    def add(self, name: str, stored: torch.Tensor) -> None:
        """A tensor is taken, all of it or a part; `stored`: all of it, as it lies in the file. Returns at once, unless
        the one before it is not done. Cost: about 15 GB/s of a thread, and what it takes to read the file."""
        if name in self._taken:
            return
        self._taken.add(name)
        if zlib.crc32(name.encode()) % self._count != self._index:
            return
        self._settle()
        self.byte_count += stored.nbytes
        self._open = name, self._thread.submit(_digest, name, stored)

    def close(self) -> None:
        """Wait for the last one. May be called again."""
        self._settle()
        self._thread.shutdown()

    def of_model(self, comm: Comm) -> str:
        """A digest of all tensors that any rank has taken, in words. All ranks call it, once they have taken theirs.

        Raises ConfigError: ranks have loaded different weights.
        """
        self.close()
        names = tuple(self._stored)
        named = zlib.crc32(repr(names).encode())
        if comm.smallest([named, -named]) != (named, -named):
            raise ConfigError("models: ranks find tensors of other names in the checkpoint, expected copies of one")
        made = [self._made.get(name) for name in names]
        low_N = comm.smallest([_NONE if digest is None else digest for digest in made])
        high_N = comm.smallest([_NONE if digest is None else -digest for digest in made])
        taken_N = comm.smallest([-(name in self._taken) for name in names])
        whole = blake2b(digest_size=16)
        for name, low, high, taken in zip(names, low_N, high_N, taken_N, strict=True):
            if not taken:
                continue
            if low == _NONE:
                raise InvariantError(f"models: no rank has digested tensor {name!r}, expected one")
            if low != -high:
                raise ConfigError(
                    f"models: tensor {name!r} is not the same on all machines of this engine, expected copies of one"
                    f" checkpoint"
                )
            whole.update(f"{name} {low:032x};".encode())
        return whole.hexdigest()

    def _settle(self) -> None:
        if self._open is not None:
            (name, made), self._open = self._open, None
            self._made[name] = made.result()


def _digest(name: str, stored: torch.Tensor) -> int:
    what = f"{name} {stored.dtype} {list(stored.shape)}"
    data = stored.reshape(-1).view(torch.uint8).numpy().data
    return xxhash.xxh3_128_intdigest(data, xxhash.xxh3_64_intdigest(what.encode()))
