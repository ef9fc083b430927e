"""damage: where a fault hits, drawn from the seed, and the one bit that it changes.

A place is a bit of the KV of a slot (layer, half, head, byte, bit), or of a stamp that travels with a page (lane,
field, byte, bit). What a canary promises to see is asked of the settings alone, never of the detectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.canary.lanes import PartLanes
from serinus.canary.perturb.plan import Place
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.core.stamps import PARTIAL_LANES, STAMP_FIELDS
from serinus.kernels import row_of, stamp_lanes

_FIELDS = ("token", "position", "hash", "digest")
_HALVES = ("K", "V")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """What of one part a rank holds, and how the bytes of a page are laid out (DevicePool.read_pages)."""

    layer_ids: Sequence[int]
    """The model's numbers of the part's layers here."""
    head_ids: Sequence[int]
    """The model's numbers of the KV heads here."""
    head_bytes: int
    """Of one head of one slot, keys or values."""
    page_size: int
    part: Part = Part.FULL

    @classmethod
    def of(cls, lanes: PartLanes, page_size: int) -> PageShape:
        """That of the pools of a rank."""
        pool = lanes.layers_kv[0][0]
        return cls(
            layer_ids=lanes.layer_ids, head_ids=lanes.head_ids, head_bytes=pool.shape[-1] * pool.itemsize,
            page_size=page_size, part=lanes.part,
        )  # fmt: skip

    def offset(self, place: Place, slot: int) -> int:
        """Of the place's byte within a page, in the page's slot number `slot`."""
        slot_bytes = len(self.head_ids) * self.head_bytes
        strip = self.page_size * slot_bytes
        if place.lane:
            field = _FIELDS.index(place.field)
            begin = len(self.layer_ids) * self.part.halves * strip
            lane = _lane_names(self.part).index(place.lane) * self.page_size
            return begin + ((lane + slot) * STAMP_FIELDS + field) * 8 + place.byte
        at = self.layer_ids.index(place.layer) * self.part.halves + _HALVES.index(place.half)
        return at * strip + slot * slot_bytes + self.head_ids.index(place.head) * self.head_bytes + place.byte


class Places:
    """Deals places: each layer, half and head (with `stamped` also each lane and field of stamps) once before any comes
    twice, in an order by the seed; the byte and the bit by chance."""

    def __init__(self, rng: Rng, shape: PageShape, *, partial: bool, stamped: bool = False) -> None:
        """`partial`: only the first 16 bytes of head 0 are digested, so only they are hit."""
        heads = [head for head in shape.head_ids if head == 0 or not partial]
        self._rng = rng
        self._byte_count = min(shape.head_bytes, 2 * PARTIAL_LANES) if partial else shape.head_bytes
        self.strata = [
            Place(layer=layer, half=half, head=head)
            for layer in shape.layer_ids
            for half in _HALVES[: shape.part.halves]
            for head in heads
        ]
        """All places, but for byte and bit; none where this rank holds nothing that is digested."""
        if stamped:
            self.strata += [Place(lane=lane, field=field) for lane in _lane_names(shape.part) for field in _FIELDS]
        self._deck: list[Place] = []
        self._drawn: Place | None = None

    def draw(self) -> Place | None:
        """The next place; None where there are none."""
        if not self._deck:
            self._deck = list(self.strata)
            self._rng.shuffle(self._deck)
            if not self._deck:
                return None
        self._drawn = place = self._deck.pop()
        byte = self._rng.randrange(8 if place.lane else self._byte_count)
        return place.at(byte=byte, bit=self._rng.randrange(8))

    def give_back(self) -> None:
        """What was drawn last was not damaged: it is drawn next."""
        if self._drawn is not None:
            self._deck.append(self._drawn)
            self._drawn = None


def _lane_names(part: Part) -> list[str]:
    return [lane.name for lane in stamp_lanes(part)]


def flip_bit(lanes: PartLanes, slot: int, place: Place) -> tuple[int, int]:
    """Flip the bit in the KV of a slot; its byte (before, after). Waits for the device."""
    pool = lanes.layers_kv[lanes.layer_ids.index(place.layer)][_HALVES.index(place.half)]
    row_HY = row_of(pool, slot).view(torch.uint8)
    byte = row_HY[lanes.head_ids.index(place.head), place.byte : place.byte + 1]
    before = int(byte)
    byte.fill_(before ^ 1 << place.bit)
    return before, before ^ 1 << place.bit


def flip_page_bit(row_Y: NDArray[np.uint8], offset: int, bit: int) -> tuple[int, int]:
    """Flip a bit of one byte of a page; that byte (before, after)."""
    before = int(row_Y[offset])
    row_Y[offset] = before ^ 1 << bit
    return before, before ^ 1 << bit
