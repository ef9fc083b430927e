"""Where a model's tensors come from: safetensors on disk, mapped into memory, or a seed. Never pickle.

A source hands out one tensor at a time and keeps none, so that what was packed can be released: the pages of the file
are unmapped with the last view of them. Knows nothing of layers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from serinus.core.errors import ConfigError
from serinus.core.log import get_logger
from serinus.kernels import QuantizedWeight
from serinus.models.device_reader import DeviceReader
from serinus.models.device_tensors import DeviceTensors
from serinus.models.weight_digests import TensorDigests
from serinus.models.weight_files import file_of_each

_META = "meta"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_log = get_logger("models")
_SCALE = 120
"""Of dummy MXFP4: 2**-7."""
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


class WeightSource(Protocol):
    """Hands out named tensors, each once."""

    device: str
    """Where they are put."""
    dtype: torch.dtype
    """Of floats, where no other is asked for."""

    def take(
        self, name: str, shape: tuple[int, ...], span: range | None = None, dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The tensor `name` in the source's dtype or that asked for, or a span of one dimension, contiguous.

        `shape` is that of the whole; raises ConfigError where the tensor is missing or of another shape.
        """

    def linear(
        self, name: str, shape: tuple[int, int], span: range | None = None, dim: int = 0
    ) -> torch.Tensor | QuantizedWeight:
        """The weight [O, I] of the linear `name`, as it is multiplied with; arguments and errors of `take`."""

    def quantized(self, name: str, weight_OI: torch.Tensor) -> torch.Tensor | QuantizedWeight:
        """What `linear` would give of a linear with this weight."""

    def names_of(self, name: str) -> Sequence[str]:
        """The tensors that `linear` takes."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name; a seed has those of the oldest layout alone."""

    def finish(self, ignore: Callable[[str], bool]) -> None:
        """All tensors were taken; raises ConfigError where the source has more, besides those to ignore."""


class _PlainLinears:
    """The linears of a source that has their weights as they are."""

    take: Callable[..., torch.Tensor]

    def linear(
        self, name: str, shape: tuple[int, int], span: range | None = None, dim: int = 0
    ) -> torch.Tensor | QuantizedWeight:
        """The weight as it is stored."""
        return self.take(f"{name}.weight", shape, span, dim)

    def quantized(self, name: str, weight_OI: torch.Tensor) -> torch.Tensor | QuantizedWeight:
        """The same weight again."""
        return weight_OI

    def names_of(self, name: str) -> Sequence[str]:
        """The weight, which is one tensor."""
        return (f"{name}.weight",)


