"""Tensors between the slices of a stage without NCCL: through memory of their GPUs that all of them open."""

from __future__ import annotations

import torch

from serinus.core.config import ServeConfig, environment
from serinus.core.errors import ConfigError, TransferFailed
from serinus.core.log import get_logger
from serinus.kernels import Kernels
from serinus.parallel.comm import Comm, TorchComm
from serinus.pd.backends.cuda_driver import CudaDriver
from serinus.pd.backends.cuda_ipc import SharedAllocation

_log = get_logger("engine")


def share_memory(config: ServeConfig, comm: Comm, device: str, kernels: Kernels) -> None:
    """From now on `comm` adds up small tensors, gathers and broadcasts by kernels of its own, where the GPUs of a stage
    see each other; else NCCL does, and the log says why. All ranks call it side by side. Cost: 48 MB of each GPU."""
    if device == "cpu" or comm.mesh.tp == 1 or not isinstance(comm, TorchComm):
        return
    reason = _why_not(config, kernels)
    memory, shared = None, None
    if not reason:
        memory, shared, reason = _shared(device)
    offset = 0 if memory is None or shared is None else memory.data_ptr() - shared.address
    said = comm.told([] if shared is None else [offset, shared.address, shared.byte_count, *shared.handle])
    first = comm.mesh.rank_of(tp_rank=0, pp_rank=comm.mesh.pp_rank(comm.rank))
    stage = said[first : first + comm.mesh.tp]
    addresses: list[int] = []
    if memory is not None and all(stage):
        try:
            addresses = [_opened(device, each, memory, own=first + i == comm.rank) for i, each in enumerate(stage)]
        except (ConfigError, TransferFailed) as error:
            reason = str(error)
    done = comm.told([int(bool(addresses))])[first : first + comm.mesh.tp]
    if memory is None or not all(each[0] for each in done):
        _log.info("tensors between ranks go through NCCL: %s", reason or "another rank cannot share memory")
        return
    from serinus.kernels.triton.peer_exchange import PeerExchange

    index = comm.mesh.tp_rank(comm.rank)
    comm.peers = PeerExchange(memory, addresses, index, config.parallel.dist_s_max)
    _log.info("tensors between ranks go through memory that their GPUs share")


def _why_not(config: ServeConfig, kernels: Kernels) -> str:
    if environment().get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE is set"
    if len(config.parallel.local_ranks) < config.parallel.size:
        return "ranks are on several machines"
    return "" if kernels.columns["rms_norm"] == "triton" else "kernels of the reference"


def _shared(device: str) -> tuple[torch.Tensor | None, SharedAllocation | None, str]:
    """Memory of this rank, as it is shared; or why it cannot be."""
    from serinus.kernels.triton.peer_words import exchange_memory

    memory = exchange_memory(device)
    torch.cuda.synchronize()
    try:
        driver = CudaDriver(device)
        if len(driver.reachable) < torch.cuda.device_count():
            return None, None, "this GPU does not reach the memory of all others"
        return memory, driver.share(memory.data_ptr()), ""
    except ConfigError as error:
        return None, None, str(error)


def _opened(device: str, said: list[int], memory: torch.Tensor, *, own: bool) -> int:
    """Where a rank's memory lies for this one. Raises ConfigError, TransferFailed."""
    if own:
        return memory.data_ptr()
    offset, address, byte_count, *handle = said
    shared = SharedAllocation(handle=bytes(handle), address=address, byte_count=byte_count)
    return CudaDriver(device).open(shared) + offset
