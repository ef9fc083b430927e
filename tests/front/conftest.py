"""Tokenizers and a front that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serinus.front import FrontSettings
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import RunningFront, running_front
from serinus.testing.small_tokenizers import make_byte_tokenizer
from serinus.text import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_tokenizer(tmp_path_factory.mktemp("byte"))


@pytest.fixture
def new_endpoint(tmp_path: Path) -> Callable[[], str]:
    """A fresh ipc address each time."""
    count = iter(range(1000))
    return lambda: f"ipc://{tmp_path}/e{next(count)}"


@pytest.fixture(scope="module")
def front(byte_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    """One front for a whole file; its engine answers at once."""
    folder = tmp_path_factory.mktemp("front")
    engine = FakeEngine(endpoint=f"ipc://{folder}/engine", vocab_size=267, context_length=256)
    settings = FrontSettings(
        model_path=str(byte_folder), served_model_name="canary", engine="fake-0", router_secrets=("a router's",)
    )
    with running_front(settings, engine) as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer(byte_folder: Path) -> Tokenizer:
    return load_tokenizer(str(byte_folder))
