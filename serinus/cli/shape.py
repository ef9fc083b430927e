"""Before anything is started: can this checkpoint be shared among its ranks, and can the faults be planted?"""

from __future__ import annotations

from pathlib import Path

from serinus.core.config import ServeConfig


def check_shape(config: ServeConfig) -> None:
    """Refuse ranks that the model cannot be shared among, and planned faults that it cannot have: in one line, not by
    each rank once it has started.

    A hub id that is not on this machine yet is left to the ranks. Raises ConfigError. Cost: a few ms, two small files;
    loads no torch where no faults are planned.
    """
    folder, faults = Path(config.model.model_path), config.canary.kv_canary_perturb
    one_rank = config.parallel.size == 1 and not config.parallel.partition
    if (one_rank and not faults) or not folder.is_dir():
        return
    from serinus.models import spec_of
    from serinus.ranks.rank_processes import mesh_of

    spec = spec_of(config.model)  # reads no weights
    shards = spec.shards(mesh_of(config), config.parallel.partition)
    if faults:
        from serinus.canary.perturb import check_faults

        check_faults(config, spec, shards)
