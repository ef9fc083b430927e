"""Mode heal takes the cheapest copy that verifies: the host's, a file's, and computes what no tier has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serinus.cache import Tier
from serinus.core.parts import Part
from serinus.testing.oracle import toy_continue
from tests.engine.test_canary import KINDS, SHARED, TIERED, Watched, toys
from tests.engine.test_heal import add, damage, heals, receipt, run_until

__all__ = ["toys"]

PROMPT = [*SHARED[0], 201]
HEALED = {**TIERED, "kv_canary": "heal", "kv_canary_sweep_interval": 0}


class Tiers(Watched):
    """An engine with tiers that cached PROMPT, all of its copies at rest."""

    def __init__(self, toy: Path, **settings: Any) -> None:
        super().__init__(toy, **{**HEALED, **settings})
        self.add("warm", PROMPT)
        self.run()
        self.rest()

    def rest(self) -> None:
        """Until nothing is copied, stored or read."""
        while self.built.cache.poll().in_flight:
            self.built.line.pump(0.01)

    def host_bytes(self) -> np.ndarray:
        assert self.built.tiers is not None
        return self.built.tiers.host[self.part].data_PY

    def incident_tags(self) -> set[str]:
        return {each.tag for each in self.lead.violations}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("coverage", ["full", "rotating:4"])
def test_a_damaged_page_comes_back_from_the_host_and_all_behind_it(
    toys: dict[str, Path], kind: str, coverage: str
) -> None:
    engine = Tiers(toys[kind], kv_canary_coverage=coverage)
    add(engine, "one", PROMPT, 20, stream=False)
    run_until(engine, "one", 1)  # the prompt's end is within every window
    damage(engine, "one", 39)
    engine.run()
    each = receipt(engine, "one")
    assert engine.tokens("one") == toy_continue(engine.built.spec, PROMPT, 20)
    assert (each.heals, heals(engine, "recomputed")) == (1, 1)
    assert each.repaired_from["device"] == 36
    assert each.repaired_from["host"] in (4, 8), "with the first page of the answer, where that is copied"
    assert each.repaired_from["computed"] <= 8, "the rest of what there was"
    assert engine.built.cache.probe("", np.array(PROMPT, np.int32)).device == 40
    engine.built.cache.sanity_check()
    engine.built.close()


def test_a_copy_on_the_host_that_is_wrong_too_is_reported_and_computed_again(toys: dict[str, Path]) -> None:
    engine = Tiers(toys["full"])
    add(engine, "one", PROMPT, 20, stream=False)
    run_until(engine, "one", 6)
    page = int(engine.engine.scheduler._states["one"].full.pages[2])
    copies = engine.built.cache.tiers.quarantine.copies.behind(Part.FULL, page, 99)
    copy = next(copy for copy in copies if copy.node.start <= 20 < copy.node.end)
    engine.host_bytes()[copy.spans[0].pages[5 - copy.node.start // 4], 5] ^= 1
    damage(engine, "one", 8)
    engine.run()
    each = receipt(engine, "one")
    assert engine.tokens("one") == toy_continue(engine.built.spec, PROMPT, 20)
    assert (each.repaired_from["device"], each.repaired_from["host"]) == (8, 12), "as far as the copy is sound"
    assert each.repaired_from["computed"] >= 22
    assert "HOST_K_FULL" in engine.incident_tags()
    engine.built.cache.sanity_check()
    add(engine, "again", PROMPT, 5, stream=False)
    engine.run()
    assert engine.tokens("again") == toy_continue(engine.built.spec, PROMPT, 5)
    engine.built.close()


@pytest.mark.parametrize("policy", ["wait_complete", "timeout"])
def test_what_the_host_gave_up_comes_back_from_files(toys: dict[str, Path], tmp_path: Path, policy: str) -> None:
    files = {"hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path),
             "hicache_storage_prefetch_policy": policy}  # fmt: skip
    engine = Tiers(toys["full"], **files)
    cache = engine.built.cache
    add(engine, "one", PROMPT, 20, stream=False)
    run_until(engine, "one", 6)
    engine.rest()
    assert cache.evict(999, Tier.HOST) > 0
    damage(engine, "one", 8)
    while not engine.engine.idle:
        engine.turn()
        engine.built.line.pump(0.001)
    each = receipt(engine, "one")
    assert engine.tokens("one") == toy_continue(engine.built.spec, PROMPT, 20)
    assert (each.repaired_from["device"], each.repaired_from.get("host", 0)) == (8, 0)
    assert each.repaired_from["storage"] >= 32
    assert cache.tiers.removals is not None
    assert cache.tiers.removals.pages == 0, "files were verified before they were stored"
    assert cache.stats().pages.quarantined == 1
    engine.rest()
    for tier in (Tier.DEVICE, Tier.HOST):
        cache.evict(999, tier)
    add(engine, "late", PROMPT, 5, stream=False)
    engine.turn()
    assert engine.engine.scheduler._states["late"].prefetching
    assert cache.stats().pages.quarantined == 1, "a wait for files is no lack of pages"
    engine.run()
    assert engine.tokens("late") == toy_continue(engine.built.spec, PROMPT, 5)
    engine.built.close()


@pytest.mark.parametrize("real_data", ["partial", "none"])
def test_without_a_digest_of_every_byte_no_copy_is_trusted(toys: dict[str, Path], real_data: str) -> None:
    engine = Tiers(toys["full"], kv_canary_real_data=real_data)
    add(engine, "one", PROMPT, 20, stream=False)
    run_until(engine, "one", 6)
    stamps = engine.built.pools[Part.FULL].stamps_LS4
    assert stamps is not None
    slot = 4 * int(engine.engine.scheduler._states["one"].full.pages[2])
    stamps.numpy()[2, slot, 1] ^= 1
    engine.run()
    each = receipt(engine, "one")
    assert engine.tokens("one") == toy_continue(engine.built.spec, PROMPT, 20)
    assert each.heals == 1
    assert each.repaired_from.get("host", 0) == 0
    engine.built.close()


def test_all_answers_to_one_prompt_are_healed_from_one_copy(toys: dict[str, Path]) -> None:
    """n = 3: three requests share the pages of their prompt; it is loaded once."""
    engine = Tiers(toys["full"])
    rids = ["one-0", "one-1", "one-2"]
    for rid in rids:
        add(engine, rid, PROMPT, 12, stream=False)
    run_until(engine, rids[-1], 3)
    loaded = engine.built.cache.stats().loaded_tokens
    damage(engine, "one-1", 8)
    engine.run()
    assert heals(engine, "recomputed") == 3
    for rid in rids:
        assert engine.tokens(rid) == toy_continue(engine.built.spec, PROMPT, 12)
    assert sum(receipt(engine, rid).repaired_from.get("host", 0) for rid in rids) >= 32
    assert engine.built.cache.stats().loaded_tokens - loaded <= 36, "the prompt once, and a page of an answer"
    engine.built.close()


def test_a_healed_request_that_runs_over_its_deadline_ends_once_as_a_timeout(toys: dict[str, Path]) -> None:
    engine = Tiers(toys["full"], request_timeout=5.0)
    add(engine, "one", PROMPT, 40, stream=False)
    run_until(engine, "one", 6)
    damage(engine, "one", 8)
    while not heals(engine, "recomputed"):
        engine.turn()
    engine.built.clock.advance(6.0)
    engine.run()
    ends = [delta for delta in engine.deltas["one"] if delta.finish is not None]
    assert [end.error_status for end in ends] == [504]
    assert "deadline" in ends[0].error
    assert receipt(engine, "one").heals == 1
    engine.built.cache.sanity_check()
    assert engine.engine.idle
    engine.built.close()
