"""What messages are made of: their base classes, and types with limits besides those of core/bounds.py."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serinus.core.bounds import Count, Name

Pages = Annotated[list[Count], msgspec.Meta(max_length=1 << 20)]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)]
Mac = Annotated[bytes, msgspec.Meta(max_length=64)]
Blobs = Annotated[tuple[Annotated[bytes, msgspec.Meta(max_length=1 << 16)], ...], msgspec.Meta(max_length=1 << 10)]


class MessageBase(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, array_like=False):
    """A message: immutable, tagged with its class name, unknown fields refused."""


class PartBase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece of a message."""
