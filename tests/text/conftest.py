"""Tokenizers that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from serinus.testing.small_tokenizers import make_byte_tokenizer, make_piece_tokenizer
from serinus.text import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_tokenizer(tmp_path_factory.mktemp("byte"))


@pytest.fixture(scope="session")
def piece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_piece_tokenizer(tmp_path_factory.mktemp("piece"))


@pytest.fixture(scope="session")
def tokenizer(byte_folder: Path) -> Tokenizer:
    return load_tokenizer(str(byte_folder))
