"""damage: change one byte of KV in place, and say what it was."""

from __future__ import annotations

import torch

from serinus.canary.lanes import PartLanes

__all__ = ["flip_byte"]

_MASK = 0x5A


def flip_byte(lanes: PartLanes, slot: int) -> tuple[int, int]:
    """Change the first byte of the slot's keys in the part's first layer; (before, after)."""
    byte = lanes.layers_kv[0][0].view(len(lanes.layers_kv[0][0]), -1).view(torch.uint8)[slot, :1]
    before = int(byte)
    byte.fill_(before ^ _MASK)
    return before, before ^ _MASK
