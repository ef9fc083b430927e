"""docs/MODELS.md lists the families that are served, and says of each what its data says."""

from __future__ import annotations

import re
from pathlib import Path

from serinus.models.families import FAMILIES, Family, Sliding

PAGE = Path(__file__).parents[2] / "docs" / "MODELS.md"
WINDOWS = {None: "-", Sliding.ALL: "all layers", Sliding.ABOVE: "upper layers", Sliding.PATTERN: "by pattern"}


def rows() -> dict[str, list[str]]:
    """Of the table of families: architecture -> the other columns."""
    table = PAGE.read_text(encoding="utf-8").split("<!-- families", 1)[1].split("<!-- end -->", 1)[0]
    found = re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
    return {name: rest.split(" | ") for name, rest in found}


def norms_of(family: Family) -> str:
    said = ["q, k, v biases"] if family.qkv_bias else []
    said += ["norms after blocks" if family.norms[0] else "norms after blocks, none before"] if family.norms[1] else []
    said += ["q and k norms"] if family.qk_norm else []
    whole = "; q and k norms over all heads" if family.qk_norm_whole else ""
    return (", ".join(said) or "-") + whole


def rest_of(family: Family) -> list[str]:
    """Words that must stand there."""
    facts = {
        "attention and MLP of one norm": family.cohere,
        "do not slide do not rotate": family.cohere and family.sliding is not None,
        "GELU": family.gemma,
        "caps": any(family.softcaps),
        "base of their own": family.local_rope is not None,
        "half of a head": family.rotated == 0.5,
        "neighbours together": family.interleaved,
        "fused": family.fused_mlp,
        "fused projections": family.fused_qkv,
        "latent attention": family.latent,
        "multipliers": family.multipliers,
        "do not rotate": bool(family.plain_every),
        "sinks": family.sinks,
        "experts": family.experts is not None,
        "biases": family.experts is not None and family.experts.biased,
        "sigmoid scores": family.experts is not None and family.experts.sigmoid,
        "corrected": family.experts is not None and family.experts.corrected,
        "weights as scored": family.experts is not None
        and not (family.experts.normalized or family.experts.sigmoid or family.experts.corrected),
        "shared expert with a gate": family.experts is not None and family.experts.shared_gate,
    }
    return [word for word, holds in facts.items() if holds] + [each.upper() for each in family.quantizations]


def test_every_family_has_a_row_that_says_what_its_data_says() -> None:
    table = rows()
    assert list(table) == sorted(FAMILIES)
    for name, family in FAMILIES.items():
        _, windows, norms, rest = table[name]
        assert windows == WINDOWS[family.sliding], name
        assert norms == norms_of(family), name
        assert [word for word in rest_of(family) if word not in rest] == [], name
        assert (rest == "-") == (not rest_of(family)), name
