"""An engine that is given another prompt's pages, by its tree, its mover or on the device, answers with none of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from serinus.cache import Tier
from serinus.canary.judge import RowsVerdict
from serinus.core.clock import ManualClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.parts import OwnPages, Part
from serinus.core.request import FinishReason
from serinus.engine import build_engine
from serinus.engine.built import Built
from serinus.kernels import Reason
from serinus.selftest import EngineDriver, make_canary_toy
from serinus.testing.oracle import toy_continue

ONE_PAGE = [list(range(20, 24)), list(range(60, 64))]
"""What two prompts begin with, of one page."""
LONG = [list(range(20, 44)), list(range(60, 84))]
Start = Callable[..., EngineDriver]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts engines, and closes them in the end."""
    opened: list[Built] = []

    def started(shape: str, coverage: str) -> EngineDriver:
        settings = {
            "skip_tokenizer_init": True, "page_size": 4, "max_total_tokens": 256, "max_running_requests": 4,
            "chunked_prefill_size": 64, "decode_log_interval": 0, "enable_hierarchical_cache": True,
            "hicache_ratio": 4.0, "hicache_write_policy": "write_through", "kv_canary": "raise",
            "kv_canary_real_data": "all", "kv_canary_coverage": coverage, "kv_canary_sweep_interval": 0,
            "kv_canary_stats_interval": 0,
        }  # fmt: skip
        path = str(make_canary_toy(tmp_path / f"{shape}{len(opened)}", shape))
        opened.append(build_engine(from_names(ServeConfig, {**settings, "model_path": path}), ManualClock()))
        return EngineDriver(opened[-1])

    yield started
    for built in opened:
        built.close()


def ask(engine: EngineDriver, rid: str, prompt: list[int], count: int = 6) -> list[int]:
    engine.add(rid, prompt, count)
    engine.run()
    return engine.tokens(rid)


def wrong_child(engine: EngineDriver) -> None:
    """The tree descends into the other prompt's node."""
    root = next(iter(engine.built.cache.tree.roots.values()))
    one, other = root.children.values()
    root.children[one.key], root.children[other.key] = other, one
    one.key, other.key = other.key, one.key
    one.tokens, other.tokens = other.tokens, one.tokens


@torch.inference_mode()
def exchanged_on_the_device(engine: EngineDriver) -> None:
    """All cached pages of the two, KV and stamps."""
    one, other = next(iter(engine.built.cache.tree.roots.values())).children.values()
    for part, pool in engine.built.pools.items():
        pages = min(len(one.device[part]), len(other.device[part]))
        if not pages or pool.stamps_LS4 is None:
            continue
        here, there = (torch.from_numpy(each.device[part][-pages:].astype(np.int64)) for each in (one, other))
        for lane in (*(half for pair in pool.layers for half in pair), *pool.stamps_LS4):
            by_page = lane.view(-1, 4, *lane.shape[1:])
            kept = by_page[here].clone()
            by_page[here] = by_page[there]
            by_page[there] = kept


def exchanged_on_the_host(engine: EngineDriver) -> None:
    """The mover loads the other prompt's pages; nothing of either is on the device any more."""
    cache, tiers = engine.built.cache, engine.built.tiers
    assert tiers is not None
    for part in engine.built.pools:
        cache.evict(1 << 20, Tier.DEVICE, part)
    one, other = next(iter(cache.tree.roots.values())).children.values()
    for part, pool in tiers.host.items():
        pages = min(len(one.host[part]), len(other.host[part]))
        here, there = one.host[part][-pages:], other.host[part][-pages:]
        if pages:
            pool.data_PY[[*here, *there]] = pool.data_PY[[*there, *here]]


FAULTS = (wrong_child, exchanged_on_the_device, exchanged_on_the_host)


@pytest.mark.parametrize("begin", [ONE_PAGE, LONG], ids=["one_page", "long"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_request_that_is_given_anothers_pages_gets_no_token(
    start: Start, fault: Callable[[EngineDriver], None], begin: list[list[int]]
) -> None:
    engine = start("both" if begin is LONG else "full", "rotating:16")
    for at, prompt in enumerate(begin):
        ask(engine, f"first{at}", [*prompt, 7])
    fault(engine)
    for at, prompt in enumerate(begin):
        rid = f"second{at}"
        assert ask(engine, rid, [*prompt, 9]) == [], "a token computed on another's KV left"
        assert engine.finish(rid) is FinishReason.ERROR
        lead = engine.engine.canary
        assert lead is not None
        mine = [violation for violation in lead.violations if violation.rid == rid]
        assert any(Reason.VERIFY_CHAIN_HASH in violation.reasons for violation in mine)


def test_pages_of_the_right_prompt_raise_no_alarm(start: Start) -> None:
    """The same stories without a fault: no alarm, right answers."""
    engine = start("both", "rotating:16")
    for turn in range(2):
        for at, prompt in enumerate(LONG):
            asked = [*prompt, 7 + turn]
            assert ask(engine, f"r{turn}{at}", asked) == toy_continue(engine.built.spec, asked, 6)
        for part in engine.built.pools:
            engine.built.cache.evict(1 << 20, Tier.DEVICE, part)
    assert engine.engine.canary is not None
    assert engine.engine.canary.violations.total == 0
    assert Part.SWA in engine.built.pools


def test_a_row_that_names_anothers_slot_when_its_request_ends_is_that_requests_fault_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of both are sound: only the device's table is wrong, after the last step that read it."""
    engine = start("full", "rotating:16")
    lead, spec, scheduler = engine.engine.canary, engine.built.spec, engine.engine.scheduler
    assert lead is not None
    check = lead.check

    def damaged(rows: Mapping[str, OwnPages]) -> RowsVerdict:
        if "ends" in rows:
            assert engine.built.canary is not None
            table_RC = engine.built.canary.parts[Part.FULL].table_RC
            mine, others = (scheduler._states[rid].row for rid in ("ends", "goes on"))
            with torch.inference_mode():
                table_RC[mine, 5] = table_RC[others, 5]
        return check(rows)

    monkeypatch.setattr(lead, "check", damaged)
    one, other = LONG[0][:14], LONG[1][:15]
    engine.add("ends", one, 20, stop_token_ids=[toy_continue(spec, one, 6)[5]])
    engine.add("goes on", other, 25)
    engine.run()
    assert engine.finish("ends") is FinishReason.ERROR
    assert engine.finish("goes on") is FinishReason.LENGTH
    assert engine.tokens("goes on") == toy_continue(spec, other, 25)
    assert not engine.built.cache.tiers.quarantine.failures
