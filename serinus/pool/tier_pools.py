"""TierPools: the device pools and the host pools of one engine, and what a move means for their bytes. When a copy is
carried out, and on what, its user says: Mover, or DeviceMover beside an accelerator.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from serinus.core.errors import InvariantError
from serinus.core.moves import Move
from serinus.core.parts import Part
from serinus.pool.device import DevicePool
from serinus.pool.host import HostPool


class TierPools:
    """The pools of each part on both tiers. Layers are numbered as the model's."""

    def __init__(
        self, device: Mapping[Part, DevicePool], host: Mapping[Part, HostPool], layer_parts: Sequence[Part]
    ) -> None:
        """`layer_parts`: the part of each layer of the model, in order.

        Raises InvariantError: the pools of a part differ in page bytes, or its layers are not the model's.
        """
        for part, pool in device.items():
            count = sum(p is part for p in layer_parts)
            if part not in host or host[part].page_bytes != pool.page_bytes or count != pool.spec.layer_count:
                raise InvariantError(
                    f"pool: part {part.name} has {pool.spec.layer_count} layers of {pool.page_bytes} bytes a page on "
                    f"the device, {count} layers in the model, host pool {host.get(part)}; expected the same in all"
                )
        self._device, self._host = device, host
        self.layer_count = len(layer_parts)
        self._before = {part: _counts(layer_parts, part) for part in device}

    @property
    def are_stamped(self) -> bool:
        """Whether a pool keeps stamps."""
        return any(pool.spec.stamp_bytes for pool in self._device.values())

    def page_bytes(self, part: Part) -> int:
        """Of a page of this part."""
        return self._host[part].page_bytes

    def byte_count(self, moves: Sequence[Move]) -> int:
        """Of all pages of these moves."""
        return sum(len(move.source) * self.page_bytes(move.part) for move in moves)

    def layer_bytes(self, moves: Sequence[Move]) -> tuple[int, int]:
        """Bytes of a layer in one page, and in all pages of a move; where parts differ, the most."""
        each = [self._device[move.part].spec.layer_bytes for move in moves]
        return max(each), max(len(move.source) * one for move, one in zip(moves, each, strict=True))

    def load_layers(self, moves: Sequence[Move], first: int, end: int) -> None:
        """Layers first .. end - 1 of these pages from the host to the device, without stamps."""
        for move in moves:
            before, host = self._before[move.part], self._host[move.part].tensor_PY
            self._device[move.part].copy_in(move.target, host, move.source, before[first], before[end])

    def load_stamps(self, moves: Sequence[Move]) -> None:
        """The stamps of these pages from the host to the device."""
        for move in moves:
            self._device[move.part].copy_stamps_in(move.target, self._host[move.part].stamps_PZ, move.source)

    def back_up(self, move: Move, first: int = 0, end: int | None = None) -> None:
        """Pages first .. end - 1 of the move, all layers, from the device to the host, without stamps."""
        source, target = move.source[first:end], move.target[first:end]
        self._device[move.part].copy_out(source, self._host[move.part].tensor_PY, target)

    def back_up_stamps(self, moves: Sequence[Move]) -> None:
        """The stamps of these pages from the device to the host."""
        for move in moves:
            self._device[move.part].copy_stamps_out(move.source, self._host[move.part].stamps_PZ, move.target)


def by_op(moves: Sequence[Move], taken: Collection[int]) -> dict[int, list[Move]]:
    """The moves of each op. Raises InvariantError: an op is one of `taken`, or of two kinds."""
    found: dict[int, list[Move]] = {}
    for move in moves:
        found.setdefault(move.op, []).append(move)
    for op, own in found.items():
        if op in taken or any(move.kind is not own[0].kind for move in own):
            raise InvariantError(f"pool: copy {op} submitted twice or of two kinds, expected neither")
    return found


def _counts(layer_parts: Sequence[Part], part: Part) -> tuple[int, ...]:
    """For each layer of the model, and its end: how many layers of `part` come before it."""
    counts = [0]
    for own in layer_parts:
        counts.append(counts[-1] + (own is part))
    return tuple(counts)
