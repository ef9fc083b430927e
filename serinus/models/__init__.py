"""The models Serinus serves: config.json, weights, and one forward pass for all decoder families.

`load_spec` and `resolve` are light; what needs torch is imported when it is first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serinus.models.batch import ForwardBatch, HostBatch
    from serinus.models.hooks import ForwardHook, NullHook, Put, compose_hooks
    from serinus.models.hub import resolve
    from serinus.models.loader import Model, choose_dtype, load_model
    from serinus.models.small_checkpoints import make_checkpoint, make_toy
    from serinus.models.spec import KNOWN_ARCHITECTURES, TOY_ARCHITECTURE, ModelSpec, RopeSpec, load_spec
    from serinus.models.weight_digests import TensorDigests
    from serinus.models.weight_files import file_bytes

__all__ = [
    "KNOWN_ARCHITECTURES",
    "TOY_ARCHITECTURE",
    "ForwardBatch",
    "ForwardHook",
    "HostBatch",
    "Model",
    "ModelSpec",
    "NullHook",
    "Put",
    "RopeSpec",
    "TensorDigests",
    "choose_dtype",
    "compose_hooks",
    "file_bytes",
    "load_model",
    "load_spec",
    "make_checkpoint",
    "make_toy",
    "resolve",
]

_FILE_OF = {
    "ForwardBatch": "batch",
    "HostBatch": "batch",
    "ForwardHook": "hooks",
    "NullHook": "hooks",
    "Put": "hooks",
    "compose_hooks": "hooks",
    "resolve": "hub",
    "TensorDigests": "weight_digests",
    "file_bytes": "weight_files",
    "Model": "loader",
    "choose_dtype": "loader",
    "load_model": "loader",
    "make_checkpoint": "small_checkpoints",
    "make_toy": "small_checkpoints",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILE_OF.get(name, 'spec')}"), name)
