"""The other process: holds pages, does what it is told line by line, and answers each line with one line.

    python far.py nixl|mooncake PAGES STRIP_BYTES FILL

Its memory is two lanes of one region; page p is full of bytes (FILL + p) % 251.
"""

from __future__ import annotations

import sys

import numpy as np

from serinus.core.parts import Part
from serinus.pd.backends import MooncakeBackend, NixlBackend, OneSided, Region

LANES = 2


def memory(pages: int, strip_bytes: int, fill: int | None) -> np.ndarray:
    """Bytes indexed by lane, page and byte; zero, or a pattern that begins at `fill`."""
    lanes = np.zeros((LANES, pages, strip_bytes), np.uint8)
    if fill is not None:
        lanes[:] = ((fill + np.arange(pages)) % 251).astype(np.uint8)[None, :, None]
    return lanes


def region(lanes: np.ndarray) -> Region:
    """The region such memory is."""
    return Region(
        part=Part.FULL, address=lanes.ctypes.data, lane_count=len(lanes), lane_stride=lanes.strides[0],
        strip_bytes=lanes.shape[2], page_count=lanes.shape[1],
    )  # fmt: skip


def make(name: str, tag: str) -> OneSided:
    """The backend of this name."""
    return NixlBackend(tag) if name == "nixl" else MooncakeBackend()


def main() -> None:
    name, pages, strip_bytes, fill = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    lanes = memory(pages, strip_bytes, fill)
    backend = make(name, f"far-{fill}")
    say(backend.register([region(lanes)]).hex())
    op = 0
    for line in sys.stdin:
        words = line.split()
        if words[0] == "connect":
            backend.connect("near", bytes.fromhex(words[1]))
            say("ok")
        elif words[0] == "write":
            ids = np.arange(int(words[1]), int(words[2]), dtype=np.int32)
            op = backend.write("near", Part.FULL, ids, ids)
            say("begun")
        elif words[0] == "wait":
            while (result := backend.poll(op)).state.value == "pending":
                pass
            say(result.state.value)
        elif words[0] == "fill":
            lanes[:] = int(words[1])
            say("ok")


def say(word: str) -> None:
    """One answer; libraries print to stdout too, so it is marked."""
    print(f"\nFAR {word}", flush=True)


if __name__ == "__main__":
    main()
