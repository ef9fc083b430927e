"""The models Serinus serves: config.json, weights, and one forward pass for all decoder families.

`load_spec` and `resolve` are light; what needs torch is imported when it is first named.
"""

from typing import TYPE_CHECKING

from serinus.core.lazy import lazy_names

if TYPE_CHECKING:
    from serinus.models.batch import ForwardBatch, HostBatch
    from serinus.models.hooks import ForwardHook, NullHook, Put, compose_hooks
    from serinus.models.hub import check_path, resolve
    from serinus.models.loader import Model, check_weights, choose_dtype, choose_kv_dtype, load_model
    from serinus.models.rope_fields import RopeSpec
    from serinus.models.small_checkpoints import make_checkpoint, make_toy
    from serinus.models.spec import KNOWN_ARCHITECTURES, TOY_ARCHITECTURE, ModelSpec, load_spec, overrides_of, spec_of
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
    "check_path",
    "check_weights",
    "choose_dtype",
    "choose_kv_dtype",
    "compose_hooks",
    "file_bytes",
    "load_model",
    "load_spec",
    "make_checkpoint",
    "make_toy",
    "overrides_of",
    "resolve",
    "spec_of",
]

__getattr__ = lazy_names(
    __name__,
    batch="ForwardBatch HostBatch",
    hooks="ForwardHook NullHook Put compose_hooks",
    hub="check_path resolve",
    loader="Model check_weights choose_dtype choose_kv_dtype load_model",
    small_checkpoints="make_checkpoint make_toy",
    rope_fields="RopeSpec",
    spec="KNOWN_ARCHITECTURES TOY_ARCHITECTURE ModelSpec load_spec overrides_of spec_of",
    weight_digests="TensorDigests",
    weight_files="file_bytes",
)
