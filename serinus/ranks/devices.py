"""Which device a rank computes on."""

from __future__ import annotations

import torch

from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError


def comm_device(config: ServeConfig, rank: int) -> str:
    """`cpu`, or the accelerator of one rank: as many as ranks on this machine, in their order.

    Raises ConfigError: there are fewer.
    """
    parallel = config.parallel
    asked = config.model.device
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return "cpu"
    count, needed = torch.cuda.device_count(), len(parallel.local_ranks)
    if count < needed:
        raise ConfigError(
            f"engine: {needed} ranks on this machine (--tp-size {parallel.tp_size}, --pp-size {parallel.pp_size},"
            f" --nnodes {parallel.nnodes}) and {count} CUDA devices, expected one for each rank; or --device cpu"
        )
    return f"cuda:{parallel.local_ranks.index(rank)}"


def take_device(config: ServeConfig, rank: int) -> str:
    """Make `cuda` mean the rank's own device from now on; returns comm_device."""
    device = comm_device(config, rank)
    if device != "cpu":
        torch.cuda.set_device(device)
    return device
