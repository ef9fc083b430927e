"""How numpy arrays travel inside messages: as msgpack extensions; the number of the extension names dtype and form.

One row of values is its bytes alone; a table has its shape before them; a large array may lie in the frame's payload,
and only its place and shape in the body. Knows nothing of messages.
"""

from __future__ import annotations

import struct
from functools import cache
from math import prod
from typing import Any, Final, get_args

import numpy as np
from msgspec.msgpack import Ext

from serinus.core.errors import FrameError

_DTYPES: Final = tuple(np.dtype(name) for name in ("?", "u1", "<i4", "<i8", "<u4", "<u8", "<f4", "<f8"))
_NUMBERS: Final = {dtype.str: number for number, dtype in enumerate(_DTYPES)}
_TABLE: Final = 32
"""Added to the dtype's number: rows and columns stand before the bytes."""
_APART: Final = 64
"""Added to the dtype's number: offset in the payload, then rows and columns; columns 0 = one row of values."""
_SHAPE: Final = struct.Struct("<II")
_PLACE: Final = struct.Struct("<QII")
_NONE: Final = memoryview(b"")
_APART_BYTES: Final = 1 << 14
"""Arrays from so many bytes on lie in the payload: they are not copied into the body."""


class Payload:
    """Bytes that travel beside the body of one frame, gathered while its arrays are encoded."""

    def __init__(self) -> None:
        self._blobs: list[memoryview] = []
        self._size = 0

    def to_extension(self, value: object) -> Ext:
        """Encoder's hook: a large array goes here, others into the body. Raises FrameError like `to_extension`."""
        if not isinstance(value, np.ndarray) or value.nbytes < _APART_BYTES:
            return to_extension(value)
        number, array = _checked(value)
        rows, columns = array.shape if array.ndim == 2 else (len(array), 0)
        place = _PLACE.pack(self._size, rows, columns)
        self._blobs.append(array.reshape(-1).view(np.uint8).data)
        self._size += array.nbytes
        return Ext(number + _APART, place)

    def joined(self) -> bytes | memoryview:
        """The whole payload; without a copy where it is one array."""
        return self._blobs[0] if len(self._blobs) == 1 else b"".join(self._blobs)


def to_extension(value: object) -> Ext:
    """Encoder's hook. An array of one row is not copied. Raises FrameError: not an array, or one that cannot travel."""
    number, array = _checked(value)
    if array.ndim == 1:
        return Ext(number, array.view(np.uint8).data)
    return Ext(number + _TABLE, _SHAPE.pack(*array.shape) + array.tobytes())


def from_extension(kind: Any, value: object, payload: memoryview = _NONE) -> np.ndarray[Any, Any]:
    """Decoder's hook: an array of its own memory. Raises FrameError: not an array of the annotated dtype."""
    if not isinstance(value, Ext):
        raise FrameError("body", f"{type(value).__name__}, expected an array")
    form, number = divmod(value.code, _TABLE)
    wanted = _dtype_of(kind)
    if value.code < 0 or number >= len(_DTYPES):
        raise FrameError("body", f"extension {value.code}, expected that of an array")
    dtype, data = _DTYPES[number], memoryview(value.data)
    if wanted is not None and dtype != wanted:
        raise FrameError("body", f"an array of {dtype}, expected {wanted}")
    shape: tuple[int, ...]
    if form == 0:
        shape = (len(data) // dtype.itemsize,)
    elif form == 1 and len(data) >= _SHAPE.size:
        shape, data = _SHAPE.unpack_from(data), data[_SHAPE.size :]
    elif form == 2 and len(data) == _PLACE.size:
        offset, rows, columns = _PLACE.unpack(data)
        shape = (rows, columns) if columns else (rows,)
        data = payload[offset : offset + prod(shape) * dtype.itemsize]
    else:
        raise FrameError("body", f"an array of extension {value.code} in {len(data)} bytes")
    if prod(shape) * dtype.itemsize != len(data):
        raise FrameError("body", f"an array of {dtype} and shape {shape} in {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _checked(value: object) -> tuple[int, np.ndarray[Any, Any]]:
    """Number of its dtype, and the array in one piece."""
    if not isinstance(value, np.ndarray) or value.dtype.str not in _NUMBERS or not 1 <= value.ndim <= 2:
        raise FrameError("body", f"{type(value).__name__} in a message, expected plain data")
    return _NUMBERS[value.dtype.str], np.ascontiguousarray(value)


@cache
def _dtype_of(kind: Any) -> np.dtype[Any] | None:
    """The dtype that an annotation names; None = any."""
    arguments = get_args(kind)
    inner = get_args(arguments[1]) if len(arguments) == 2 else ()
    if not inner or not isinstance(inner[0], type) or not issubclass(inner[0], np.generic):
        return None
    try:
        return np.dtype(inner[0])
    except TypeError:
        return None  # np.integer and its like: any of the list
