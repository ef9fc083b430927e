"""ForwardHook: the seam around a forward pass, for the canary and for the gate that waits for loads; NullHook where
there is neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels import AttentionBatch, LayerDigest, LayerDigests, WrittenRows
from serinus.models.batch import ForwardBatch, HostBatch

Put = Callable[[NDArray[np.int64]], Tensor]
"""What an array will be on the device, once the input of the step is sent there."""

_Digest = TypeVar("_Digest")


class ForwardHook(Protocol):
    """Called by every model around its layers, in the order of the device's work.

    A pass may be recorded once and replayed: then the models make their calls while it is recorded, and before each
    replay there is `stage` alone. What is queued between `before` and `after` reads what `stage` has put, and nothing
    else that differs from pass to pass.
    """

    def can_replay(self, room: int) -> bool:
        """Whether a recorded pass of so many sequences, one token each, does what the next pass is to do. Not where the
        hook awaits or does something between layers."""

    def stage(self, batch: HostBatch, put: Put) -> None:
        """The runner is about to run or to replay this batch: put what the device reads of it beside the batch."""

    def replayed(self) -> None:
        """The pass that was staged has been queued as it was recorded; no model was called."""

    def before(self, batch: ForwardBatch) -> None:
        """The batch is complete; no KV of it is written yet."""

    def before_layer(self, layer_index: int) -> None:
        """No KV of this layer, old or new, is touched before this returns. Layers come in order, each once a pass."""

    def writes(self, layer_index: int) -> WrittenRows | None:
        """Asked before a layer stores its rows, by every model that did not ask `layer_digests`: where the digests of
        the values go that it stores. None: nowhere. A model that asks must add them, by `qk_rope_store` or by
        `digest_values`."""

    def reads(self, layer_index: int, attention: AttentionBatch) -> LayerDigest | None:
        """Asked before attention reads a layer, by models whose attention can digest as it reads: what of it to digest,
        and where its sums go. None: nothing. A model that asks must have it done."""

    def layer_digests(self, attention: AttentionBatch) -> Sequence[LayerDigests]:
        """What `writes` and `reads` say of all layers, asked in place of both in a pass that `can_replay`, once the
        first layer may be touched. Empty: nothing is digested. The same object as in the last pass where all of it is
        the same."""
        ...

    def after(self, batch: ForwardBatch) -> None:
        """All layers ran: the KV of the batch is in the pool."""


class NullHook:
    """The hook of a model that has none."""

    def can_replay(self, room: int) -> bool:
        return True

    def stage(self, batch: HostBatch, put: Put) -> None:
        pass

    def replayed(self) -> None:
        pass

    def before(self, batch: ForwardBatch) -> None:
        pass

    def before_layer(self, layer_index: int) -> None:
        pass

    def writes(self, layer_index: int) -> WrittenRows | None:
        return None

    def reads(self, layer_index: int, attention: AttentionBatch) -> LayerDigest | None:
        return None

    def layer_digests(self, attention: AttentionBatch) -> Sequence[LayerDigests]:
        return ()

    def after(self, batch: ForwardBatch) -> None:
        pass


class _Hooks:
    """Several hooks, one inside the other."""

    def __init__(self, hooks: Sequence[ForwardHook]) -> None:
        self._hooks = tuple(hooks)

    def can_replay(self, room: int) -> bool:
        return all(hook.can_replay(room) for hook in self._hooks)

    def stage(self, batch: HostBatch, put: Put) -> None:
        for hook in self._hooks:
            hook.stage(batch, put)

    def replayed(self) -> None:
        for hook in self._hooks:
            hook.replayed()

    def before(self, batch: ForwardBatch) -> None:
        for hook in self._hooks:
            hook.before(batch)

    def before_layer(self, layer_index: int) -> None:
        for hook in self._hooks:
            hook.before_layer(layer_index)

    def reads(self, layer_index: int, attention: AttentionBatch) -> LayerDigest | None:
        return _only([hook.reads(layer_index, attention) for hook in self._hooks])

    def writes(self, layer_index: int) -> WrittenRows | None:
        return _only([hook.writes(layer_index) for hook in self._hooks])

    def layer_digests(self, attention: AttentionBatch) -> Sequence[LayerDigests]:
        return _only([hook.layer_digests(attention) or None for hook in self._hooks]) or ()

    def after(self, batch: ForwardBatch) -> None:
        for hook in reversed(self._hooks):
            hook.after(batch)


def _only(wanted: Sequence[_Digest | None]) -> _Digest | None:
    found = [each for each in wanted if each is not None]
    assert len(found) <= 1, f"models: {len(found)} hooks want a layer digested, expected one"
    return found[0] if found else None


def compose_hooks(hooks: Sequence[ForwardHook]) -> ForwardHook:
    """One hook for all: `before` and `before_layer` in this order, `after` in the reverse one.

    Put the gate of loads first: those that read KV come after it. None give a NullHook, one gives itself.
    """
    if not hooks:
        return NullHook()
    return hooks[0] if len(hooks) == 1 else _Hooks(hooks)
