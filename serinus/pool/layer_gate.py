"""LayerGate: keeps a forward pass behind the loads that fill its pages, layer by layer."""

from __future__ import annotations

from typing import Any, Protocol


class LayerLoads(Protocol):
    """A mover as the gate sees it."""

    def open_loads(self) -> tuple[Any, ...]:
        """The loads that a forward pass which begins now must wait for."""

    def wait_layer(self, load: Any, layer: int) -> None:
        """Let nothing that is computed from now on run before this layer of the load is there (or it has failed)."""


class LayerGate:
    """The forward hook that keeps a layer from being computed before the loads submitted earlier have filled it."""

    def __init__(self, mover: LayerLoads) -> None:
        self._mover = mover
        self._loads: tuple[Any, ...] = ()

    def can_replay(self, room: int) -> bool:
        """Whether nothing is being loaded: a recorded pass waits for no layer."""
        return not self._mover.open_loads()

    def stage(self, batch: object, put: object) -> None:
        """The gate reads nothing of the step."""

    def replayed(self) -> None:
        """Nothing was loaded in this step."""

    def before(self, batch: object) -> None:
        """Take down which loads this forward pass waits for."""
        self._loads = self._mover.open_loads()

    def before_layer(self, layer_index: int) -> None:
        """Wait for the layer; on an accelerator its stream does."""
        for load in self._loads:
            self._mover.wait_layer(load, layer_index)

    def writes(self, layer_index: int) -> None:
        """Nothing that is stored is digested for it."""

    def reads(self, layer_index: int, attention: object) -> None:
        """Nothing of it is digested for the gate."""

    def layer_digests(self, attention: object) -> tuple[()]:
        """No layer of it is digested for the gate."""
        return ()

    def after(self, batch: object) -> None:
        """Nothing is waited for any more."""
        self._loads = ()
