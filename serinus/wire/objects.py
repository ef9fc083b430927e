"""Objects of listed types inside a message: each as its type's name and its fields, large arrays in the payload.

The lists are the callers': what may come is what a reader is told to allow. Fields may be int, float, str, bytes, bool,
None, enums, tuples, dicts, other dataclasses and numpy arrays of the annotated dtype. No pickle, ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from serinus.core.bounds import Name
from serinus.core.errors import FrameError, SerinusError
from serinus.core.type_lock import TYPE_LOCK
from serinus.wire.arrays import Payload, from_extension

Item = tuple[Name, msgspec.Raw]
"""An object: its type's name, its fields."""


@dataclass(frozen=True, slots=True)
class PackedForm:
    """A type that travels as another one, for speed."""

    wire: type
    """The type that travels."""
    pack: Callable[[Any, ObjectWriter], object]
    """From the object to it."""
    unpack: Callable[[Any, ObjectReader], object]
    """The reverse. Raises FrameError: the parts disagree."""


class Forms:
    """The types that may travel, by name."""

    def __init__(self, kinds: Iterable[type], packed: dict[type, PackedForm]) -> None:
        """`packed`: those of `kinds` that travel as another type; the rest travel as they are."""
        self.kinds = {kind.__name__: kind for kind in kinds}
        self.packed = packed


class ObjectWriter:
    """Objects to msgpack; one for each frame."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self.payload = Payload()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self.payload.to_extension)

    def item(self, value: object) -> Item:
        """One object. Raises FrameError: its type is not listed, or something in it cannot travel."""
        kind = type(value)
        if self._forms.kinds.get(kind.__name__) is not kind:
            raise FrameError("type", f"{kind.__name__}, expected one of the types that the codec lists")
        form = self._forms.packed.get(kind)
        return kind.__name__, msgspec.Raw(self._encoder.encode(value if form is None else form.pack(value, self)))


class ObjectReader:
    """The reverse; one for each end of a connection, as it remembers how types are read. Not for several threads."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self.payload = memoryview(b"")
        """Of the frame that is read."""
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}

    def item(self, name: str, data: msgspec.Raw, allowed: tuple[type, ...]) -> object:
        """One object. Raises FrameError: not one of `allowed`, or not as its fields say."""
        kind = self._forms.kinds.get(name)
        if kind is None or kind not in allowed:
            raise FrameError("type", f"{name!r}, expected one of {[kind.__name__ for kind in allowed]}")
        form = self._forms.packed.get(kind)
        decoder = self._decoders.get(name)
        if decoder is None:
            wire = kind if form is None else form.wire
            with TYPE_LOCK:
                decoder = self._decoders[name] = msgspec.msgpack.Decoder(wire, dec_hook=self._array)
        try:
            found: object = decoder.decode(data)
            return found if form is None else form.unpack(found, self)
        except FrameError:
            raise
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, SerinusError) as error:
            raise FrameError("body", f"{name}: {str(error)[:200]}") from None

    def _array(self, kind: Any, value: object) -> object:
        return from_extension(kind, value, self.payload)
