"""DeviceTensors: the tensors of safetensors files by name, on a device, read by several threads and ahead of their use.

What is read ahead are the tensors that come next when names are put in order with their numbers as numbers, which is
about the order in which a decoder takes them: small tensors, as those of experts, are on their way by tens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open

from serinus.core.errors import ConfigError
from serinus.models.device_reader import DeviceReader, Reading
from serinus.models.weight_digests import TensorDigests

_AHEAD_BYTES: Final = 512 << 20
"""On their way or waiting to be taken, at most."""
_TYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""As the format calls them."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def byte_count(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class DeviceTensors:
    """What a SafetensorsSource reads from where its device is no CPU."""

    def __init__(
        self, folder: Path, file_of: Mapping[str, str], reader: DeviceReader, digests: TensorDigests | None,
        ahead: Sequence[str],
    ) -> None:  # fmt: skip
        """`ahead`: tensors that will all be taken; they may be read before they are asked for."""
        self.reader = reader
        self._folder, self._file_of, self._digests = folder, file_of, digests
        self._places: dict[str, _Place] = {}
        self._headers: set[str] = set()
        self._next: Iterator[str] = iter(sorted(ahead, key=_in_numbers))
        self._held: str | None = None
        """The next one, for which there was no room."""
        self._begun: dict[str, Reading] = {}
        self._begun_bytes = 0
        self._taken: set[str] = set()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor. Raises SafetensorError, OSError, ConfigError: its file is no safetensors file, cut short or of
        types that are not known."""
        return self._place(name).shape

    def take(self, name: str, span: range | None, dim: int) -> torch.Tensor:
        """A tensor, or a span of one dimension, contiguous, as it is stored. Of a span of rows nothing else is read,
        unless all of the tensor is to be digested here. Errors as of `shape`."""
        place = self._place(name)
        self._taken.add(name)
        digested = self._digests is not None and self._digests.wants(name)
        reading = self._begun.pop(name, None)
        if reading is not None:
            self._begun_bytes -= place.byte_count
        own_rows = reading is None and span is not None and dim == 0 and not digested
        rows = span if own_rows and span is not None else range(0)
        reading = reading or self._begin(place, rows, digested=digested)
        self._begin_ahead()
        pieces = reading.wait()
        if self._digests is not None:
            self._digests.add_pieces(name, place.dtype, place.shape, pieces)
        if rows:
            return reading.there_N.view(place.dtype).view(len(rows), *place.shape[1:])
        whole = reading.there_N.view(place.dtype).view(place.shape)
        return whole if span is None else whole.narrow(dim, span.start, len(span)).contiguous()

    def close(self) -> None:
        """Give back what was read and not taken, and end the threads."""
        self.reader.close()
        self._begun.clear()
        self._next = iter(())

    def _begin(self, place: _Place, rows: range, *, digested: bool) -> Reading:
        """`rows`: empty = all of them."""
        if not rows:
            return self.reader.begin(place.file, place.offset, place.byte_count, digested=digested)
        row = place.byte_count // place.shape[0]
        return self.reader.begin(place.file, place.offset + rows.start * row, len(rows) * row)

    def _begin_ahead(self) -> None:
        while (name := self._held or next(self._next, None)) is not None:
            self._held = None
            place = self._place(name)
            if name in self._taken or place.byte_count > _AHEAD_BYTES // 2:
                continue
            if self._begun_bytes + place.byte_count > _AHEAD_BYTES:
                self._held = name
                return
            wanted = self._digests is not None and self._digests.wants(name)
            self._begun[name] = self._begin(place, range(0), digested=wanted)
            self._begun_bytes += place.byte_count

    def _place(self, name: str) -> _Place:
        file = self._file_of[name]
        if file not in self._headers:
            self._headers.add(file)
            self._places.update(_places_in(self._folder / file))
        if name not in self._places:
            raise ConfigError(f"models: {self._folder / file} has no tensor {name!r}, expected it as the index says")
        return self._places[name]


def _places_in(file: Path) -> dict[str, _Place]:
    with safe_open(file, framework="pt"):
        pass  # the header agrees with itself and with the length of the file
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    places = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        if fields["dtype"] not in _TYPES:
            expected = ", ".join(_TYPES)
            raise ConfigError(f"models: tensor {name!r} has dtype {fields['dtype']}, expected one of {expected}")
        offset = 8 + length + fields["data_offsets"][0]
        places[name] = _Place(file, offset, _TYPES[fields["dtype"]], tuple(fields["shape"]))
    return places


def _in_numbers(name: str) -> list[tuple[int, str]]:
    """A key by which layer 2 comes before layer 10."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in name.split(".")]
