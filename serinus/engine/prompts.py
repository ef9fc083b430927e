"""What `LLM.generate` takes as prompts: texts, token ids, and the dicts of vLLM; each refusal names what was given.

Knows no tokenizer and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.core.bounds import is_unicode
from serinus.core.errors import BadRequest

Prompt = str | Sequence[int] | NDArray[np.integer[Any]] | Mapping[str, Any]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; a dict may have a `cache_salt` too."""

_EXPECTED = "a text, a list of token ids, {'prompt': a text} or {'prompt_token_ids': token ids}, or a list of these"
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_SALT_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPrompt:
    """One prompt of a call: a text, ids, or both (then the text is only shown)."""

    text: str | None = None
    """The prompt as text."""
    ids: NDArray[np.int64] | None = None
    """The prompt as token ids; None = the text is to be tokenized."""
    cache_salt: str = ""
    """It shares KV only with prompts of the same salt."""


def given_prompts(prompts: Prompt | Sequence[Prompt]) -> list[GivenPrompt]:
    """One GivenPrompt for each prompt. Raises BadRequest for what is none, with its place."""
    if isinstance(prompts, (str, Mapping)) or _is_ids(prompts):
        return [_given("prompts", prompts)]
    if not isinstance(prompts, (list, tuple, np.ndarray)):
        raise BadRequest("prompts", prompts, _EXPECTED)
    if not len(prompts):
        raise BadRequest("prompts", prompts, "at least one prompt")
    return [_given(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]


def _is_ids(value: Any) -> bool:
    """Whether a value is one row of numbers, which is never a list of prompts."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype != object
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], (int, float, np.number))


def _given(where: str, prompt: Any) -> GivenPrompt:
    if isinstance(prompt, str):
        return GivenPrompt(text=prompt)
    if not isinstance(prompt, Mapping):
        return GivenPrompt(ids=_ids(where, prompt))
    unknown = [key for key, value in prompt.items() if key not in _KEYS and value is not None]
    if unknown:
        raise BadRequest(f"{where}[{unknown[0]!r}]", prompt[unknown[0]], f"one of the keys {', '.join(_KEYS)}")
    text, ids, salt = (prompt.get(key) for key in _KEYS)
    if text is None and ids is None:
        raise BadRequest(where, dict(prompt), "a prompt or prompt_token_ids in it")
    if text is not None and not isinstance(text, str):
        raise BadRequest(f"{where}['prompt']", text, "a text")
    if salt is not None and not (isinstance(salt, str) and len(salt) <= _SALT_MAX and is_unicode(salt)):
        raise BadRequest(f"{where}['cache_salt']", salt, f"a text of at most {_SALT_MAX} characters, valid Unicode")
    row = None if ids is None else _ids(f"{where}['prompt_token_ids']", ids)
    return GivenPrompt(text=text, ids=row, cache_salt=salt or "")


def _ids(where: str, value: Any) -> NDArray[np.int64]:
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise BadRequest(where, value, _EXPECTED)
    if not len(value):
        raise BadRequest(where, value, "at least one token")
    try:
        row = np.asarray(value)
    except ValueError as err:  # lists of different lengths
        raise BadRequest(where, value, "token ids, as integers") from err
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise BadRequest(where, value, "token ids, as integers")
    return row.astype(np.int64)
