"""Can two engines exchange KV? In this version: exactly if everything that shapes a page's bytes is equal."""

from __future__ import annotations

from serinus.wire.messages import LayoutSignature

__all__ = ["difference"]


def difference(ours: LayoutSignature, theirs: LayoutSignature) -> str:
    """The first field that differs, with both values, in words; empty where the layouts are equal."""
    for name in LayoutSignature.__struct_fields__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"layout differs in {name}: {mine!r} here, {other!r} there"
    return ""
