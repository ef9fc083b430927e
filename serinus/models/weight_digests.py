"""TensorDigests: what a model's weights are, as a number for each tensor, made of every byte while it is loaded.

A digest is XXH3 (128 bits) of the digests of a tensor's pieces of 8 MiB as they are stored, with name, type and shape:
the same for every dtype that it is converted to, for every way to cut the model into ranks, for every order of loading
and every cut into files. Pieces can be digested by several threads, each where it was just read. Ranks of one machine
share the work; what ranks of several machines make of copies of their own must agree. It tells models apart that differ
by mistake; it is no cryptography.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b

import torch
import xxhash

from serinus.core.errors import ConfigError, InvariantError
from serinus.parallel.comm import Comm

PIECE_BYTES = 8 << 20
"""Of a tensor, that are digested by themselves; part of what a digest means."""

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

    def wants(self, name: str) -> bool:
        """Whether this rank is to digest the tensor, and has not."""
        return name not in self._taken and zlib.crc32(name.encode()) % self._count == self._index

    def add(self, name: str, stored: torch.Tensor) -> None:
        """A tensor is taken, all of it or a part; `stored`: all of it, as it lies in the file. Returns at once, unless
        the one before it is not done. Cost: about 15 GB/s of a thread, and what it takes to read the file."""
        wanted = self.wants(name)
        self._taken.add(name)
        if not wanted:
            return
        self._settle()
        self.byte_count += stored.nbytes
        self._open = name, self._thread.submit(_digest, name, stored)

    def add_pieces(self, name: str, dtype: torch.dtype, shape: Sequence[int], pieces: Sequence[bytes]) -> None:
        """A tensor is taken; `pieces`: the digests of all of it (`piece_digest`), where `wants` said so."""
        if self.wants(name):
            self.byte_count += math.prod(shape) * dtype.itemsize
            self._made[name] = _joined(name, dtype, shape, pieces)
        self._taken.add(name)

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


def piece_digest(data: memoryview) -> bytes:
    """Of one piece. Other threads of this process run meanwhile."""
    made = xxhash.xxh3_128()
    made.update(data)
    return bytes(made.digest())


def _digest(name: str, stored: torch.Tensor) -> int:
    data = stored.reshape(-1).view(torch.uint8).numpy().data
    pieces = [piece_digest(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES)]
    return _joined(name, stored.dtype, stored.shape, pieces)


def _joined(name: str, dtype: torch.dtype, shape: Sequence[int], pieces: Sequence[bytes]) -> int:
    what = f"{name} {dtype} {list(shape)}"
    return int(xxhash.xxh3_128_intdigest(b"".join(pieces), xxhash.xxh3_64_intdigest(what.encode())))
