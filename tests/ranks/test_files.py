"""Whole engines of several ranks with a host tier and files: right answers, and hits after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serinus.engine import Built
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.testing.oracle import toy_continue
from tests.ranks.crew import crew

HEADS = [list(range(first, first + 40)) for first in (20, 70, 120)]
PROMPTS = [[*HEADS[i % 3], 200 + i] for i in range(6)]
"""Each beginning comes again after the two others: the device holds two of them."""
KINDS: dict[str, dict[str, Any]] = {
    "full": {}, "mixed": {"window": 6, "layer_types": "SFSF"}, "halves": {"window": 6, "layer_types": "SSFF"},
}  # fmt: skip
"""Of "halves", two stages have layers of one part each."""
SMALL = {
    "max_total_tokens": 96, "max_running_requests": 2, "enable_hierarchical_cache": True, "hicache_ratio": 4.0,
    "hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete",
}  # fmt: skip


def toy(home: Path, kind: str) -> Path:
    return make_toy(home / "toy", layers=4, kv_heads=2, tokenizer=False, **KINDS[kind])


def serve(model: Path, folder: Path, prompts: list[list[int]], **settings: Any) -> tuple[list[dict[str, int]], Built]:
    """An engine's life: where it found each prompt. Every answer is the oracle's, every page is back at the end."""
    spec, found = load_spec(model), []
    with crew(model, hicache_storage_dir=str(folder), **SMALL, **settings) as engine:
        for i, prompt in enumerate(prompts):
            rid = f"r{i}"
            engine.add(rid, prompt, 5)
            engine.run()
            assert engine.tokens(rid) == toy_continue(spec, prompt, 5), f"request {i}"
            usage = engine.deltas[rid][-1].usage
            found.append(dict(usage.cached_tokens) if usage is not None else {})
        engine.engine.scheduler.sanity_check()
        built = engine.built
    assert not engine.ranks.errors()
    return found, built


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "pp", "kind"), [(2, 1, "full"), (1, 2, "halves"), pytest.param(2, 2, "mixed", marks=pytest.mark.proof)]
)
def test_ranks_answer_alike_through_host_and_files_and_a_restart_finds_them(
    tmp_path: Path, tp: int, pp: int, kind: str
) -> None:
    model, folder = toy(tmp_path, kind), tmp_path / "kv"
    found, built = serve(model, folder, PROMPTS, tp_size=tp, pp_size=pp)
    assert found == [{}, {}, {}, {"host": 40}, {"host": 40}, {"host": 40}]
    assert built.cache.stats().failed_copies == 0
    assert len(list(folder.iterdir())) == tp * pp
    again, _ = serve(model, folder, PROMPTS[:2], tp_size=tp, pp_size=pp)
    assert again == [{"storage": 40}, {"storage": 40}]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["torn", "missing", "folder"])
def test_what_the_files_of_one_rank_lack_no_rank_has(tmp_path: Path, loss: str) -> None:
    model, folder = toy(tmp_path, "full"), tmp_path / "kv"
    serve(model, folder, PROMPTS[:1], tp_size=2)
    (lossy,) = folder.glob("*TP1*")
    pages = sorted(lossy.glob("*/*.page"), key=lambda page: page.stat().st_ctime_ns)  # other times are cut to the hour
    assert len(pages) == 11
    for page in pages if loss == "folder" else pages[:1]:
        page.write_bytes(page.read_bytes()[:-1] + b"\0\0") if loss == "torn" else page.unlink()
    (found,), _ = serve(model, folder, PROMPTS[:1], tp_size=2)
    assert found.get("storage", 0) < 40
    assert loss != "folder" or not found
    (again,), _ = serve(model, folder, PROMPTS[:1], tp_size=2)
    assert again == {"storage": 40}  # what was computed again was stored again


@pytest.mark.slow
def test_files_of_another_layout_are_never_read(tmp_path: Path) -> None:
    model, folder = toy(tmp_path, "full"), tmp_path / "kv"
    serve(model, folder, PROMPTS[:1], tp_size=2)
    first = {path.name for path in folder.iterdir()}
    assert serve(model, folder, PROMPTS[:1], pp_size=2)[0] == [{}]
    assert serve(model, folder, PROMPTS[:1], pp_size=2, pp_layer_partition="1,3")[0] == [{}]
    assert len({path.name for path in folder.iterdir()} - first) == 4
    names = sorted(first)
    (folder / names[0]).rename(folder / "x")
    (folder / names[1]).rename(folder / names[0])
    (folder / "x").rename(folder / names[1])
    assert serve(model, folder, PROMPTS[:1], tp_size=2)[0] == [{}]  # each rank finds the other's files, and no page
