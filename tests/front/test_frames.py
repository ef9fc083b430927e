"""Frames of an engine as events: what a dashboard has after any deltas is what the engine showed."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import msgspec
import numpy as np
import pytest

from serinus.core.rng import Rng
from serinus.front.frames import FrameEncoder, kv_summary
from serinus.wire.watched import PoolCells, WatchFrame


class Model:
    """What a page makes of events, written down once more."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.pools: dict[tuple[str, str], tuple[bytearray, list[int]]] = {}

    def take(self, event: bytes) -> str:
        assert event.startswith(b"data: ")
        assert event.endswith(b"\n\n")
        told = json.loads(event[6:])
        if told["kind"] == "whole":
            self.pools, self.state = {}, {}
        for pool in told.pop("pools"):
            key = pool["tier"], pool["part"]
            state, seen = b64decode(pool["state"]), np.frombuffer(b64decode(pool["seen"]), "<u4").tolist()
            if "at" not in pool:
                self.pools[key] = bytearray(state), seen
                continue
            states, times = self.pools[key]
            for i, page in enumerate(np.frombuffer(b64decode(pool["at"]), "<u4").tolist()):
                states[page] = state[i]
                if seen:
                    times[page] = seen[i]
        self.state.update(told)
        return str(told["kind"])


def frame(
    now: float, pools: dict[tuple[str, str], tuple[bytes, list[int]]], sections: dict[str, Any]
) -> tuple[bytes, WatchFrame]:
    cells = tuple(
        PoolCells(tier=tier, part=part, state=state, seen=np.array(seen, "<u4").tobytes())
        for (tier, part), (state, seen) in pools.items()
    )
    raw = {name: json.dumps(value).encode() for name, value in sections.items()}
    made = WatchFrame(now=now, pools=cells, sections=raw)
    return msgspec.msgpack.encode(made), made


@pytest.mark.parametrize("seed", range(12))
def test_deltas_applied_to_the_whole_state_are_the_next_whole_state(seed: int) -> None:
    rng = Rng(seed)
    device, host = 2 + rng.randrange(300), 2 + rng.randrange(40)
    pools = {
        ("device", "full"): (bytes(device), [0] * device), ("device", "swa"): (bytes(17), [3] * 17),
        ("host", "full"): (bytes(host), []),
    }  # fmt: skip
    sections: dict[str, Any] = {"rates": {"running": 0}, "requests": [], "health": {"mode": "heal"}}
    encoder, page = FrameEncoder({"engine": "e-0"}), Model()
    kinds = []
    for number in range(40):
        for key, (state, seen) in pools.items():
            states, times = bytearray(state), list(seen)
            for _ in range(rng.randrange(len(states)) if rng.randrange(5) == 0 else rng.randrange(4)):
                at = rng.randrange(len(states))
                states[at] = rng.randrange(7)
                if times:
                    times[at] = rng.randrange(1 << 32)
            pools[key] = bytes(states), times
        if rng.randrange(2):
            sections = {**sections, "rates": {"running": rng.randrange(9)}}
        if rng.randrange(12) == 0:  # the files tier is as long as there are files
            files = 1 + rng.randrange(50)
            pools["storage", "full"] = bytes([2] * files), []
        body, _ = frame(float(number), pools, sections)
        event = encoder.take(body, 1e9 + number, 8)
        kinds.append(page.take(event))
        late = Model()
        assert late.take(encoder.whole()) == "whole"
        for seen_by in (page, late):
            assert {key: (bytes(state), seen) for key, (state, seen) in seen_by.pools.items()} == pools, (seed, number)
            assert {name: seen_by.state[name] for name in sections} == sections
            assert (seen_by.state["now"], seen_by.state["number"]) == (float(number), number + 1)
            assert seen_by.state["front"] == {"engine": "e-0"}
    assert kinds[0] == "whole"
    assert kinds.count("delta") > 20, "an encoder that only sends whole states passes the rest"


def test_a_frame_without_changes_is_a_small_event() -> None:
    state, seen = bytes([2]) * 100_000, [7] * 100_000
    body, _ = frame(1.0, {("device", "full"): (state, seen)}, {"rates": {"running": 1}})
    encoder = FrameEncoder({})
    assert len(encoder.take(body, 0.0, 8)) > 100_000
    delta = encoder.take(body, 0.5, 8)
    assert len(delta) < 400
    assert json.loads(delta[6:])["pools"] == []
    assert b"running" not in delta


def test_the_headline_counts_slots_with_kv_and_the_oldest_look_at_them() -> None:
    state = bytes([5, 0, 1, 2, 2, 3, 4, 6])  # padding, free, request, two cached, in transit, quarantined, retired
    _, shown = frame(
        100.0, {("device", "full"): (state, [0, 0, 95, 88, 99, 1, 2, 3]), ("host", "full"): (bytes([5, 2]), [])}, {}
    )
    summary = kv_summary(shown, 8)
    assert (summary["slots"], summary["oldest_s"]) == (24, 12.0)
    assert summary["pages"] == {
        "free": 1, "request": 1, "cached": 3, "in_transit": 1, "quarantined": 1, "retired": 1,
    }  # fmt: skip
    _, empty = frame(100.0, {("device", "full"): (bytes([5, 0]), [0, 0])}, {})
    assert kv_summary(empty, 8)["oldest_s"] is None


def test_what_is_no_frame_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        FrameEncoder({}).take(b"no frame", 0.0, 8)
