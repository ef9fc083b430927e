"""Prompts for a benchmark: random ones, ones that share prefixes, and those of a ShareGPT file; the same for a seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from serinus.core.errors import ConfigError
from serinus.core.rng import Rng

DATASETS = ("random", "random-ids", "generated-shared-prefix", "sharegpt")
"""The names that --dataset-name takes."""
_SHAREGPT_TOKENS_MAX = 1024


class TextMaker(Protocol):
    """What is asked of a tokenizer here."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request to be sent."""

    ids: tuple[int, ...] = ()
    """Token ids, where it goes out as ids."""
    text: str | None = None
    """Text, where it goes out as text."""
    token_count: int
    """Length of the prompt."""
    output_tokens: int
    """Tokens to ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """Which prompts; names as in SGLang's benchmark."""

    name: str = "random"
    """Kind of the prompts, one of DATASETS."""
    path: str = ""
    """The JSON file that sharegpt reads."""
    count: int = 1000
    """Prompts (generated-shared-prefix has groups times prompts instead)."""
    input_tokens: int = 1024
    output_tokens: int = 1024
    range_ratio: float = 0.0
    """Lengths are drawn from [ratio * length, length]; 1 = all of one length."""
    sharegpt_output_tokens: int | None = None
    """Instead of the length of the recorded answer."""
    group_count: int = 64
    group_prompts: int = 16
    system_tokens: int = 2048
    question_tokens: int = 128
    group_output_tokens: int = 256
    seed: int = 42


@dataclass(frozen=True, slots=True)
class _Maker:
    """Draws ids and turns them into prompts."""

    rng: Rng
    vocab_size: int
    texts: TextMaker | None
    as_text: bool

    def ids(self, count: int) -> list[int]:
        # Low ids are special tokens in most vocabularies (end of sequence among them): stay clear of them.
        low = min(256, self.vocab_size // 4)
        return [self.rng.randrange(low, self.vocab_size) for _ in range(count)]

    def prompt(self, ids: list[int], output_tokens: int) -> Prompt:
        if not self.as_text:
            return Prompt(ids=tuple(ids), token_count=len(ids), output_tokens=output_tokens)
        assert self.texts is not None, "bench: text prompts without a tokenizer"
        text = self.texts.decode(ids)
        again = self.texts.encode(text)[: len(ids)]  # decoding and encoding rarely give the same number of tokens
        text = self.texts.decode(again)
        return Prompt(text=text, token_count=len(again), output_tokens=output_tokens)


def make_prompts(spec: DatasetSpec, *, vocab_size: int, texts: TextMaker | None, as_text: bool) -> list[Prompt]:
    """All prompts of a run, in the order they are sent.

    Args:
        vocab_size: ids are below it.
        texts: a tokenizer; needed for texts and for sharegpt.
        as_text: send texts rather than ids.
    Raises ConfigError where the dataset is unknown, needs a tokenizer or a file that is not there.
    """
    if as_text and texts is None:
        raise ConfigError("bench: this backend and dataset need texts, expected --tokenizer PATH to make them with")
    maker = _Maker(Rng(spec.seed), vocab_size, texts, as_text)
    makers: dict[str, Callable[[DatasetSpec, _Maker], list[Prompt]]] = {
        "random": _random,
        "random-ids": _random,
        "generated-shared-prefix": _shared_prefix,
        "sharegpt": _sharegpt,
    }
    if spec.name not in makers:
        raise ConfigError(f"bench: --dataset-name is {spec.name!r}, expected one of {', '.join(DATASETS)}")
    prompts = makers[spec.name](spec, maker)
    if not prompts:
        raise ConfigError(f"bench: {spec.name} has no usable prompt, expected at least one")
    return prompts


def _random(spec: DatasetSpec, maker: _Maker) -> list[Prompt]:
    def length(full: int) -> int:
        return maker.rng.randint(max(1, int(full * spec.range_ratio)), full)

    sizes = [(length(spec.input_tokens), length(spec.output_tokens)) for _ in range(spec.count)]
    return [maker.prompt(maker.ids(size), output) for size, output in sizes]


def _shared_prefix(spec: DatasetSpec, maker: _Maker) -> list[Prompt]:
    prompts: list[Prompt] = []
    for _ in range(spec.group_count):
        system = maker.ids(spec.system_tokens)
        for _ in range(spec.group_prompts):
            prompts.append(maker.prompt(system + maker.ids(spec.question_tokens), spec.group_output_tokens))
    maker.rng.shuffle(prompts)
    return prompts


def _sharegpt(spec: DatasetSpec, maker: _Maker) -> list[Prompt]:
    if maker.texts is None:
        raise ConfigError("bench: sharegpt needs a tokenizer to count with, expected --tokenizer PATH")
    if not spec.path:
        raise ConfigError("bench: sharegpt needs a file, expected --dataset-path FILE.json")
    try:
        records: Any = json.loads(Path(spec.path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"bench: cannot read --dataset-path {spec.path!r} ({error}), expected ShareGPT JSON"
        ) from error
    turns = [_first_turns(record) for record in records if isinstance(record, dict)]
    usable = [turn for turn in turns if turn is not None]
    maker.rng.shuffle(usable)
    prompts: list[Prompt] = []
    for question, reply in usable:
        ids = maker.texts.encode(question)
        output = spec.sharegpt_output_tokens or len(maker.texts.encode(reply))
        if (
            len(ids) < 2
            or output < 2
            or len(ids) > _SHAREGPT_TOKENS_MAX
            or len(ids) + output > 2 * _SHAREGPT_TOKENS_MAX
        ):
            continue
        text = question if maker.as_text else None
        prompts.append(Prompt(ids=tuple(ids), text=text, token_count=len(ids), output_tokens=output))
        if len(prompts) == spec.count:
            break
    return prompts


def _first_turns(record: dict[str, Any]) -> tuple[str, str] | None:
    """Question and answer of a conversation; None where it has no two turns of text."""
    turns = record.get("conversations", record.get("conversation", []))
    texts = [turn.get("value", "") for turn in turns[:2] if isinstance(turn, dict)]
    return (texts[0], texts[1]) if len(texts) == 2 and all(isinstance(text, str) for text in texts) else None
