"""ConfigFields: a config.json with overrides on top; every read is checked, every error names file and field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serinus.core.errors import ConfigError


class ConfigFields:
    """The fields of one JSON object."""

    def __init__(self, values: Mapping[str, Any], overrides: Mapping[str, Any], source: Path) -> None:
        self.values = {**values, **overrides}
        self.source = source

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or `default` where it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def fail(self, name: str, expected: str) -> ConfigError:
        """The error about a field, for the caller to raise."""
        shown = repr(self.values[name])[:120] if name in self.values else "nothing"
        return ConfigError(f"models: {self.source}: field {name!r} is {shown}, expected {expected}")

    def whole(self, name: str, default: int | None = None, low: int = 1, high: int | None = None) -> int:
        """The integer in a field. Raises ConfigError: it is missing, no integer, below `low` or above `high`."""
        value = self.get(name, default)
        most = value if high is None else high
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= most:
            raise self.fail(name, f"an integer, at least {low}" + ("" if high is None else f" and at most {high}"))
        return value

    def real(self, name: str, default: float) -> float:
        """The number in a field. Raises ConfigError: it is missing, no number, or not above 0 and finite."""
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.fail(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """The truth value in a field. Raises ConfigError: it is neither true nor false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def given(self, name: str, default: Any) -> Any:
        """The value; `default` only where it is absent: a null that was written down stays None."""
        return self.values.get(name, default)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ConfigError where there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"models: {path} is missing, expected the checkpoint's {path.name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"models: {path} cannot be read ({error}), expected a JSON object") from None
    if not isinstance(values, dict):
        raise ConfigError(f"models: {path} holds a {type(values).__name__}, expected a JSON object")
    return values
