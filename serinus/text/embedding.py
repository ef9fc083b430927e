"""How a checkpoint makes embeddings of hidden states, as its files for sentence-transformers say. Nothing is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serinus.core.errors import ConfigError
from serinus.text.tokenizer import read_json, tokenizer_folder

_POOLINGS = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean", "cls_token": "cls", "cls": "cls"}
"""Names of sentence-transformers, and what SamplingParams.pooling calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingUse:
    """What is done with the last hidden states of a text."""

    refused: str = ""
    """Why no embeddings can be made here."""
    pooling: str = "last"
    """As SamplingParams has it."""
    normalized: bool = False
    """Whether its length is made 1."""


def load_embedding_use(path: str, revision: str | None) -> EmbeddingUse:
    """Read modules.json and the pooling beside it; a checkpoint without them is no embedding model.

    Raises ConfigError: `path` is neither a directory nor a hub id that answers, or a file is not what it should be.
    """
    folder = tokenizer_folder(path, revision)
    file = folder / "modules.json"
    if not file.is_file():
        return EmbeddingUse(refused="this one generates text and embeds none")
    kinds = {str(each.get("type", "")).rpartition(".")[2]: str(each.get("path", "")) for each in _modules(file)}
    if strange := sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"}):
        return EmbeddingUse(refused=f"this one has a module {strange[0]}, which is not supported")
    pooling = read_json(folder / kinds.get("Pooling", "") / "config.json") if "Pooling" in kinds else {}
    chosen = [name.removeprefix("pooling_mode_") for name, on in pooling.items() if on is True and "_mode_" in name]
    if isinstance(named := pooling.get("pooling_mode"), str):
        chosen = [named]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        expected = "pooling of the last token, of the first one or of the mean of all"
        return EmbeddingUse(refused=f"expected {expected}, this one has {', '.join(chosen) or 'none that is known'}")
    return EmbeddingUse(pooling=_POOLINGS[chosen[0]], normalized="Normalize" in kinds)


def _modules(file: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"text: {file} cannot be read: {error}") from error
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ConfigError(f"text: {file} holds {type(found).__name__}, expected a list of objects")
    return found
