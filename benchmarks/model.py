"""The model all engine benchmarks share: Qwen3 shape, 12 layers of 1024, 16/8 heads of 128, vocab 32000; 221M, bf16."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

from serinus.models.small_checkpoints import make_checkpoint

__all__ = ["checkpoint_221m", "made_elsewhere"]

_FOLDER = Path(__file__).parent / "model-221m"


def checkpoint_221m(folder: str | Path = "") -> Path:
    """Its directory; made (442 MB, random weights) where it is not there."""
    sizes = {"hidden": 1024, "intermediate": 3072, "layers": 12, "heads": 16, "kv_heads": 8, "head_size": 128}
    return made_elsewhere(Path(folder or _FOLDER), **sizes, vocab=32000, context=4096, tied=True, dtype="bfloat16")


def made_elsewhere(path: Path, **shape: Any) -> Path:
    """A Qwen3 checkpoint, made where it is not there by a process of its own: transformers, which writes it, and the
    weights in fp32 that it begins with, are no memory of an engine that is measured here."""
    if not (path / "config.json").exists():
        maker = multiprocessing.get_context("spawn").Process(target=make_checkpoint, args=(path, "qwen3"), kwargs=shape)
        maker.start()
        maker.join()
        assert maker.exitcode == 0, f"benchmark: {path} was not made, exit code {maker.exitcode}"
    return path
