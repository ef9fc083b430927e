"""Mixtures of experts as data: which layers are mixtures, how many experts there are, and how tokens choose. No torch.

The rules of choice that families have are one rule with switches: scores (softmax or sigmoid), a correction that counts
for the choice alone, groups of which the best are kept, weights that are made to sum to 1, and a factor. It is computed
in `mixture`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from serinus.models.config_fields import ConfigFields

_SWIGLU_OAI = (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0))
"""Numbers of gpt-oss's activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFamily:
    """What an architecture with mixtures implies beyond its config.json."""

    sigmoid: bool = False
    """Scores are sigmoids of the router's logits; else their softmax."""
    normalized: bool = True
    """`norm_topk_prob` where the config does not name it."""
    corrected: bool = False
    """The router has a correction of the scores that counts for the choice alone."""
    shared_gate: bool = False
    """What the shared expert adds is scaled by a sigmoid of its own."""
    dense_first: int = 0
    """`first_k_dense_replace` where the config does not name it."""
    scale: float = 1.0
    """`routed_scaling_factor` where the config does not name it."""
    groups: int = 1
    """`n_group` where the config does not name it (null there means 1)."""
    groups_chosen: int = 1
    """`topk_group` where the config does not name it."""
    biased: bool = False
    """Router and experts have biases."""
    gate: Literal["silu", "swiglu_oai"] = "silu"
    """The activation of an expert."""
    method_said: bool = False
    """`topk_method` of the config says whether groups count, and weights are never made to sum to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """The mixtures of a model."""

    layers: tuple[int, ...]
    """Layers whose MLP is a mixture, ascending; the others are dense."""
    count: int
    """Experts of a layer."""
    chosen: int
    """Experts that a token goes through."""
    size: int
    """Width inside an expert."""
    shared_size: int = 0
    """Width inside the expert that all tokens go through; 0 = there is none."""
    shared_gate: bool = False
    """What the shared expert adds is scaled by a sigmoid of its own."""
    sigmoid: bool = False
    """Scores are sigmoids of the router's logits; else their softmax."""
    normalized: bool = True
    """The weights of a token's experts are made to sum to 1."""
    scale: float = 1.0
    """The weights are multiplied by this, last."""
    corrected: bool = False
    """The choice is by score plus a correction of each expert; weights are of the scores alone."""
    groups: int = 1
    """Groups of experts, of which a token's best are kept. A group is as good as its best expert, or where scores are
    corrected as the sum of its best two."""
    groups_chosen: int = 1
    """Groups that are kept."""
    biased: bool = False
    """Router and experts have biases."""
    gate: Literal["silu", "swiglu_oai"] = "silu"
    """The activation of an expert."""

    def ranks_max(self, *, whole: bool) -> int:
        """Slices of a layer at most: each has some of the shared expert, and of every other one, or some `whole`."""
        each = self.count if whole else self.size
        return min(each, self.shared_size or each)


def expert_fields(config: ConfigFields, family: ExpertFamily, layer_count: int) -> ExpertSpec | None:
    """What a config.json says of mixtures; None: no layer is one. Raises ConfigError for missing or wrong fields."""
    layers = _mixtures(config, family, layer_count)
    if not layers:
        return None
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    counted = next((name for name in names if config.get(name) is not None), names[0])
    count = config.whole(counted)
    size = config.whole("moe_intermediate_size", config.get("intermediate_size"))
    shared = config.whole("n_shared_experts", 0, low=0) * size
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        shared = config.whole(name, shared, low=0)
    groups = 1 if config.given("n_group", family.groups) is None else config.whole("n_group", family.groups)
    if family.method_said:
        if config.get("topk_method", "greedy") not in ("greedy", "group_limited_greedy"):
            raise config.fail("topk_method", "greedy or group_limited_greedy")
        if config.flag("norm_topk_prob", False):
            raise config.fail("norm_topk_prob", "false: transformers has no other weights of this family")
        groups = groups if config.get("topk_method", "greedy") == "group_limited_greedy" else 1
    if count % groups:
        raise config.fail("n_group", f"a divisor of {counted} = {count}")
    spec = ExpertSpec(
        layers=layers,
        count=count,
        chosen=config.whole("num_experts_per_tok"),
        size=size,
        shared_size=shared,
        shared_gate=family.shared_gate and shared > 0,
        sigmoid=family.sigmoid,
        normalized=config.flag("norm_topk_prob", family.normalized),
        scale=config.real("routed_scaling_factor", family.scale),
        corrected=family.corrected,
        groups=groups,
        groups_chosen=config.whole("topk_group", family.groups_chosen) if groups > 1 else 1,
        biased=family.biased,
        gate=family.gate,
    )
    for name, fixed in _SWIGLU_OAI if family.gate == "swiglu_oai" else ():
        if config.real(name, fixed) != fixed:
            raise config.fail(name, f"{fixed}, which the kernels have")
    if spec.groups_chosen > groups:
        raise config.fail("topk_group", f"at most n_group = {groups}")
    if spec.chosen > spec.groups_chosen * (count // groups):
        raise config.fail("num_experts_per_tok", f"at most the {spec.groups_chosen * (count // groups)} experts kept")
    if family.corrected and count // groups < 2:
        raise config.fail("n_group", f"groups of two experts or more, of {count}")
    return spec


def _mixtures(config: ConfigFields, family: ExpertFamily, layer_count: int) -> tuple[int, ...]:
    """From `first_k_dense_replace`, `decoder_sparse_step` and `mlp_only_layers`, where a config has them."""
    first = config.whole("first_k_dense_replace", family.dense_first, low=0)
    step = config.whole("decoder_sparse_step", config.whole("moe_layer_freq", 1))
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise config.fail("mlp_only_layers", "a list of layers")
    return tuple(i for i in range(first, layer_count) if (i + 1) % step == 0 and i not in dense)
