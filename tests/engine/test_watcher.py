"""What an engine shows to an open dashboard, and that it notes nothing while none is open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from serinus.core.errors import BadRequest
from serinus.engine.engine import Engine
from serinus.engine.look import Look, look_at
from serinus.engine.watcher import WATCHED_S
from serinus.models.small_checkpoints import make_toy
from serinus.selftest import EnginePair
from serinus.wire.watched import WatchFrame


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), vocab=64, context=256, tokenizer=False)


def pair(toy: Path, **settings: Any) -> EnginePair:
    return EnginePair(toy, **{"page_size": 4, "max_total_tokens": 256, "chunked_prefill_size": 16, **settings})


class Shown:
    """A frame of an engine, read."""

    def __init__(self, engine: Engine, now: float) -> None:
        frame = msgspec.msgpack.decode(engine.watcher.frame(now), type=WatchFrame)
        self.pools = {(each.tier, each.part): each for each in frame.pools}
        self.sections = {name: json.loads(raw) for name, raw in frame.sections.items()}


def test_a_handoff_is_shown_on_both_sides_piece_by_piece(toy: Path) -> None:
    both = pair(toy)
    engines = [both.decode.engine, both.prefill.engine]
    for engine in engines:
        Shown(engine, both.clock.now())
    both.add("a", list(range(1, 38)), 6)
    both.run_until_idle()
    decode, prefill = (Shown(engine, both.clock.now()).sections for engine in engines)
    (taken,), (sent,) = decode["handoffs"], prefill["handoffs"]
    assert taken["xid"] == sent["xid"]
    assert (taken["rid"], taken["code"], taken["engine"]) == ("a", "landed", "prefill-0")
    assert (sent["rid"], sent["code"]) == ("a", "drained")
    assert len(taken["pieces"]) == len(sent["pieces"]) > 1
    assert taken["bytes"] == sent["bytes"] > 0
    assert taken["pages"] == sent["pages"] == 10
    (ended,) = decode["ended"]
    assert (ended["rid"], ended["finish"], ended["prompt"], ended["generated"]) == ("a", "length", 37, 6)
    assert ended["engine"] == "prefill-0"
    assert ended["arrival"] <= ended["started"] <= ended["first_token"] <= ended["ended"]
    assert decode["rates"]["generated"] == 6
    assert decode["rates"]["generated_rate"] * decode["rates"]["seconds"] == pytest.approx(6)
    (computed,) = prefill["ended"] or [None]
    assert computed is None or computed["client"] == "a"


def test_the_floor_of_a_step_is_that_of_one_step_however_many_there_were(toy: Path) -> None:
    both = pair(toy)
    engine, floors = both.decode.engine, []
    Shown(engine, both.clock.now())
    for number, count in enumerate((3, 40)):
        both.add(f"r{number}", list(range(1 + number, 38)), count)
        both.run_until_idle()
        floors.append(Shown(engine, both.clock.now()).sections["rates"]["floor_ms"])
    assert Shown(engine, both.clock.now()).sections["rates"]["floor_ms"] is None
    assert 0 < floors[0] < floors[1] < 2 * floors[0], "longer requests, the same weights"


def test_pages_are_shown_as_what_they_are(toy: Path) -> None:
    both = pair(toy)
    both.add("a", list(range(1, 38)), 6)
    both.run_until_idle()
    shown = Shown(both.decode.engine, both.clock.now())
    states = np.frombuffer(shown.pools["device", "full"].state, np.uint8)
    pages = both.decode.built.cache.stats().pages
    assert states[0] == 5
    assert np.bincount(states, minlength=7).tolist() == [pages.free, 0, pages.tree, 0, 0, 1, 0]
    assert pages.tree == 10


def test_nothing_is_noted_before_a_dashboard_opens_or_after_it_closed(toy: Path) -> None:
    both = pair(toy)
    engine = both.decode.engine
    both.add("a", list(range(1, 38)), 6)
    both.run_until_idle()
    assert (engine.watcher.on, engine.metrics.listener, engine.handoffs.port.tap) == (False, None, None)  # type: ignore[attr-defined]
    shown = Shown(engine, both.clock.now())
    assert shown.sections["ended"] == shown.sections["handoffs"] == []
    assert engine.watcher.on
    engine.watcher.turn(both.clock.now() + WATCHED_S + 0.1)
    assert (engine.watcher.on, engine.metrics.listener, engine.handoffs.port.tap) == (False, None, None)  # type: ignore[attr-defined]
    both.add("b", list(range(2, 39)), 6)
    both.run_until_idle()
    assert Shown(engine, both.clock.now()).sections["ended"] == []


def test_a_look_at_a_page_and_at_its_node_tells_owner_history_and_tokens(toy: Path) -> None:
    both = pair(toy)
    prompt = list(range(1, 38))
    both.add("a", prompt, 6)
    both.run_until_idle()
    engine, cache = both.decode.engine, both.decode.built.cache
    states = np.frombuffer(Shown(engine, both.clock.now()).pools["device", "full"].state, np.uint8)
    page = int(np.flatnonzero(states == 2)[0])
    found = look_at(Look(what="page", page=page), cache, engine.scheduler)
    assert found["state"] == "tree"
    assert f"TREE({found['node']})" in found["history"]
    assert "filled by prefill-0" in found["history"]
    assert (found["users"], found["holds"]) == ([], {})
    node = look_at(Look(what="node", node=found["node"]), cache, engine.scheduler)
    assert page in node["pages"]
    assert node["tokens"][: len(prompt)] == prompt[node["start"] : node["end"]]
    free = int(np.flatnonzero(states == 0)[0])
    assert look_at(Look(what="page", page=free), cache, engine.scheduler)["owner"] == "FREE"


@pytest.mark.parametrize(
    "look", [Look(what="page"), Look(what="page", page=1 << 20), Look(what="page", tier="tape", page=1),
             Look(what="node", node=12345), Look(what="else")],
)  # fmt: skip
def test_a_look_at_what_is_not_there_is_refused(toy: Path, look: Look) -> None:
    engine, cache = (made := pair(toy).decode).engine, made.built.cache
    with pytest.raises(BadRequest):
        look_at(look, cache, engine.scheduler)
