"""From what the user typed to a local directory: a path stays, a hub id is downloaded. Never pickle, never code."""

from __future__ import annotations

import re
from pathlib import Path

from serinus.core.errors import ConfigError

__all__ = ["resolve"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model"]


def resolve(model_path: str, revision: str | None = None) -> str:
    """The local directory of `model_path`, downloading a hub id where it is not cached yet.

    Only weights as safetensors and texts (configs, tokenizer) are fetched.
    Raises: ConfigError where there is neither such a directory nor such a model.
    Cost: nothing for a directory; a hub id asks the network and may download the weights.
    """
    if model_path and Path(model_path).is_dir():
        return model_path
    if model_path and Path(model_path).exists():
        raise ConfigError(f"models: {model_path!r} is a file, expected a directory or a hub id such as org/name")
    if not _HUB_ID.fullmatch(model_path) or model_path.startswith((".", "/")):
        raise ConfigError(f"models: no directory {model_path!r}, expected one, or a hub id such as org/name")
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model_path, revision=revision, allow_patterns=_PATTERNS))
    except (OSError, ValueError) as error:  # hub errors of every kind derive from these two
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"models: {model_path!r} is no local directory and could not be fetched from the hub ({first}), "
            "expected a directory or a reachable hub id such as org/name"
        ) from error
