"""docs/settings.md, made from the settings themselves. `serinus doctor --settings-doc` prints it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from serinus.core.config import ConfigTree, RouterConfig, ServeConfig, UpConfig, groups_of, roles_of, settings_in
from serinus.core.setting import KINDS, Setting

_HEAD = """# Settings

Every setting is a flag, an environment variable and a key of a settings file (`--config FILE`, YAML or TOML, the flag
without its dashes). Flags win over variables, variables over the file. A wrong value is refused before anything starts.

This page is made by `serinus doctor --settings-doc > docs/settings.md`; a test compares it with the code.
"""
_ROLES = """**Engines of one role.**

What holds for all engines may have another value in prefill engines, or in decode engines (with `--prefill 0`: in those
that do both). A switch that is on for all goes off for a role by `--no-prefill-...`, or by `false` in a variable or a
file. Pages travel with their stamps: engines of both roles have a canary with the same `--kv-canary-real-data`, or none
has one.
`--mem-fraction-static` is what the engines of one device take together; given for a role, what those of the role do.
"""
_PAGES: tuple[tuple[str, str, type[ConfigTree], frozenset[str]], ...] = (
    ("serinus serve MODEL", "One engine and its HTTP server.", ServeConfig, frozenset()),
    (
        "serinus up MODEL",
        "The settings of `serinus serve` hold for every engine; besides, and with other defaults:",
        UpConfig,
        frozenset({"model", "memory", "sched", "pd", "parallel", "kernels"}),
    ),
    ("serinus router", "The router alone.", RouterConfig, frozenset()),
)


def _shown(setting: Setting, default: Any) -> str:
    if default is None or default in ("", ()):
        return ""
    if KINDS[setting.kind][0] is bool:
        return "on" if default else "off"
    return f"`{default}`"


def _values(setting: Setting) -> str:
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    kind, _ = KINDS[setting.kind]
    name = {str: "text", int: "integer", float: "number", bool: "switch", tuple: "texts"}[kind]
    if setting.low is not None and setting.high is not None:
        return f"{name}, {setting.low} to {setting.high}"
    return name if setting.low is None else f"{name}, at least {setting.low}"


def _rows(tree: type[ConfigTree], name: str) -> Iterator[str]:
    defaults = getattr(tree(), name)
    for setting in (setting for owner, setting in settings_in(tree) if owner == name):
        flags = ", ".join(f"`{flag}`" for flag in (setting.flag, *setting.aliases))
        default = _shown(setting, getattr(defaults, setting.name))
        yield f"| {flags} | `{setting.env}` | {_values(setting)} | {default} | {setting.help} |"


def _role_rows(tree: type[ConfigTree]) -> Iterator[str]:
    """One row for each setting, with the flags of all roles."""
    twins = [[setting for owner, setting in settings_in(tree) if owner == role] for role in roles_of(tree)]
    for settings in zip(*twins, strict=True):
        flags = ", ".join(f"`{setting.flag}`" for setting in settings)
        variables = ", ".join(f"`{setting.env}`" for setting in settings)
        yield f"| {flags} | {variables} | {_values(settings[0])} | that of all |"


def settings_markdown() -> str:
    """The text of docs/settings.md."""
    lines = [_HEAD]
    for title, about, tree, left_out in _PAGES:
        lines += [f"## `{title}`", "", about, ""]
        for name, group in groups_of(tree):
            if name in left_out:
                continue
            lines += [f"**{inspect.cleandoc(group.__doc__ or name)}**", ""]
            lines += ["| flag | variable | values | default | meaning |", "|---|---|---|---|---|"]
            lines += [*_rows(tree, name), ""]
        if roles_of(tree):
            lines += [_ROLES, "| flag | variable | values | default |", "|---|---|---|---|", *_role_rows(tree), ""]
    return "\n".join(lines)
