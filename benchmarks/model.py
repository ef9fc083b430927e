"""The model all engine benchmarks share: Qwen3 shape, 12 layers of 1024, 16/8 heads of 128, vocab 32000; 221M, bf16."""

from __future__ import annotations

from pathlib import Path

from serinus.models.small_checkpoints import make_checkpoint

__all__ = ["checkpoint_221m"]

_FOLDER = Path(__file__).parent / "model-221m"


def checkpoint_221m(folder: str | Path = "") -> Path:
    """Its directory; made (442 MB, random weights) where it is not there."""
    path = Path(folder or _FOLDER)
    if not (path / "config.json").exists():
        make_checkpoint(
            path,
            "qwen3",
            hidden=1024,
            intermediate=3072,
            layers=12,
            heads=16,
            kv_heads=8,
            head_size=128,
            vocab=32000,
            context=4096,
            tied=True,
            dtype="bfloat16",
        )
    return path
