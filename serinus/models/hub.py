"""From what the user typed to a local directory: a path stays, a GGUF file gets one, a hub id is downloaded. No
pickle, no code."""

from __future__ import annotations

import re
from pathlib import Path

from serinus.core.errors import ConfigError
from serinus.core.gguf_file import is_gguf
from serinus.models.gguf_config import unpacked
from serinus.models.weight_files import INDEX, OTHER_FORMAT, SINGLE_FILE, indexed_files

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_EXPECTED = "a directory with config.json, a GGUF file (*.gguf) or a hub id such as org/name"
_TEXTS = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]


def resolve(model_path: str, revision: str | None = None) -> str:
    """The local directory of `model_path`, downloading a hub id where it is not cached yet; of a GGUF file the one
    that is kept for it.

    Only texts (configs, tokenizer) and the safetensors files that are loaded are fetched: a repository may hold the
    same weights once more in another form.
    Raises: ConfigError where there is neither such a directory nor such a model, and for a GGUF file that is not read.
    Cost: nothing for a directory; a hub id asks the network and may download the weights.
    """
    check_path(model_path)
    if Path(model_path).is_dir():
        return model_path
    if is_gguf(model_path):
        return unpacked(Path(model_path))
    try:
        return _fetched(model_path, revision)
    except (OSError, ValueError) as error:  # hub errors of every kind derive from these two
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"models: {model_path!r} is no local directory and could not be fetched from the hub ({first}), "
            f"expected {_EXPECTED} that can be reached"
        ) from error


def check_path(model_path: str) -> None:
    """Refuse what is no checkpoint of this machine and cannot be a hub id. Raises ConfigError. Cost: looks at two
    names; no file is read and the hub is not asked."""
    path, wrong = Path(model_path), ""
    if model_path and path.is_dir():
        if not (path / "config.json").is_file():
            wrong = f"the directory {model_path!r} has no config.json"
    elif is_gguf(model_path):
        pass
    elif model_path and path.exists():
        wrong = f"{model_path!r} is a file"
    elif path.suffix == ".gguf":
        wrong = f"no file {model_path!r}"
    elif not _HUB_ID.fullmatch(model_path) or model_path.startswith((".", "/")):
        wrong = f"no directory {model_path!r}"
    if wrong:
        raise ConfigError(f"models: {wrong}, expected {_EXPECTED}")


def _fetched(hub_id: str, revision: str | None) -> str:
    """The folder of a hub id. Its texts come first: an index names the files of weights. Raises OSError, ValueError."""
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=_TEXTS))
    wanted = sorted(set(indexed_files(folder).values())) if (folder / INDEX).exists() else [SINGLE_FILE]
    folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=[*_TEXTS, *wanted]))
    if wanted == [SINGLE_FILE] and not (folder / SINGLE_FILE).exists():
        patterns = [*_TEXTS, "*.safetensors"]
        snapshot_download(hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=[OTHER_FORMAT])
    return str(folder)
