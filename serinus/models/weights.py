"""Where a model's tensors come from: safetensors on disk, mapped into memory, or a seed. Never pickle.

A source hands out one tensor at a time and keeps none, so that what was packed can be released: the pages of the file
are unmapped with the last view of them. Knows nothing of layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from serinus.core.errors import ConfigError
from serinus.models.weight_digests import TensorDigests
from serinus.models.weight_files import file_of_each

__all__ = ["RandomSource", "SafetensorsSource", "WeightSource"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


class WeightSource(Protocol):
    """Hands out named tensors, each once."""

    device: str
    """Where they are put."""

    def take(self, name: str, shape: tuple[int, ...], span: range | None = None, dim: int = 0) -> torch.Tensor:
        """The tensor `name` in the source's dtype, or a span of its rows (dim 0) or columns (dim 1), contiguous.

        `shape` is that of the whole; raises ConfigError where the tensor is missing or of another shape.
        """
        ...

    def finish(self, ignore: Collection[str] = ()) -> None:
        """All tensors were taken; raises ConfigError where the source has more, besides those to ignore."""
        ...


class SafetensorsSource:
    """The safetensors files of a directory: a single file, or shards with their index."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: str = "cpu", digests: TensorDigests | None = None
    ) -> None:
        """Read the index or the headers. `digests`: are made of what is taken.

        Raises ConfigError for missing, truncated or foreign files.
        """
        self.dtype = dtype
        self.device = device
        self._folder = folder
        self._file_of = file_of_each(folder)
        self._left = set(self._file_of)
        self._digests = digests
        if digests is not None:
            digests.expect(self._file_of)
        self.bytes_taken = 0
        """Of the files, that were handed out."""

    def take(self, name: str, shape: tuple[int, ...], span: range | None = None, dim: int = 0) -> torch.Tensor:
        """A view of the mapped file where the dtype agrees and rows are whole, else a copy. Of a span nothing else of
        the tensor is read, but by digests. Raises ConfigError: the tensor is missing, misshapen, no float or cannot be
        read."""
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(
                f"models: tensor {name!r} is missing from {self._folder}, expected one of shape {list(shape)}"
            )
        try:
            with safe_open(self._folder / file, framework="pt") as opened:
                stored = opened.get_slice(name)
                found = tuple(stored.get_shape())
                if found != shape:
                    raise ConfigError(
                        f"models: tensor {name!r} has shape {list(found)}, expected {list(shape)} from config.json"
                    )
                whole: torch.Tensor = opened.get_tensor(name)  # mapped: nothing is read before it is used
                tensor: torch.Tensor = whole if span is None else stored[_index(span, dim)]
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"models: {self._folder / file} cannot be read for tensor {name!r} ({error}), "
                "expected a complete safetensors file"
            ) from None
        if tensor.dtype not in _FLOATS:
            raise ConfigError(
                f"models: tensor {name!r} has dtype {tensor.dtype}, expected float32, bfloat16 or float16"
            )
        if self._digests is not None:
            self._digests.add(name, whole)
        self._left.discard(name)
        self.bytes_taken += tensor.nbytes
        return tensor.to(self.device, self.dtype).contiguous()

    def finish(self, ignore: Collection[str] = ()) -> None:
        """Raise ConfigError where the files hold tensors that were not taken: to ignore a bias, say, would give a wrong
        model without a sign of it."""
        odd = sorted(n for n in self._left if n not in ignore and not n.endswith(_IGNORED_SUFFIX))
        if odd:
            raise ConfigError(
                f"models: {self._folder} holds {len(odd)} tensors that its config.json has no place for, "
                f"e.g. {odd[0]!r}, expected none"
            )


class RandomSource:
    """Dummy weights (`--load-format dummy`): each tensor a function of the seed and its name alone."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str = "cpu", *, norm_weight: float = 1.0) -> None:
        self.dtype = dtype
        self.device = device
        self._seed = seed
        self._norm_weight = norm_weight

    def take(self, name: str, shape: tuple[int, ...], span: range | None = None, dim: int = 0) -> torch.Tensor:
        """Norm weights are `norm_weight`, biases 0, all others normal with deviation 0.02. A span is that of the whole,
        which is made first: ranks of any mesh have the same model."""
        if span is not None:
            return self.take(name, shape).narrow(dim, span.start, len(span)).clone()
        if name.endswith("norm.weight"):
            return torch.full(shape, self._norm_weight, dtype=self.dtype, device=self.device)
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=7).digest()
        chance = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.empty(shape, dtype=self.dtype).normal_(0.0, 0.02, generator=chance).to(self.device)

    def finish(self, ignore: Collection[str] = ()) -> None:
        """A seed has no tensors left over."""


def _index(span: range, dim: int) -> tuple[slice, ...]:
    return (slice(None),) * dim + (slice(span.start, span.stop),)
