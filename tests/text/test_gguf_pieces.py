"""A GGUF file with a SentencePiece vocabulary encodes texts as SentencePiece itself does (piece_cases.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serinus.text import Tokenizer, load_tokenizer

from .piece_cases import FILE

CASES = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folders of GGUF files are kept."""
    monkeypatch.setenv("HOME", str(tmp_path))


def written(folder: Path, architecture: str, **more: Any) -> Tokenizer:
    """The tokenizer of a file with these pieces and no other tensors than a file must have; `more`: of its metadata."""
    import gguf

    file = folder / f"{architecture}.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8}
    for name, value in {**sizes, "attention.head_count": 1}.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    pieces, scores, types = zip(*CASES["pieces"], strict=True)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece.encode() for piece in pieces])
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in more.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(pieces), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return load_tokenizer(str(file))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "more", "ids"),
    [
        ("llama", {}, "ids with a space before"),
        ("llama", {"add_space_prefix": False}, "ids without"),
        ("gemma", {"add_space_prefix": False}, "ids without"),
        ("gemma2", {"add_space_prefix": False}, "ids without"),
        ("gemma3", {"add_space_prefix": False}, "ids without"),
    ],
)
def test_texts_have_the_tokens_of_sentencepiece(
    tmp_path: Path, architecture: str, more: dict[str, bool], ids: str
) -> None:
    tokenizer = written(tmp_path, architecture, **more)
    assert tokenizer.vocab_size == len(CASES["pieces"])
    for text, expected in zip(CASES["texts"], CASES[ids], strict=True):
        found = tokenizer.encode(text, add_special_tokens=False)
        assert found == expected, text
        assert tokenizer.decode(found) == text.replace("▁", " ")


def test_it_begins_with_its_bos_where_the_file_does_not_say_otherwise(tmp_path: Path) -> None:
    assert written(tmp_path, "llama").encode("a")[0] == 1
    (tmp_path / "other").mkdir()
    assert written(tmp_path / "other", "llama", add_bos_token=False).encode("a")[0] != 1


def test_marks_of_a_chat_are_one_token_each_and_a_space_stands_behind_them(tmp_path: Path) -> None:
    """As in llama.cpp, and in the tokenizer.json of Llama 2 and the first Mistral."""
    tokenizer = written(tmp_path, "llama")
    user = tokenizer.encode("user", add_special_tokens=False)
    assert tokenizer.encode("<|im_start|>user<|im_end|>", add_special_tokens=False) == [3, *user, 4]
    assert tokenizer.encode("</s>user", add_special_tokens=False) == [2, *user]
