"""Which files of a checkpoint's directory hold its weights, as transformers finds them, and how large they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from serinus.core.errors import ConfigError
from serinus.core.gguf_file import GGUF_LINK, GgufFile
from serinus.models.gguf_config import INTEGER_BITS

INDEX: Final = "model.safetensors.index.json"
"""Names the file of each tensor; files that it does not name are no part of the checkpoint."""
SINGLE_FILE: Final = "model.safetensors"
"""Where there is no index this is the checkpoint, whatever lies beside it."""
OTHER_FORMAT: Final = "consolidated*.safetensors"
"""The same weights once more, under names of the format that their maker uses."""


def file_of_each(folder: Path) -> Mapping[str, str]:
    """The file of each tensor, by the tensor's name. Raises ConfigError: missing, truncated or foreign files."""
    if (folder / INDEX).exists():
        return indexed_files(folder, check=True)
    files = sorted(folder.glob("*.safetensors"))
    if folder / SINGLE_FILE in files:
        files = [folder / SINGLE_FILE]
    else:
        files = [file for file in files if not fnmatch(file.name, OTHER_FORMAT)]
    if not files:
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        found = f"only {pickled[0]!r}, which is pickle and never loaded" if pickled else "no weight file"
        raise ConfigError(f"models: {folder} has {found}, expected {SINGLE_FILE}")
    pairs: dict[str, str] = {}
    for path in files:
        pairs.update(dict.fromkeys(_tensor_names(path), path.name))
    return pairs


def _tensor_names(path: Path) -> Sequence[str]:
    """Of all tensors in a file. Raises ConfigError: it is truncated, or no safetensors file."""
    try:
        with safe_open(path, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"models: {path} cannot be read ({error}), expected a complete safetensors file") from None


def indexed_files(folder: Path, *, check: bool = False) -> Mapping[str, str]:
    """The file of each tensor, as the index says; with `check` files must be there and whole. Raises ConfigError."""
    index = folder / INDEX
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = {str(k): str(v) for k, v in names.items()}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"models: {index} cannot be read ({error!r}), expected a weight_map") from None
    for file in sorted(set(pairs.values())):
        if "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise ConfigError(f"models: {index} names {file!r}, expected *.safetensors beside it")
        if check and not (folder / file).exists():
            raise ConfigError(f"models: {folder / file} is missing, expected it as {INDEX} names it")
        if check:
            _tensor_names(folder / file)
    return pairs


def file_bytes(folder: Path) -> int:
    """Of the weights in their files; of a GGUF file with two bytes for what is dequantized. 0 where there are none."""
    if (folder / GGUF_LINK).exists():
        tensors = GgufFile(folder / GGUF_LINK).tensors.values()
        kept = [t.tensor_type.name in INTEGER_BITS and len(t.shape) < 3 for t in tensors]  # experts are dequantized
        return sum(int(t.n_bytes if is_kept else 2 * t.n_elements) for t, is_kept in zip(tensors, kept, strict=True))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
