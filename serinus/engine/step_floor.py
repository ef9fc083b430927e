"""The floor of a decode step: the bytes that it must read over the bandwidth of the memory that they lie in.

Weights once, KV of all tokens that the running requests have. An estimate for people, from the shape of the model; of
the leader's rank. The bandwidth is measured on a CPU when it is first asked for (some 20 ms), and known of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Final

import torch

from serinus.core.clock import Clock
from serinus.core.parts import Part
from serinus.models import ModelSpec
from serinus.pool import DevicePool

_PROBE_BYTES: Final = 64 << 20
_PROBES: Final = 3


def step_floor(
    spec: ModelSpec, pools: Mapping[Part, DevicePool], dtype: torch.dtype, device: str, clock: Clock
) -> Callable[[int], float]:
    """Seconds that a decode step takes at least, by the tokens of its requests. `spec`, `pools`: of this rank."""
    weights = read_bytes(spec, dtype.itemsize)
    slot = sum(pool.spec.page_bytes for pool in pools.values()) / next(iter(pools.values())).spec.page_size
    bandwidth = cache(lambda: _bandwidth(device, clock))
    return lambda tokens: (weights + tokens * slot) / bandwidth()


def read_bytes(spec: ModelSpec, item_bytes: int, tokens: int = 1) -> int:
    """Of the matrices that a decode step reads: attention, MLP and head. `item_bytes`: of a weight not quantized;
    `tokens`: of the step: they choose experts, at random."""
    width, heads, kv_heads = spec.hidden_size, spec.head_count * spec.head_size, spec.kv_head_count * spec.head_size
    attention = width * (2 * heads + 2 * kv_heads)
    if spec.latent is not None:
        attention = spec.latent.weight_count(width, spec.head_count)
    linears, head, quantized = spec.layer_count * attention, width * spec.vocab_size, spec.quantization
    dense, experts = spec.layer_count, 0
    if (mix := spec.experts) is not None:
        hit = mix.count * (1.0 - (1.0 - mix.chosen / mix.count) ** tokens)
        dense -= len(mix.layers)
        linears += len(mix.layers) * 3 * width * mix.shared_size
        weights = int(3 * mix.size * hit) * width
        expert_bytes = weights * item_bytes if quantized is None else int(quantized.expert_bytes(weights, item_bytes))
        experts = len(mix.layers) * (expert_bytes + 4 * mix.count * width)  # the router in fp32
    linears += dense * 3 * width * spec.intermediate_size
    if quantized is None or quantized.bits == 16:
        return item_bytes * (linears + head) + experts
    head_bytes = item_bytes if quantized.head_bits == 16 else quantized.head_bits // 8
    return int(quantized.linear_bytes(linears)) + head * head_bytes + experts


def _bandwidth(device: str, clock: Clock) -> float:
    """Bytes a second that reads come at."""
    if device.startswith("cuda"):
        about = torch.cuda.get_device_properties(device)
        bits = about.memory_bus_width * about.memory_clock_rate * 1e3 * 2  # two transfers a clock
        return float(bits / 8)
    probe = torch.zeros(_PROBE_BYTES // 4, dtype=torch.float32)
    best = 0.0
    for _ in range(_PROBES):
        began = clock.now()
        probe.sum()
        best = max(best, _PROBE_BYTES / max(clock.now() - began, 1e-9))
    return best
