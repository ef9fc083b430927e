"""Tiny engines for the tests of this room: their layout, prompts, and pools whose pages say what they should hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serinus.core.parts import PageSpan, Part
from serinus.core.request import Request
from serinus.core.sampling import SamplingParams
from serinus.pd import HandoffSettings, digest_pages
from serinus.wire.messages import LayoutSignature

PAGE_SIZE = 4
PAGE_BYTES = 16
VOCAB = 1000
LAYOUT = LayoutSignature(
    model="m", kv_dtype="float16", page_size=PAGE_SIZE, layer_count=1, kv_head_count=1, head_size=1
)


def make_settings(engine: str, incarnation: int, **changes: object) -> HandoffSettings:
    """Settings of a tiny engine."""
    values: dict[str, object] = {
        "engine": engine,
        "incarnation": incarnation,
        "layout": LAYOUT,
        "vocab_size": VOCAB,
        "backends": ("shm",),
        "host": "here",
        "piece_bytes_max": 2 * PAGE_BYTES,
    }
    return HandoffSettings(**{**values, **changes})  # type: ignore[arg-type]


def make_request(rid: str, length: int, seed: int = 0, **sampling: float) -> Request:
    """A prompt of so many tokens, its own for every seed."""
    prompt = (np.arange(length, dtype=np.int32) * 7 + seed * 131) % VOCAB
    return Request(rid=rid, prompt=prompt.astype(np.int32), sampling=SamplingParams(**sampling), seed=seed)


def page_content(prompt: NDArray[np.int32], index: int) -> NDArray[np.uint8]:
    """The KV of page `index` of a prompt: a hash of the token chain up to its end."""
    chain = prompt[: (index + 1) * PAGE_SIZE].tobytes()
    return np.frombuffer(digest_pages(np.frombuffer(chain, dtype=np.uint8)[None], index) * 2, dtype=np.uint8)


def full(first: int, pages: Sequence[int] | NDArray[np.int32]) -> tuple[PageSpan, ...]:
    """Pages of the only part, from page `first` of the prompt on."""
    return (PageSpan(part=Part.FULL, first=first, pages=np.asarray(pages, np.int32)),)


def first_token(prompt: NDArray[np.int32]) -> int:
    """The token that follows a prompt."""
    return int(prompt.sum()) % VOCAB


class Store:
    """Pages in an array, of one part on one rank."""

    def __init__(self, page_bytes: int = PAGE_BYTES, count: int = 64) -> None:
        self.page_bytes = page_bytes
        self.data = np.zeros((count, page_bytes), np.uint8)

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> None:
        out[:] = self.data[pages]

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        self.data[pages] = data


@dataclass(slots=True)
class Pool:
    """Pages 1 .. count - 1 and the owner of each."""

    count: int
    data: NDArray[np.uint8] = field(init=False)
    owner: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = np.full((self.count, PAGE_BYTES), 0xEE, dtype=np.uint8)

    def take(self, owner: str, count: int) -> NDArray[np.int32] | None:
        """The lowest free pages, so that a page freed is a page reused."""
        free = [page for page in range(1, self.count) if page not in self.owner][:count]
        if len(free) < count:
            return None
        self.owner.update(dict.fromkeys(free, owner))
        return np.array(free, dtype=np.int32)

    def give(self, owner: str, pages: NDArray[np.int32]) -> None:
        """Free pages of an owner, and spoil them."""
        for page in pages.tolist():
            assert self.owner.pop(page) == owner, f"page {page} is not {owner}'s"
            self.data[page] = 0xDD


def segment_count() -> int:
    """How many descriptors of shared segments this process has open, its own segments' and others'."""
    count = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            count += "serinus-kv" in str(fd.readlink())
        except FileNotFoundError:
            continue
    return count