class SafetensorsSource(_PlainLinears):
    """The safetensors files of a directory: a single file, or shards with their index."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: str = "cpu",
        digests: TensorDigests | None = None,
        prefix: str = "",
        *,
        reader: DeviceReader | None = None,
        ahead: bool = False,
        tell: Callable[[int, int], object] = lambda done, total: None,
    ) -> None:
        """Read the index or the headers.

        Args:
            device: where tensors go; `meta` = nothing of them is read, only names, shapes and types are checked.
            digests: are made of what is taken.
            prefix: what the names of the model's tensors begin with in the files; others are left out.
            reader: reads to a device that is no CPU; None = it is made, where there is such a device.
            ahead: the reader may begin with tensors before they are taken: all will be.
            tell: is told bytes that were taken, of bytes of all files, at every tensor.
        Raises ConfigError for missing, truncated or foreign files.
        """
        self.dtype = dtype
        self.device = device
        self._folder = folder
        self._file_of = file_of_each(folder)
        self._prefix = prefix
        self._left = {name for name in self._file_of if name.startswith(prefix)}
        whole = any(name.startswith(f"{prefix}model.") for name in self._left)
        self._bare = "" if whole else "model."  # embedding models are stored without their head, and without that
        if len(self._left) < len(self._file_of):
            others = len(self._file_of) - len(self._left)
            _log.info("%d tensors of %s are left out: only %s... is the text model", others, folder, prefix)
        self._digests = digests
        if digests is not None:
            digests.expect(self._file_of)
        self.bytes_taken = 0
        """Of the files, that were handed out."""
        self._tell = tell
        self._total = sum((folder / file).stat().st_size for file in set(self._file_of.values()))
        self._there: DeviceTensors | None = None
        if device not in ("cpu", _META) or reader is not None:
            names = tuple(self._left) if ahead else ()
            self._there = DeviceTensors(folder, self._file_of, reader or DeviceReader(device), digests, names)

    def take(
        self, name: str, shape: tuple[int, ...], span: range | None = None, dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """On a CPU a view of the mapped file where the dtype agrees and rows are whole, else a copy. Of a span nothing
        else of the tensor is read, but by digests, and of columns that go to a device.

        Raises ConfigError: the tensor is missing, misshapen, no float or cannot be read."""
        tensor = self._read(self._stored_name(name), shape, span, dim)
        if tensor.dtype not in _FLOATS and tensor.dtype != dtype:
            raise ConfigError(
                f"models: tensor {self._stored_name(name)!r} has dtype {tensor.dtype}, expected"
                f" {dtype or 'float32, bfloat16 or float16'}"
            )
        return tensor.to(self.device, dtype or self.dtype).contiguous()

    def stored(self, name: str) -> torch.Tensor:
        """All of a tensor as it lies in the file, of whatever shape and type, on the device. Raises ConfigError: it is
        missing or cannot be read."""
        return self._read(self._stored_name(name), None, None, 0)

    @property
    def names(self) -> list[str]:
        """Of all tensors of the model."""
        return [self._own_name(name) for name in self._file_of if name.startswith(self._prefix)]

    def _stored_name(self, name: str) -> str:
        """How the files call a tensor of the model."""
        return self._prefix + name.removeprefix(self._bare)

    def _own_name(self, stored: str) -> str:
        """The name of a tensor of the model that the files call `stored`."""
        return self._bare + stored.removeprefix(self._prefix)

    def _read(self, name: str, shape: tuple[int, ...] | None, span: range | None, dim: int) -> torch.Tensor:
        file = self._file_of.get(name)
        if file is None:
            expected = "it" if shape is None else f"one of shape {list(shape)}"
            raise ConfigError(f"models: tensor {name!r} is missing from {self._folder}, expected {expected}")
        try:
            tensor = (self._mapped if self._there is None else self._on_device)(name, file, shape, span, dim)
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"models: {self._folder / file} cannot be read for tensor {name!r} ({error}), "
                "expected a complete safetensors file"
            ) from None
        self._left.discard(name)
        self.bytes_taken += tensor.nbytes
        self._tell(self.bytes_taken, self._total)
        return tensor

    def _mapped(
        self, name: str, file: str, shape: tuple[int, ...] | None, span: range | None, dim: int
    ) -> torch.Tensor:
        with safe_open(self._folder / file, framework="pt") as opened:
            stored = opened.get_slice(name)
            _check_shape(name, tuple(stored.get_shape()), shape)
            whole: torch.Tensor = opened.get_tensor(name)  # mapped: nothing is read before it is used
            there = whole if self.device == _META else stored
            tensor: torch.Tensor = whole if span is None else there[_index(span, dim)]
        if self._digests is not None:
            self._digests.add(name, whole)
        return tensor

    def _on_device(
        self, name: str, file: str, shape: tuple[int, ...] | None, span: range | None, dim: int
    ) -> torch.Tensor:
        assert self._there is not None, "models: no device to read to"
        _check_shape(name, self._there.shape(name), shape)
        return self._there.take(name, span, dim)

    def has(self, name: str) -> bool:
        """Whether a file holds it."""
        return self._stored_name(name) in self._file_of

    def finish(self, ignore: Callable[[str], bool]) -> None:
        """Raise ConfigError where the files hold tensors that were not taken: to ignore a bias, say, would give a wrong
        model without a sign of it."""
        odd = sorted(n for n in tuple(self._left) if not ignore(self._own_name(n)) and not n.endswith(_IGNORED_SUFFIX))
        if odd:
            raise ConfigError(
                f"models: {self._folder} holds {len(odd)} tensors that its config.json has no place for, "
                f"e.g. {odd[0]!r}, expected none"
            )

    def close(self) -> None:
        """Take no more. May be called again."""
        if self._there is not None:
            self._there.close()


class RandomSource(_PlainLinears):
    """Dummy weights (`--load-format dummy`): each tensor a function of the seed, its name and the type of device, which
    makes it."""

    def __init__(
        self, seed: int, dtype: torch.dtype, device: str = "cpu", *, norm_weight: float = 1.0, mxfp4: bool = False
    ) -> None:
        """`mxfp4`: experts are in it, as gpt-oss has them."""
        self.dtype = dtype
        self.device = device
        self._seed = seed
        self._norm_weight, self._mxfp4 = norm_weight, mxfp4

    def take(
        self, name: str, shape: tuple[int, ...], span: range | None = None, dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Norm weights are `norm_weight`, biases 0, all others normal with deviation 0.02; of MXFP4 any bytes, with
        scales by which they deviate as much. A span is that of the whole, which is made first: ranks of any mesh have
        the same model."""
        dtype = dtype or self.dtype
        if span is not None:
            return self.take(name, shape, dtype=dtype).narrow(dim, span.start, len(span)).clone()
        if name.endswith("norm.weight"):
            return torch.full(shape, self._norm_weight, dtype=dtype, device=self.device)
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=dtype, device=self.device)
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=7).digest()
        chance = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little"))
        if dtype == torch.uint8:
            is_scale = name.endswith("_scales")
            low, high = (_SCALE, _SCALE + 1) if is_scale else (0, 256)
            return torch.randint(low, high, shape, dtype=dtype, device=self.device, generator=chance)
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(0.0, 0.02, generator=chance)

    def has(self, name: str) -> bool:
        """Nothing that only some checkpoints have, but MXFP4."""
        return self._mxfp4 and name.endswith("_blocks")

    def finish(self, ignore: Callable[[str], bool]) -> None:
        """A seed has no tensors left over."""


def _index(span: range, dim: int) -> tuple[slice, ...]:
    return (slice(None),) * dim + (slice(span.start, span.stop),)


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...] | None) -> None:
    if wanted is not None and found != wanted and not (math.prod(found) == math.prod(wanted) == 1):
        raise ConfigError(f"models: tensor {name!r} has shape {list(found)}, expected {list(wanted)} from config.json")
