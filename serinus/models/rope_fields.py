"""How positions rotate, as a config.json says it. No torch; `rope` makes the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from serinus.core.errors import ConfigError
from serinus.models.config_fields import ConfigFields

_KINDS_OF_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """How positions turn queries and keys."""

    theta: float = 10000.0
    """Base of the wavelengths."""
    kind: str = "default"
    """default, linear or llama3, made here; yarn, longrope or dynamic, made by transformers of `given`."""
    factor: float = 1.0
    """Stretch of long wavelengths (linear: of all)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_context / this are stretched wholly."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_context / this stay."""
    original_context: int = 8192
    """llama3: context the model was first trained on."""
    given: tuple[tuple[str, Any], ...] = ()
    """What the config says of kinds that transformers makes: names and values, sorted; lists as tuples."""
    rotated: float = 1.0
    """The share of each head's elements that turn, the first ones; the others stay as they are."""
    interleaved: bool = False
    """Which elements turn together: neighbours; else the first half with the second."""


def ropes_of(
    config: ConfigFields,
    theta: float,
    local_theta: float | None,
    *,
    rotated: float,
    interleaved: bool,
    scaling: Mapping[str, Any] | None = None,
) -> tuple[RopeSpec, RopeSpec | None]:
    """The rotation of FULL layers, and that of sliding layers where they have their own.

    Args:
        theta: base of the wavelengths where the config has none.
        local_theta: that of sliding layers; None = they have no rotation of their own.
        rotated: `partial_rotary_factor` where the config does not name it.
        interleaved: neighbours turn together where the config does not say.
        scaling: `rope_scaling` where the config has neither it nor `rope_parameters`.
    Raises ConfigError: fields are missing, wrong or unknown.
    """
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise config.fail(name, "an object")
    old = scaling if new is None and old is None else old
    old = {"rope_type": old["type"], **old} if old and "type" in old else old or {}  # wins, as in transformers
    theta, default = config.real("rope_theta", theta), RopeSpec(rotated=rotated, interleaved=interleaved)
    if local_theta is None:
        return _rope(config, default, {**(new or {}), **old}, theta), None
    by_kind = {name: (new or {}).get(name) or {} for name in _KINDS_OF_LAYERS}
    if (new and not set(new) <= set(_KINDS_OF_LAYERS)) or not all(isinstance(v, dict) for v in by_kind.values()):
        raise config.fail("rope_parameters", f"objects named {', '.join(_KINDS_OF_LAYERS)}")
    local = config.real("rope_local_base_freq", local_theta)
    return (
        _rope(config, default, {**by_kind["full_attention"], **old}, theta),
        _rope(config, default, by_kind["sliding_attention"], local),
    )


_FROM_TRANSFORMERS = {
    "dynamic": ("factor",),
    "longrope": ("attention_factor", "factor", "long_factor", "short_factor"),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim", "truncate"),
}
"""Kinds that transformers makes, and the fields that it reads."""


def _rope(config: ConfigFields, default: RopeSpec, given: Mapping[str, Any], default_theta: float) -> RopeSpec:
    values = ConfigFields(given, {}, config.source)
    kind = values.get("rope_type", values.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its first name, in the first Phi-3 configs
    rotated = values.real("partial_rotary_factor", config.real("partial_rotary_factor", default.rotated))
    if rotated > 1.0:
        raise config.fail("partial_rotary_factor", "at most 1")
    if values.get("llama_4_scaling_beta"):
        raise values.fail("llama_4_scaling_beta", "0 or none: no family here scales queries by their positions")
    rope = RopeSpec(
        theta=values.real("rope_theta", default_theta), kind=kind, rotated=rotated,
        interleaved=config.flag("rope_interleave", default.interleaved),
    )  # fmt: skip
    if kind == "default":
        return rope
    if kind == "linear":
        return replace(rope, factor=values.real("factor", 0.0))
    if kind == "llama3":
        return replace(
            rope,
            factor=values.real("factor", 0.0),
            low_freq_factor=values.real("low_freq_factor", 0.0),
            high_freq_factor=values.real("high_freq_factor", 0.0),
            original_context=values.whole("original_max_position_embeddings", 0),
        )
    if kind in _FROM_TRANSFORMERS:
        context = config.whole("max_position_embeddings")
        named = values.get("original_max_position_embeddings", config.get("original_max_position_embeddings", context))
        found = [(name, _plain(values.get(name))) for name in _FROM_TRANSFORMERS[kind] if values.get(name) is not None]
        missing = {"factor"} if kind == "dynamic" else {"long_factor", "short_factor"} if kind == "longrope" else set()
        if missing - {name for name, _ in found}:
            raise config.fail("rope_parameters", f"with {' and '.join(sorted(missing))}")
        if kind == "yarn" and values.get("factor") is None:
            found.append(("factor", None))
        return replace(rope, original_context=named, given=tuple(sorted(found)))
    raise ConfigError(
        f"models: {config.source}: rope type {kind!r} is not known, expected default, linear, llama3 or one of"
        f" {', '.join(_FROM_TRANSFORMERS)}"
    )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
