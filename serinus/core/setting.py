"""Setting: how one field of a dataclass becomes a flag, an environment variable, a key of a file and a row of the docs.

Knows no setting itself (`core/settings.py` has them), nor where values come from (`core/config.py`).
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from typing import Any

from serinus.core.errors import ConfigError

KINDS: dict[str, tuple[type, bool]] = {
    "str": (str, False),
    "str | None": (str, True),
    "int": (int, False),
    "int | None": (int, True),
    "float": (float, False),
    "float | None": (float, True),
    "bool": (bool, False),
    "tuple[str, ...]": (tuple, False),
}
"""Annotation of a field -> (type, whether None is allowed). Other annotations are no settings."""

_EXPECTED = {int: "an integer", float: "a number", str: "a text", bool: "true or false", tuple: "a list of texts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting as the command line, the environment and the docs see it."""

    name: str
    """Name of the dataclass field."""
    kind: str
    """Its annotation, a key of KINDS."""
    default: Any
    """The value without a flag, variable or file."""
    flag: str
    """SGLang's name where it has one."""
    aliases: tuple[str, ...]
    """Other names of the flag, vLLM's among them."""
    inverse: tuple[str, ...]
    """Flags that switch a bool setting off."""
    choices: tuple[str, ...]
    """Allowed texts; empty = any."""
    low: float | None
    """The smallest number allowed."""
    high: float | None
    """The largest number allowed."""
    metavar: str
    """What the help calls the value."""
    help: str
    """One sentence for people."""
    role: str = ""
    """prefill or decode, where it holds for engines of that role only; else empty."""

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return "SERINUS_" + self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def key(self) -> str:
        """Key in a settings file."""
        return self.flag.removeprefix("--")


def setting(
    default: Any,
    help: str,
    *aliases: str,
    flag: str = "",
    inverse: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    metavar: str = "",
) -> Any:
    """A dataclass field that is a setting; `flag` is only given where it is not the field's own name."""
    metadata = {
        "flag": flag,
        "aliases": aliases,
        "inverse": inverse,
        "choices": choices,
        "low": low,
        "high": high,
        "metavar": metavar,
        "help": help,
    }
    return field(default=default, metadata=metadata)


def _described(item: Field[Any]) -> Setting:
    meta = dict(item.metadata)
    flag = meta.pop("flag") or "--" + item.name.replace("_", "-")
    assert item.default is not MISSING, f"core: setting {item.name} has no default, expected one"
    return Setting(name=item.name, kind=str(item.type), default=item.default, flag=flag, **meta)


@cache
def _settings_of(group: type) -> tuple[Setting, ...]:
    return tuple(map(_described, fields(group)))


def settings_of(group: type) -> tuple[Setting, ...]:
    """The settings of one group (a dataclass of this file), in order."""
    return _settings_of(group)


def of_role(setting: Setting, role: str) -> Setting:
    """The same setting for engines of one role only: `--kv-canary` as `--prefill-kv-canary`."""

    def named(flag: str) -> str:
        return f"--{role}-{flag.removeprefix('--')}"

    flag = named(setting.flag)
    inverse = tuple(map(named, setting.inverse))
    if KINDS[setting.kind][0] is bool:
        inverse += (f"--no-{flag.removeprefix('--')}",)
    return replace(
        setting,
        default=None,
        flag=flag,
        aliases=tuple(map(named, setting.aliases)),
        inverse=inverse,
        help=f"{setting.flag} of {role} engines only; default: as {setting.flag}",
        role=role,
    )


def check_value(setting: Setting, value: Any) -> None:
    """Raise ConfigError unless `value` has the setting's type and lies in its range."""
    kind, optional = KINDS[setting.kind]
    if value is None and optional:
        return
    right = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
    if not right or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"config: {setting.flag} is {value!r}, expected {_EXPECTED[kind]}")
    if setting.choices and value not in setting.choices:
        raise ConfigError(f"config: {setting.flag} is {value!r}, expected one of {', '.join(setting.choices)}")
    if setting.low is not None and not value >= setting.low:
        raise ConfigError(f"config: {setting.flag} is {value}, expected at least {setting.low}")
    if setting.high is not None and not value <= setting.high:
        raise ConfigError(f"config: {setting.flag} is {value}, expected at most {setting.high}")


def check_fields(group: Any) -> None:
    """Check every field of a group; the `__post_init__` of all of them."""
    for setting in settings_of(type(group)):
        check_value(setting, getattr(group, setting.name))
