"""Frames of an engine as events of a dashboard: the whole state first, then what has changed. Plain data in and out.

    {"kind": "whole" | "delta", "number": n, "now": s, "unix": s, "summary": {...},
     "pools": [{"tier", "part", "pages", "state", "seen"}      whole: base64 of a byte (u32) a page
               {"tier", "part", "at", "state", "seen"}],       delta: base64 of the u32 page numbers that changed
     "health": ..., "rates": ..., ...}                         sections; in a delta those that differ alone

A delta applied to the state before it is the whole state at that moment.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from serinus.wire.watched import PoolCells, WatchFrame

_WHOLE_SHARE: Final = 3
"""A pool of which more than one page in so many has changed is sent whole."""
_STATES: Final = ("free", "request", "cached", "in_transit", "quarantined", "padding", "retired")
_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(WatchFrame)


class FrameEncoder:
    """Remembers the last frame of one engine."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        """`about`: what the front knows of the engine; it stands in whole events."""
        self._about = dict(about)
        self._last: WatchFrame | None = None
        self._unix = 0.0
        self._number = 0

    def take(self, body: bytes, unix: float, page_size: int) -> bytes:
        """The next frame, as the engine encoded it, and the time it came; returns the event of what has changed. Raises
        msgspec.DecodeError: it is no frame."""
        frame, last = _DECODER.decode(body), self._last
        self._last, self._unix = frame, unix
        self._number += 1
        self._page_size = page_size
        if last is None or _shapes(last) != _shapes(frame):
            return self.whole()
        sections = {name: raw for name, raw in frame.sections.items() if raw != last.sections.get(name)}
        pools = [_changes(before, after) for before, after in zip(last.pools, frame.pools, strict=True)]
        return self._event("delta", frame, [each for each in pools if each is not None], sections)

    def whole(self) -> bytes:
        """The event of the whole state; `take` was called before."""
        assert self._last is not None, "front: a whole event before the first frame"
        pools = [_whole(pool) for pool in self._last.pools]
        return self._event("whole", self._last, pools, {"front": _ENCODER.encode(self._about), **self._last.sections})

    def _event(self, kind: str, frame: WatchFrame, pools: list[dict[str, Any]], sections: Mapping[str, bytes]) -> bytes:
        head = {
            "kind": kind, "number": self._number, "now": frame.now, "unix": self._unix,
            "summary": kv_summary(frame, self._page_size), "pools": pools,
        }  # fmt: skip
        return (
            b"data: "
            + _ENCODER.encode({**head, **{name: msgspec.Raw(raw) for name, raw in sections.items()}})
            + b"\n\n"
        )


def kv_summary(frame: WatchFrame, page_size: int) -> dict[str, Any]:
    """What the headline says: pages by state, and of those on the device with KV how many slots are verified and how
    long ago the oldest was. Cost: one pass over all pages."""
    counts = dict.fromkeys(_STATES, 0)
    slots, oldest = 0, None
    for pool in frame.pools:
        state_P = _bytes_of(pool.state)
        for state, count in enumerate(np.bincount(state_P, minlength=len(_STATES)).tolist()):
            counts[_STATES[state]] += count
        seen_P = _seen_of(pool)
        if len(seen_P):
            times = seen_P[(state_P == 1) | (state_P == 2)]
            slots += page_size * len(times)
            if len(times):
                age = max(0.0, frame.now - float(times.min()))
                oldest = age if oldest is None else max(oldest, age)
    del counts["padding"]
    return {"slots": slots, "oldest_s": oldest, "pages": counts}


def _shapes(frame: WatchFrame) -> list[tuple[str, str, int, int]]:
    return [(pool.tier, pool.part, len(pool.state), len(pool.seen)) for pool in frame.pools]


def _whole(pool: PoolCells) -> dict[str, Any]:
    return {
        "tier": pool.tier, "part": pool.part, "pages": len(pool.state), "state": _text(pool.state),
        "seen": _text(pool.seen),
    }  # fmt: skip


def _changes(before: PoolCells, after: PoolCells) -> dict[str, Any] | None:
    """None = there are none."""
    if before.state == after.state and before.seen == after.seen:
        return None
    state_P, seen_P = _bytes_of(after.state), _seen_of(after)
    changed_P = state_P != _bytes_of(before.state)
    if len(seen_P):
        changed_P |= seen_P != _seen_of(before)
    at = np.flatnonzero(changed_P).astype("<u4")
    if len(at) * _WHOLE_SHARE > len(state_P):
        return _whole(after)
    seen = seen_P[at].tobytes() if len(seen_P) else b""
    return {
        "tier": after.tier, "part": after.part, "at": _text(at.tobytes()), "state": _text(state_P[at].tobytes()),
        "seen": _text(seen),
    }  # fmt: skip


def _bytes_of(text: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(text, np.uint8)


def _seen_of(pool: PoolCells) -> NDArray[np.uint32]:
    return np.frombuffer(pool.seen, "<u4")


def _text(data: bytes) -> str:
    return b64encode(data).decode()
