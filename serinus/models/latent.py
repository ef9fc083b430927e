"""Multi-head latent attention as data: the sizes of its projections, from a config.json. No torch.

A position's KV is one row for all heads (Part.LATENT): the compressed latent that keys and values of every head are
made of, normed, then one key of rotated elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from serinus.models.config_fields import ConfigFields


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """The sizes of latent attention."""

    rank: int
    """Elements of a position's compressed latent (kv_lora_rank)."""
    rotated: int
    """Elements of a query or key that rotate (qk_rope_head_dim); the key's are the same for all heads."""
    plain: int
    """Elements of a head's query or key that do not (qk_nope_head_dim)."""
    value: int
    """Elements of a head's value (v_head_dim)."""
    query_rank: int
    """Elements of a position's compressed query (q_lora_rank); 0 = queries are projected at once."""

    @property
    def row(self) -> int:
        """Elements of a position's row of KV."""
        return self.rank + self.rotated

    @property
    def query(self) -> int:
        """Elements of a head's query."""
        return self.plain + self.rotated

    def weight_count(self, hidden: int, heads: int) -> int:
        """Of the matrices of one layer, for so many heads."""
        queries = heads * self.query
        made_of = hidden * queries if not self.query_rank else self.query_rank * (hidden + queries)
        return made_of + hidden * self.row + heads * (self.rank * (self.plain + self.value) + self.value * hidden)


def latent_fields(config: ConfigFields) -> dict[str, Any]:
    """The fields of a ModelSpec that latent attention decides. Raises ConfigError for missing or wrong ones."""
    query_rank = config.get("q_lora_rank")
    latent = LatentSpec(
        rank=config.whole("kv_lora_rank"),
        rotated=config.whole("qk_rope_head_dim"),
        plain=config.whole("qk_nope_head_dim"),
        value=config.whole("v_head_dim"),
        query_rank=0 if query_rank is None else config.whole("q_lora_rank"),
    )
    if latent.rotated % 2 or latent.row % 2:
        raise config.fail("qk_rope_head_dim", "an even number, as kv_lora_rank")
    if not latent.query_rank and config.flag("attention_bias", False):
        raise config.fail("attention_bias", "false where q_lora_rank is null")
    return {"latent": latent, "kv_head_count": 1, "head_size": latent.row}


def rescaled(latent: LatentSpec, given: tuple[tuple[str, Any], ...]) -> float:
    """What scores are multiplied by: query size ** -0.5, and YaRN's factor of temperature where it is meant for all
    elements (`mscale_all_dim`). `given`: of the rope."""
    fields = dict(given)
    scale: float = latent.query**-0.5
    factor, all_dim = fields.get("factor") or 1.0, fields.get("mscale_all_dim") or 0.0
    if all_dim and factor > 1:
        scale *= (0.1 * all_dim * math.log(factor) + 1.0) ** 2
    return scale
