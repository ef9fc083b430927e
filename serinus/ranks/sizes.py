"""How many pages each part of a model gets, from settings and memory. Allocates nothing."""

from __future__ import annotations

from dataclasses import replace

import torch

from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError
from serinus.core.parts import Part
from serinus.models import ModelSpec
from serinus.pool import PoolSpec
from serinus.ranks.memory import available_bytes, total_bytes

_HOST_FRACTION = 0.2
"""Part of a host's free memory that KV takes where the settings do not say: it has other users."""
_GRAPH_BYTES = 1 << 30
"""Kept free on a GPU for recorded steps, and for what the canary notes of them."""
_CHUNK = 2048
"""Prompt tokens of a step where the settings do not say."""
_STAGES_CHUNK = 256
"""...on the stages of a CPU."""


def chunk_of(config: ServeConfig, device: str) -> int:
    """Prompt tokens of one step; -1 = whole prompts. Stages wait for each other until as many chunks are under way as
    there are stages, so short ones are better for them; a CPU loses nothing by short ones, an accelerator does."""
    asked = config.sched.chunked_prefill_size
    if asked is not None:
        return asked
    return _STAGES_CHUNK if config.parallel.pp_size > 1 and device == "cpu" else _CHUNK


def kv_budget(fraction: float | None, device: str, free: int, total: int, step_bytes: int, own: int) -> int:
    """Bytes for KV, once weights are loaded.

    Args:
        fraction: the setting. On a host of its free memory; on a GPU of all its memory, weights and KV together, as
            SGLang means it. None: 0.2 of a host; of a GPU all that the largest step and the recorded ones leave.
        free, total: bytes of the device.
        step_bytes: of a GPU, what the largest step takes.
        own: of a GPU, what this process holds already: its weights. What others hold counts for them.
    """
    if device == "cpu":
        return int(free * (fraction or _HOST_FRACTION))
    left = free - step_bytes - _GRAPH_BYTES
    return max(left if fraction is None else min(left, int(total * fraction) - own), 0)


def part_specs(
    config: ServeConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: str,
    context: int,
    taken: int = 0,
    step_bytes: int = 0,
    own: int = 0,
) -> dict[Part, PoolSpec]:
    """The pool of each part: as many pages as asked for, or as memory allows and the largest batch could use.

    FULL counts tokens of sequences (where all layers slide its pages have no bytes); SWA gets `swa_full_tokens_ratio`
    of them, and never less than one window. Ranks of one machine share its memory, where it is one for all: `spec` is
    that of a rank. `taken`: bytes of the device that are spoken for; `step_bytes`, `own`: as `kv_budget` takes them.
    Raises ConfigError: more than there is, or not one page.
    """
    sizes = {
        part: PoolSpec(
            layer_count=len(spec.layers_of(part)),
            kv_head_count=spec.kv_head_count,
            head_size=spec.head_size,
            page_size=config.memory.page_size,
            page_count=2,
            dtype=dtype,
            device=device,
            halves=part.halves,
            stamped=config.canary.kv_canary != "none",
        )
        for part in spec.parts
    }
    ranks = len(config.parallel.local_ranks) if device == "cpu" else 1
    have = max(available_bytes(device) - taken, 0) // ranks
    fraction = config.memory.mem_fraction_static
    page_size = config.memory.page_size
    if config.memory.max_total_tokens is not None:
        counts = _counts(config, spec, context, -(-config.memory.max_total_tokens // page_size))
        needed = _bytes(sizes, counts)
        if needed > have:
            raise ConfigError(
                f"engine: max_total_tokens is {config.memory.max_total_tokens}, which takes {needed / 1e9:.1f} GB of "
                f"KV; {have / 1e9:.1f} GB are free on {device}"
            )
    else:
        budget = kv_budget(fraction, device, have, total_bytes(device), step_bytes, own or taken)
        largest = config.sched.max_running_requests * -(-context // page_size)
        counts = _counts(config, spec, context, _pages_in(config, spec, context, sizes, budget, largest))
        if counts[Part.FULL] < 1 or _bytes(sizes, counts) > budget:
            raise ConfigError(
                f"engine: mem_fraction_static is {fraction}, which leaves {budget / 1e9:.2f} GB for KV"
                f" ({have / 1e9:.2f} GB are free on {device}); the smallest pool takes"
                f" {_bytes(sizes, _counts(config, spec, context, 1))} bytes, expected room for that (engines that share"
                " a GPU: give each a --mem-fraction-static)"
            )
    return {part: replace(sizes[part], page_count=counts[part] + 1) for part in sizes}


def _counts(config: ServeConfig, spec: ModelSpec, context: int, full: int) -> dict[Part, int]:
    """Pages by part, without page 0, for so many FULL ones."""
    if spec.is_latent:
        return {Part.FULL: full, Part.LATENT: full}
    if spec.window is None:
        return {Part.FULL: full}
    page_size = config.memory.page_size
    window = -(-spec.window // page_size)
    least = min(window + max(1, window // 8) + 1, -(-context // page_size))  # as sched and cache count
    return {Part.FULL: full, Part.SWA: max(int(full * config.memory.swa_full_tokens_ratio), least)}


def _bytes(sizes: dict[Part, PoolSpec], counts: dict[Part, int]) -> int:
    return sum(sizes[part].page_bytes * (count + 1) for part, count in counts.items())


def _pages_in(
    config: ServeConfig, spec: ModelSpec, context: int, sizes: dict[Part, PoolSpec], budget: int, largest: int
) -> int:
    """The most FULL pages, `largest` at most, that fit with what comes with them; by bisection."""
    low, high = 0, largest
    while low < high:
        middle = (low + high + 1) // 2
        if _bytes(sizes, _counts(config, spec, context, middle)) <= budget:
            low = middle
        else:
            high = middle - 1
    return low
