"""What an engine's KV bytes look like, all ranks together, and how they may travel: equal on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from serinus.canary.perturb import parse_perturb
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError
from serinus.core.ids import new_incarnation
from serinus.core.log import get_logger
from serinus.core.parts import Part
from serinus.models import ModelSpec
from serinus.parallel import Mesh
from serinus.pd import AnyBackend, Backend, make_backends, make_one_sided
from serinus.pd.backends import CudaDriver, CudaIpcBackend
from serinus.pool import DevicePool
from serinus.wire.messages import LayoutSignature

_log = get_logger("ranks")


class HasPools(Protocol):
    """An object that knows an engine's model and one rank's pools."""

    @property
    def config(self) -> ServeConfig: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def pools(self) -> Mapping[Part, DevicePool]: ...


def layout_of(rank: HasPools) -> LayoutSignature:
    """What shapes this engine's KV bytes, as any of its ranks can say; pd.layout says what may differ between two."""
    spec, parallel, pool = rank.spec, rank.config.parallel, rank.pools[Part.FULL].spec
    is_latent = spec.is_latent
    stages = Mesh(tp=parallel.tp_size, pp=parallel.pp_size).stage_layers(spec.layer_count, parallel.partition)
    assert spec.signature, "ranks: a layout of a model whose weights are not loaded"
    stamp_bytes = max(each.spec.stamp_bytes for each in rank.pools.values()) // pool.page_size
    return LayoutSignature(
        model=spec.signature,
        kv_dtype=str(pool.dtype).removeprefix("torch."),
        page_size=pool.page_size,
        layer_count=spec.layer_count,
        kv_head_count=1 if is_latent else pool.kv_head_count * parallel.tp_size,
        head_size=pool.head_size,
        lanes=("latent",) if is_latent else ("k", "v"),
        layer_parts=bytes(spec.layer_parts),
        window=spec.window or 0,
        stamp_bytes=stamp_bytes,
        stamp_data=rank.config.canary.kv_canary_real_data if stamp_bytes else "",
        tp=parallel.tp_size,
        pp=parallel.pp_size,
        stage_layers=tuple(len(layers) for layers in stages) if parallel.partition else (),
    )


def data_backends(config: ServeConfig, rank: int, device: str) -> tuple[AnyBackend, ...]:
    """How KV of a rank of this engine, with its pools on `device`, may travel, best first; none where the engine hands
    nothing over.

    Raises ConfigError: a backend that is not known or not installed, or that does not reach the engine's other hosts.
    """
    if config.role == "unified":
        return ()
    choice, faults = config.pd.transfer_backend, parse_perturb(config.canary.kv_canary_perturb)
    if choice == "cuda_ipc":
        return (_cuda_ipc(config, device),)
    tag = f"{config.engine_name}.{rank}-{new_incarnation()}"
    one_sided = make_one_sided(choice, tag=tag, host=config.pd.bootstrap_host, device=device)
    if one_sided is not None:
        return (one_sided,)
    staged = _staged_backends(config)
    if choice != "auto" or device == "cpu" or config.parallel.nnodes > 1 or faults:
        return staged  # pools that are damaged on purpose are not reached in place
    try:
        return (_cuda_ipc(config, device), *staged)
    except ConfigError as error:
        _log.warning("KV travels through the host: %s", error)
        return staged


def _cuda_ipc(config: ServeConfig, device: str) -> CudaIpcBackend:
    return CudaIpcBackend(CudaDriver(device), shares=config.role == "prefill")


def _staged_backends(config: ServeConfig) -> tuple[Backend, ...]:
    """Those whose bytes page workers stage and take in. Raises ConfigError: one that does not reach the engine's other
    hosts."""
    choice, parallel = config.pd.transfer_backend, config.parallel
    if parallel.nnodes > 1 and choice in ("auto", "shm"):
        if choice == "shm":
            raise ConfigError(
                f"engine: disaggregation_transfer_backend is 'shm' with {parallel.nnodes} hosts, expected auto or tcp"
            )
        choice = "tcp"
    return make_backends(choice)
