"""CopyCheck: has ranks verify what the host has of a condemned page, and of all behind it, before that is given up.

A page's copy on the host was made of KV that was verified, and carries the stamps that were made as that was computed.
Where the bytes of every rank's share, the stamps, and the tokens and chain hashes that the leader has for it agree, the
copy is right, and the next match loads it back. That takes digests of whole rows: nothing is kept without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from serinus.cache import CheckedCopies, PrefixCache
from serinus.canary.commands import CanaryAnswer, HostPages
from serinus.core.parts import Part
from serinus.core.settings import CanarySettings

_TOKENS_MAX: Final = 16_384
"""Tokens that are verified for one page: requests wait meanwhile. What is behind them is given up."""


class CopyCheck:
    """Says which copies are sound."""

    def __init__(
        self, settings: CanarySettings, cache: PrefixCache,
        check: Callable[[tuple[HostPages, ...]], list[CanaryAnswer]],
    ) -> None:  # fmt: skip
        """`check`: has all ranks verify these pages; their answers."""
        self._cache, self._check = cache, check
        self._is_able = bool(cache.pools.host) and settings.kv_canary_real_data == "all"

    def verified(self, part: Part, page: int) -> CheckedCopies | None:
        """For PrefixCache.condemn; None = no copy can be told sound from wrong. Waits for all ranks. Cost: one read of
        the copies of 16,384 tokens at most, and what the leader hashes of their tokens once."""
        if not self._is_able:
            return None
        copies = self._cache.tiers.quarantine.copies.behind(part, page, _TOKENS_MAX)
        pages = tuple(
            HostPages(part=span.part, pages=span.pages, origin=copy.origin) for copy in copies for span in copy.spans
        )
        answers = self._check(pages) if pages else []
        counts = iter([min(of_ranks) for of_ranks in zip(*(answer.sound for answer in answers), strict=True)])
        return {copy.node: {span.part: next(counts) for span in copy.spans} for copy in copies}
