"""Device work: one contract per op, and a column of implementations per kind of device.

`ref/` is plain torch and the specification; `cpu/` is numba, for CPUs; `triton/` is Triton, for GPUs. Files of the same
name hold the same op with the same signature; a column may lack an op, then `ref` serves. `load` picks once, at start;
nothing is chosen per call. Kernels take tensors and sizes, never objects of upper rooms.
"""

from serinus.kernels.batch import AttentionBatch, find_chunks, slots_in
from serinus.kernels.canary import RING_FIELDS, SEQUENCES, DuePages, Reason, StampLane, packed_sums, stamp_lanes
from serinus.kernels.contracts import (
    ExpertGate,
    Gate,
    LatentHeads,
    LayerDigest,
    LayerDigests,
    LayersKv,
    PoolLane,
    RowSampling,
    Tiling,
    Watch,
    WatchPlan,
    WrittenRows,
)
from serinus.kernels.cuda_library import CUDA_HANDLE_BYTES, CudaFailed, CudaLibrary, CudaMark, current_stream
from serinus.kernels.fp8 import FP8_FORMATS
from serinus.kernels.huge_pages import collapse_to_huge_pages, populate, prefer_huge_pages
from serinus.kernels.layers import LayerSteps, LayerWeights
from serinus.kernels.packed import PackedExperts, PackedLinear
from serinus.kernels.pool_rows import put_rows, row_elements, row_of, rows_of, slot_count
from serinus.kernels.quantized import E2M1_TWICE, QuantizedWeight
from serinus.kernels.ref.canary import digest_values
from serinus.kernels.ref.watched_attention import GatheredRows
from serinus.kernels.registry import Kernels, load, warm
from serinus.kernels.splitmix import shift_right, splitmix
from serinus.kernels.words import carry_words

__all__ = [
    "CUDA_HANDLE_BYTES",
    "E2M1_TWICE",
    "FP8_FORMATS",
    "RING_FIELDS",
    "SEQUENCES",
    "AttentionBatch",
    "CudaFailed",
    "CudaLibrary",
    "CudaMark",
    "DuePages",
    "ExpertGate",
    "Gate",
    "GatheredRows",
    "Kernels",
    "LatentHeads",
    "LayerDigest",
    "LayerDigests",
    "LayerSteps",
    "LayerWeights",
    "LayersKv",
    "PackedExperts",
    "PackedLinear",
    "PoolLane",
    "QuantizedWeight",
    "Reason",
    "RowSampling",
    "StampLane",
    "Tiling",
    "Watch",
    "WatchPlan",
    "WrittenRows",
    "carry_words",
    "collapse_to_huge_pages",
    "current_stream",
    "digest_values",
    "find_chunks",
    "load",
    "packed_sums",
    "populate",
    "prefer_huge_pages",
    "put_rows",
    "row_elements",
    "row_of",
    "rows_of",
    "shift_right",
    "slot_count",
    "slots_in",
    "splitmix",
    "stamp_lanes",
    "warm",
]
