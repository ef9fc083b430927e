"""What a checkpoint says of its use: sampling defaults of generation_config.json, and tokens that end an answer.

Knows nothing of requests. A few small files are read; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serinus.core.errors import BadSampling, ConfigError
from serinus.core.sampling import SamplingParams
from serinus.text.tokenizer import read_json, special_texts, tokenizer_folder

_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""The fields that vLLM and SGLang take over; others say how transformers searches."""
_NONE = ("none", "vllm")
"""Choices without a file; `vllm` is vLLM's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """What a generation_config.json says."""

    eos_ids: tuple[int, ...] = ()
    """Token ids that end an answer."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Fields of SamplingParams for requests that do not name them."""
    source: str = ""
    """Path of the file; empty = there is none."""


def load_generation_config(checkpoint: str, choice: str) -> GenerationConfig:
    """Read generation_config.json.

    Args:
        checkpoint: directory of the model; empty = it has none.
        choice: auto = the file of the checkpoint, where there is one; none (or vllm) = no file; or a folder with one.
    Raises ConfigError: no such file in the folder, no JSON object, or a value that no request could have.
    """
    if choice in _NONE or (choice == "auto" and not checkpoint):
        return GenerationConfig()
    file = Path(checkpoint if choice == "auto" else choice) / "generation_config.json"
    if not file.is_file():
        if choice == "auto":
            return GenerationConfig()
        raise ConfigError(f"text: --generation-config is {choice!r}, expected auto, none or a folder with {file.name}")
    given = read_json(file)
    defaults = {name: given[name] for name in _DEFAULTS if given.get(name) is not None}
    if defaults.get("top_k") == 0:
        defaults["top_k"] = -1  # transformers' word for all
    try:
        SamplingParams(**defaults)
    except BadSampling as err:
        raise ConfigError(f"text: {file}: {err} (--generation-config none ignores the file)") from err
    return GenerationConfig(eos_ids=_ids(given.get("eos_token_id")), defaults=defaults, source=str(file))


def _ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id`: an integer, a list of them, or nothing."""
    values = value if isinstance(value, list) else [value]
    return tuple(each for each in values if isinstance(each, int) and not isinstance(each, bool) and each >= 0)


def tokenizer_eos_ids(path: str, revision: str | None = None) -> tuple[int, ...]:
    """The id of the tokenizer's `eos_token`, where it names one: fine-tunes may end answers with another token than the
    model's config says (ChatML). `path`: a directory or a hub id.

    Cost: two small files; tokenizer.json too (100 ms for 150k tokens) where tokenizer_config.json lists no ids.
    """
    folder = tokenizer_folder(path, revision)
    config = read_json(folder / "tokenizer_config.json")
    text = special_texts(folder, config).get("eos_token")
    if text is None:
        return ()
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        if isinstance(token, dict) and token.get("content") == text and str(token_id).isdigit():
            return (int(token_id),)
    described = read_json(folder / "tokenizer.json")
    for token in described.get("added_tokens") or ():
        if token["content"] == text:
            return (int(token["id"]),)
    vocab = (described.get("model") or {}).get("vocab") or ()
    if isinstance(vocab, dict):
        return (int(vocab[text]),) if text in vocab else ()
    return tuple(index for index, piece in enumerate(vocab) if piece[0] == text)
