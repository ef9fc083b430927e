"""Types with limits, for plain data that travels between processes: the codec of `wire` refuses what is beyond them.

The length of a container is checked before anything of that length is allocated, so each container has its own limit.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Name = Annotated[str, Meta(max_length=256)]
"""An identifier or an address."""
Text = Annotated[str, Meta(max_length=16_384)]
"""A message in words."""
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A number or an index."""
Priority = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
"""A priority, smaller = more important."""
Weight = Annotated[float, Meta(ge=1e-3, le=1e6)]
"""A part, against others."""
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
"""A duration in seconds."""
Ids = Annotated[tuple[int, ...], Meta(max_length=1 << 20)]
"""Token ids of one answer."""
TopIds = Annotated[tuple[int, ...], Meta(max_length=1 << 10)]
"""A short list of ids."""
TopLogprobs = Annotated[tuple[float, ...], Meta(max_length=1 << 10)]
"""The log-probabilities of a TopIds."""
Tiers = Annotated[dict[str, int], Meta(max_length=16)]
"""A number of tokens for each tier."""


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can carry a text, as every frame, digest and library asks of it: no lone surrogate is in it."""
    return text.encode(errors="replace").decode() == text
