"""Device work: one contract per op, and a column of implementations per kind of device.

`ref/` is plain torch and the specification; `cpu/` is numba and fast on a CPU. Files of the same name hold the same
op with the same signature. `load` picks once, at start; nothing is chosen per call. Kernels take tensors and sizes,
never objects of upper rooms.
"""

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.huge_pages import collapse_to_huge_pages, prefer_huge_pages
from serinus.kernels.packed import PackedLinear
from serinus.kernels.registry import COLUMNS, Kernels, load, warm

__all__ = [
    "COLUMNS",
    "AttentionBatch",
    "Kernels",
    "PackedLinear",
    "collapse_to_huge_pages",
    "load",
    "prefer_huge_pages",
    "warm",
]
