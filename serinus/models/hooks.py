"""ForwardHook: the seam around a forward pass. The canary stands here; NullHook where it does not."""

from __future__ import annotations

from typing import Protocol

from serinus.models.batch import ForwardBatch

__all__ = ["ForwardHook", "NullHook"]


class ForwardHook(Protocol):
    """Called by every model around its layers, in the order of the device's work."""

    def before(self, batch: ForwardBatch) -> None:
        """The batch is complete; no KV of it is written yet."""
        ...

    def after(self, batch: ForwardBatch) -> None:
        """All layers ran: the KV of the batch is in the pool."""
        ...


class NullHook:
    """Does nothing."""

    def before(self, batch: ForwardBatch) -> None:
        """Nothing."""

    def after(self, batch: ForwardBatch) -> None:
        """Nothing."""
