"""What happens to the memory of one rank and to its copies without any error: the faults that only a canary can see.

A bit of KV or of a stamp flips; KV that a page held some time ago lands in it again; a whole page, stamps and all, is
that of another place or of another time; an entry of a row names another slot; a bit flips in a slot after its KV was
stored and before the step is stamped; a page of the host tier changes; a copy between device and host does nothing, or
takes another page. Where not every slot is verified in every step, no damage puts back what an earlier one changed:
bytes that change and change back between two turns of their page are what a canary cannot see (docs/CANARY.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.models import ForwardBatch
from serinus.pool import DevicePool, HostPool
from serinus.sim.options import Options

_OLD_MAX = 64
"""Pages of earlier steps that may come again."""


class Damage:
    """The damage of one rank of one engine; asked around each forward pass."""

    def __init__(
        self, options: Options, pools: Mapping[Part, DevicePool], host: Mapping[Part, HostPool],
        chance: Callable[[float], bool], rng: Rng, struck: Callable[[str], None], *, undoes: bool,
    ) -> None:  # fmt: skip
        """`chance`: whether something of this probability happens now; `struck` is told the kind of what did; `undoes`:
        damage may put back what an earlier one changed."""
        self._options, self._chance, self._rng, self._struck, self._undoes = options, chance, rng, struck, undoes
        self._pools = [pool for pool in pools.values() if pool.page_bytes]
        self._parts = [part for part, pool in pools.items() if pool.page_bytes]
        self._host = {part: pool for part, pool in host.items() if pool.page_bytes}
        self._old: list[tuple[DevicePool, NDArray[np.int64], NDArray[np.uint8]]] = []
        self._hurt: dict[tuple[int, int], tuple[NDArray[np.uint64], NDArray[np.uint64]]] = {}
        """Of a page: its words before the first damage, and behind the last one."""

    def begin(self, batch: ForwardBatch, tables: Mapping[Part, torch.Tensor]) -> None:
        """The rows of a step are written; nothing of it is verified, loaded or computed yet."""
        options = self._options
        if options.stray or options.page:
            for pool in self._pools:
                page = self._page(pool)
                self._old.append((pool, page, pool.read_pages(page)))
            del self._old[:-_OLD_MAX]
        for name, act in (
            ("stray", self._stray), ("page", self._replace_page), ("bit", self._flip_kv), ("stamp", self._flip_stamp),
            ("host", self._flip_host),
        ):  # fmt: skip
            if self._chance(getattr(options, name)) and act():
                self._struck(name)
        if self._chance(options.row):
            self._change_row(batch, tables)

    def midway(self, batch: ForwardBatch) -> None:
        """All KV of the step is stored and read; nothing of it is stamped."""
        if not self._chance(self._options.midway):
            return
        at = self._rng.randrange(len(self._pools))
        pool, slots = self._pools[at], batch.slots_of(self._parts[at]).tolist()
        slot = self._rng.choice([slot for slot in slots if slot] or [pool.spec.page_size])
        half = self._rng.choice(self._rng.choice(pool.layers))
        page = np.array([slot // pool.spec.page_size])
        before, words = pool.read_pages(page), half[slot].view(torch.uint8).view(-1).numpy()
        words[self._rng.randrange(len(words))] ^= 1 << self._rng.randrange(8)
        self._remember(pool, page, before, pool.read_pages(page))
        self._struck("midway")

    def _page(self, pool: DevicePool) -> NDArray[np.int64]:
        return np.array([self._rng.randrange(1, pool.spec.page_count)])

    def _alike(self, pool: DevicePool, page: NDArray[np.int64]) -> NDArray[np.int64]:
        """A page of the same positions, by the stamps, where there is another one."""
        assert pool.stamps_LS4 is not None, "sim: damage in a world without a canary"
        firsts = pool.stamps_LS4[0, :: pool.spec.page_size, 1].numpy()
        alike = np.flatnonzero(firsts == firsts[page])
        alike = alike[(alike != 0) & (alike != page)]
        return alike[[self._rng.randrange(len(alike))]] if len(alike) else self._page(pool)

    def _stray(self) -> bool:
        """Late KV, without stamps."""
        if not self._old:
            return False
        pool, page, data = self._old.pop(self._rng.randrange(len(self._old)))
        now = pool.read_pages(page)
        now[:, : pool.spec.kv_bytes] = data[:, : pool.spec.kv_bytes]
        return self._write(pool, (page, now))

    def _replace_page(self) -> bool:
        """A page of another place, or of another time; the two places exchange what they hold every other time."""
        rng = self._rng
        if self._old and rng.random() < 0.5:
            pool, _, data = self._old.pop(rng.randrange(len(self._old)))
            return self._write(pool, (self._page(pool), data))
        pool = rng.choice(self._pools)
        one = self._page(pool)
        other = self._alike(pool, one) if rng.random() < 0.5 else self._page(pool)
        return self._write(pool, (one, pool.read_pages(other)), (other, pool.read_pages(one)))

    def _flip_kv(self) -> bool:
        pool = self._rng.choice(self._pools)
        return self._flip(pool, 0, pool.spec.kv_bytes)

    def _flip_stamp(self) -> bool:
        pool = self._rng.choice(self._pools)
        return self._flip(pool, pool.spec.kv_bytes, pool.page_bytes)

    def _flip(self, pool: DevicePool, low: int, high: int, page: NDArray[np.int64] | None = None) -> bool:
        page = self._page(pool) if page is None else page
        data = pool.read_pages(page)
        data[0, self._rng.randrange(low, high)] ^= 1 << self._rng.randrange(8)
        return self._write(pool, (page, data))

    def _write(self, pool: DevicePool, *writes: tuple[NDArray[np.int64], NDArray[np.uint8]]) -> bool:
        """Damage pages (of one row each), unless that would undo damage and this may not be: whether it was done."""
        if not self._undoes and any(self._is_undone(pool, page, data) for page, data in writes):
            return False
        for page, data in writes:
            self._remember(pool, page, pool.read_pages(page), data)
            pool.write_pages(page, data)
        return True

    def _is_undone(self, pool: DevicePool, page: NDArray[np.int64], data: NDArray[np.uint8]) -> bool:
        """Whether a word of a page would be sound again."""
        now = pool.read_pages(page)
        sound = self._sound(pool, page, now)
        return bool(((data.view(np.uint64) == sound) & (now.view(np.uint64) != sound)).any())

    def _sound(self, pool: DevicePool, page: NDArray[np.int64], now: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """The words of a page without the damage that it still has: what was written since is sound."""
        words = now.view(np.uint64)
        sound, left = self._hurt.get((id(pool), int(page[0])), (words, words))
        return np.where(words == left, sound, words)

    def _remember(
        self, pool: DevicePool, page: NDArray[np.int64], before: NDArray[np.uint8], after: NDArray[np.uint8]
    ) -> None:
        self._hurt[id(pool), int(page[0])] = self._sound(pool, page, before), after.view(np.uint64).copy()

    def _flip_host(self) -> bool:
        """Every other time the page of the device that it is a copy of changes too, if that is still there."""
        rng = self._rng
        if not self._host:
            return False
        part = rng.choice(tuple(self._host))
        host, pool = self._host[part], self._pools[self._parts.index(part)]
        page = rng.randrange(1, host.page_count)
        copied = (pool.read_pages(np.arange(pool.spec.page_count)) == host.data_PY[page]).all(1)
        host.data_PY[page, rng.randrange(host.page_bytes)] ^= 1 << rng.randrange(8)
        if copied[1:].any() and rng.random() < 0.5:
            self._flip(pool, 0, pool.spec.kv_bytes, page=np.flatnonzero(copied)[-1:])
        return True

    def _change_row(self, batch: ForwardBatch, tables: Mapping[Part, torch.Tensor]) -> None:
        """An entry that was written in an earlier step names any other slot."""
        rng, attention = self._rng, batch.attention
        lengths: Sequence[int] = (attention.q_starts_B1[1:] - attention.q_starts_B1[:-1]).tolist()
        rows = [
            (row, context - length)
            for row, context, length in zip(
                attention.rows_B.tolist(), attention.context_B.tolist(), lengths, strict=True
            )
            if context > length
        ]
        if not rows:
            return
        row, start = rng.choice(rows)
        at = rng.randrange(len(self._pools))
        spec = self._pools[at].spec
        tables[self._parts[at]][row, rng.randrange(start)] = rng.randrange(
            spec.page_size, spec.page_count * spec.page_size
        )
        self._struck("row")
