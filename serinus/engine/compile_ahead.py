"""Kernels of a model compiled ahead, by several processes, into the cache that later starts read.

Each process makes an engine of the same settings and shapes with few layers and dummy weights, and runs its share of
what a start runs: one the largest and the first steps, the others decode steps of some sizes. So what is compiled is
what a start compiles, whatever the kernels are. On a CPU, where that is little, this process does it all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Final

import torch

from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.cores import cores, threads_env
from serinus.core.errors import ConfigError
from serinus.core.log import get_logger
from serinus.core.settings import CacheSettings
from serinus.core.version import package_version
from serinus.models import overrides_of, resolve, spec_of
from serinus.ranks.build import choose_device, graph_sizes
from serinus.ranks.memory import available_bytes

_log = get_logger("engine")
_PROCESSES: Final = 8
_PROCESS_BYTES: Final = 8 << 30
"""Of a GPU for each: CUDA itself, embedding and head, a step of the longest chunk."""
_TOKENS: Final = 4096
Shown = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


class Compilers:
    """The processes. `with Compilers(...) as ahead: ...; ahead.wait(shown)`; those that still run at its end are
    ended."""

    def __init__(self, config: ServeConfig, clock: Clock, *, spared: int = 0) -> None:
        """Start them. `spared`: bytes of the GPU that others are about to take.

        Raises ConfigError: the model cannot be had with few layers, there are several ranks, or memory of the GPU is
        left for less than two processes.
        """
        if config.parallel.size > 1:
            raise ConfigError(f"engine: {config.parallel.size} ranks, expected 1: ranks compile at their first start")
        self._clock, self._began = clock, clock.now()
        self._config = config
        self.device = choose_device(config.model.device)
        few = few_layers(config).to_json()
        left = available_bytes(self.device) - spared
        if self.device != "cpu" and left < 2 * _PROCESS_BYTES:
            raise ConfigError(f"engine: {left / 1e9:.1f} GB of {self.device} are left, expected 17 for two processes")
        count = min(_PROCESSES, max(2, cores() // 2), max(2, left // _PROCESS_BYTES))
        sizes = () if config.kernels.disable_cuda_graph else graph_sizes(config)
        self.shares = [[], *_shares(sizes, count - 1)]
        """Sizes of decode steps of each process; of the first one none: it runs all else."""
        self._children = [
            subprocess.Popen(
                [sys.executable, "-m", "serinus.engine.compile_process", json.dumps(share), str(os.getpid())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=threads_env(2),
            )
            for share in self.shares
        ]  # fmt: skip
        for child in self._children:
            assert child.stdin is not None, "engine: a child without stdin"
            child.stdin.write(few)
            child.stdin.close()
        _log.info("kernels are compiled ahead by %d processes", len(self._children))

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            if child.poll() is None:
                child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()

    def wait(self, shown: Shown) -> bool:
        """Wait until all is compiled; returns whether it went well. What could not be compiled here is compiled at
        first use."""
        with shown("compiling kernels", 1 + sum(map(len, self.shares))) as advance:
            for child in self._children:
                assert child.stdout is not None, "engine: a child without stdout"
                for _line in child.stdout:
                    advance()
                child.wait()
        failed = sum(child.returncode != 0 for child in self._children)
        spent = self._clock.now() - self._began
        if failed:
            _log.warning(
                "kernels: %d of %d processes failed; the rest is compiled at first use", failed, len(self.shares)
            )
        else:
            _log.info("kernels are compiled, in %.1f s", spent)
            mark = _mark(self._config)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        return not failed


def is_compiled(config: ServeConfig) -> bool:
    """Whether kernels of these settings and shapes were compiled ahead before, by these versions."""
    return _mark(config).exists()


def few_layers(config: ServeConfig) -> ServeConfig:
    """The same settings of a model with dummy weights and its first layers, one of each kind before the last: of most
    steps that computes few tokens.

    Raises ConfigError: the model cannot be had with so few."""
    folder, given = resolve(config.model.model_path, config.model.revision), overrides_of(config.model)
    dummy = replace(config.model, load_format="dummy")
    spec = spec_of(dummy)
    kinds = [
        (part, spec.experts is not None and i in spec.experts.layers, i in spec.plain_layers)
        for i, part in enumerate(spec.layer_parts)
    ]
    count = min(len(kinds), max(kinds.index(kind) for kind in kinds) + 2)
    raw = json.loads((Path(folder) / "config.json").read_text()) | given
    of_layers = {name: value for name, value in raw.items() if isinstance(value, list) and len(value) == len(kinds)}
    few = {**given, "num_hidden_layers": count, **{name: value[:count] for name, value in of_layers.items()}}
    dummy = replace(dummy, json_model_override_args=json.dumps(few))
    made = spec_of(dummy)
    if made.layer_count != count or set(made.layer_parts) != set(spec.layer_parts):
        raise ConfigError(f"engine: {spec.architecture} has {made.layer_count} layers when asked for {count}")
    return replace(
        config,
        model=dummy,
        memory=replace(config.memory, max_total_tokens=_TOKENS, mem_fraction_static=None),
        cache=CacheSettings(),
    )


def _shares(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The sizes of so many processes, large and small ones mixed."""
    return [list(sizes[at::count]) for at in range(min(count, len(sizes)))]


def _mark(config: ServeConfig) -> Path:
    """The file that says so, beside the compiled kernels."""
    from triton import knobs

    folder = resolve(config.model.model_path, config.model.revision)
    said = [
        package_version(), package_version("torch"), package_version("triton"),
        torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        (Path(folder) / "config.json").read_text(), config.model.json_model_override_args, config.model.dtype,
        config.model.quantization, config.model.context_length, config.memory.page_size,
        config.memory.kv_cache_dtype, config.canary,
        config.kernels.attention_backend, config.kernels.cuda_graph_max_bs, config.kernels.disable_cuda_graph,
        config.sched.max_running_requests, config.sched.chunked_prefill_size,
    ]  # fmt: skip
    return Path(knobs.cache.dir) / f"serinus-{blake2b(repr(said).encode(), digest_size=12).hexdigest()}"
