"""How much memory there is to give away."""

from __future__ import annotations

from pathlib import Path

from serinus.ranks.memory import _left_in, available_bytes


def _group(folder: Path, limit: str) -> tuple[str, str, str, str]:
    (folder / "max").write_text(f"{limit}\n")
    (folder / "current").write_text("700\n")
    (folder / "memory.stat").write_text("anon 500\nfile 200\n")
    return str(folder), "max", "current", "file"


def test_a_container_counts_all_its_processes_but_not_its_page_cache(tmp_path: Path) -> None:
    assert _left_in(*_group(tmp_path, "1000")) == 500
    assert _left_in(*_group(tmp_path, "600")) == 100
    assert _left_in(*_group(tmp_path, "400")) == 0


def test_a_container_without_a_limit_is_not_asked(tmp_path: Path) -> None:
    assert _left_in(*_group(tmp_path, "max")) is None
    assert _left_in(str(tmp_path / "none"), "max", "current", "file") is None


def test_this_machine_has_memory() -> None:
    assert available_bytes("cpu") > 1 << 20
