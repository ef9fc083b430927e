"""The model all engine benchmarks share: Qwen3 shape, 12 layers of 1024, 16/8 heads of 128, vocab 32000; 221M, bf16.
And the shapes of Qwen3's two smallest, with random weights."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import serinus.ranks.build
from serinus.models import Model, load_model
from serinus.models.small_checkpoints import make_checkpoint

__all__ = ["checkpoint", "checkpoint_221m", "one_model"]

_FOLDER = Path(__file__).parent / "model-221m"
_QWEN3: dict[str, dict[str, int]] = {
    "0.6b": {"hidden": 1024, "intermediate": 3072},
    "1.7b": {"hidden": 2048, "intermediate": 6144},
}


def checkpoint_221m(folder: str | Path = "") -> Path:
    """Its directory; made (442 MB, random weights) where it is not there."""
    sizes = {"hidden": 1024, "intermediate": 3072, "layers": 12, "heads": 16, "kv_heads": 8, "head_size": 128}
    return _made_elsewhere(Path(folder or _FOLDER), **sizes, vocab=32000, context=4096, tied=True, dtype="bfloat16")


def checkpoint(name: str, folder: Path) -> Path:
    """One of these shapes below a directory: 221m, or Qwen3's 0.6b or 1.7b; made where it is not there."""
    if name == "221m":
        return checkpoint_221m(folder / name)
    return _made_elsewhere(
        folder / name, **_QWEN3[name], layers=28, heads=16, kv_heads=8, head_size=128, vocab=151936, context=4096,
        tied=True, dtype="bfloat16", tokenizer=False,
    )  # fmt: skip


def _made_elsewhere(path: Path, **shape: Any) -> Path:
    """A Qwen3 checkpoint, made where it is not there by a process of its own: transformers, which writes it, and the
    weights in fp32 that it begins with, are no memory of an engine that is measured here."""
    if not (path / "config.json").exists():
        maker = multiprocessing.get_context("spawn").Process(target=make_checkpoint, args=(path, "qwen3"), kwargs=shape)
        maker.start()
        maker.join()
        assert maker.exitcode == 0, f"benchmark: {path} was not made, exit code {maker.exitcode}"
    return path


@contextmanager
def one_model() -> Iterator[None]:
    """Engines that are built meanwhile, of one checkpoint, have the weights of the first of them: where weights lie
    makes one engine up to 4 % slower than another."""
    loaded = list[Model]()

    def load(*given: Any, **named: Any) -> Model:
        if not loaded:
            loaded.append(load_model(*given, **named))
        return loaded[0]

    with patch.object(serinus.ranks.build, "load_model", load):
        yield
