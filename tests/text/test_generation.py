"""What a checkpoint says of its own use is read, or refused with the name of the file and of the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serinus.core.errors import ConfigError
from serinus.testing.small_tokenizers import make_byte_tokenizer, make_piece_tokenizer
from serinus.text import GenerationConfig, load_generation_config, load_tokenizer, tokenizer_eos_ids

QWEN = {"eos_token_id": [5, 4], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}


def write(folder: Path, value: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(value))
    return str(folder)


def test_the_file_of_the_checkpoint_is_read_by_itself(tmp_path: Path) -> None:
    found = load_generation_config(write(tmp_path, QWEN), "auto")
    assert found.eos_ids == (5, 4)
    assert found.defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert found.source == str(tmp_path / "generation_config.json")


@pytest.mark.parametrize("choice", ["none", "vllm"])
def test_the_file_can_be_left_out(tmp_path: Path, choice: str) -> None:
    assert load_generation_config(write(tmp_path, QWEN), choice) == GenerationConfig()


def test_a_checkpoint_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert load_generation_config(str(tmp_path), "auto") == load_generation_config("", "auto") == GenerationConfig()


def test_another_folder_may_have_it(tmp_path: Path) -> None:
    other = write(tmp_path / "other", {"max_new_tokens": 99, "min_p": 0.1, "repetition_penalty": 1.05, "top_k": 0})
    found = load_generation_config(write(tmp_path, QWEN), other)
    assert found.defaults == {"max_new_tokens": 99, "min_p": 0.1, "repetition_penalty": 1.05, "top_k": -1}
    assert found.eos_ids == ()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"temperature": -1}, "temperature: got -1, expected 0"),
        ({"top_p": "all"}, "top_p: got 'all'"),
        ([], "holds list, expected a JSON object"),
    ],
)
def test_a_file_that_no_request_could_follow_is_refused_at_the_start(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        load_generation_config(write(tmp_path, value), "auto")
    assert "generation_config.json" in str(raised.value)


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected auto, none or a folder with"):
        load_generation_config("", str(tmp_path))


@pytest.mark.parametrize(("make", "eos"), [(make_byte_tokenizer, "<eos>"), (make_piece_tokenizer, "</s>")])
def test_the_eos_token_of_a_tokenizer_is_found_without_loading_it(tmp_path: Path, make: Any, eos: str) -> None:
    folder = make(tmp_path)
    (token_id,) = tokenizer_eos_ids(str(folder))
    assert load_tokenizer(str(folder)).decode([token_id], skip_special_tokens=False) == eos
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "added_tokens_decoder": {"7": {"content": "x"}, "77": {"content": eos}}}))
    assert tokenizer_eos_ids(str(folder)) == (77,)
    file.write_text(json.dumps({**config, "eos_token": "he"}))  # a plain entry of the vocabulary
    assert tokenizer_eos_ids(str(folder)) == (() if eos == "</s>" else (257,))
    file.write_text(json.dumps({**config, "eos_token": None}))
    assert tokenizer_eos_ids(str(folder)) == ()
