"""HostCheck: verifies pages of one rank's host tier before they are stored, and after they were read from the storage.

Copies to the host and back are verified on the device, when the pages are used again; a page that goes to the storage
leaves the engine, so it is verified before: every slot's stamps against the tokens, positions and chain hashes
that the leader says, and the digest of every byte. It runs in the threads of the storage, while the page is in a cache.

Shapes: G = pages, S = slots of a page, P = pages of a pool, Y = bytes of one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.canary.commands import HostFindings
from serinus.canary.lanes import PartLanes
from serinus.canary.violation import Violation, host_tag
from serinus.core.moves import PageOrigin
from serinus.core.parts import Part
from serinus.core.stamps import STAMP_BYTES, STAMP_FIELDS
from serinus.kernels import Kernels, Reason, row_elements, stamp_lanes
from serinus.kernels.canary import differing
from serinus.pool import HostPool

_CHAINS_KEPT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostPart:
    """What is known of one part's pages."""

    data_PY: NDArray[np.uint8]
    kv_bytes: int
    row_bytes: int
    coefficients: Any
    """On the CPU; None = no KV is digested."""


class HostCheck:
    """A PageCheck of the storage, and an AnswerSource of the rank: what it finds is told to the leader."""

    def __init__(
        self, host: Mapping[Part, HostPool], lanes: Mapping[Part, PartLanes], page_size: int, kernels: Kernels
    ) -> None:
        """`lanes`: of the device pools that the host stands behind. `kernels`: of the CPU."""
        self._page_size, self._kernels = page_size, kernels
        self._parts: dict[Part, _HostPart] = {}
        for part, own in lanes.items():
            pool, rows = host[part], own.layers_kv[0][0]
            self._parts[part] = _HostPart(
                data_PY=pool.data_PY,
                kv_bytes=pool.page_bytes - page_size * part.halves * STAMP_BYTES,
                row_bytes=row_elements(rows) * rows.element_size(),
                coefficients=None if own.coefficients_L22W is None else own.coefficients_L22W.cpu().contiguous(),
            )
        self._lock = threading.Lock()
        self._chains: list[tuple[PageOrigin, NDArray[np.int64]]] = []
        self._found: list[Violation] = []
        self.slots = 0
        """How many were verified so far."""

    @property
    def busy(self) -> bool:
        """A finding is there before the answer of the storage operation that led to it: that one is looked for."""
        return False

    @property
    def holdings(self) -> Mapping[str, int]:
        return {}

    def answers(self) -> tuple[HostFindings, ...]:
        """What was found since the last call."""
        with self._lock:
            found, self._found = self._found, []
        return (HostFindings(violations=tuple(found)),) if found else ()

    def __call__(
        self, part: Part, pages_G: NDArray[np.int32], origin: PageOrigin | None, first: int
    ) -> NDArray[np.bool_]:
        """Which pages are sound; of each other one a violation is noted. See PageCheck. Where their tokens are not
        known, they must be those of the stamps themselves.

        Cost: one read of the pages on the calling thread (benchmarks/tiers.py), and some 50 us a call.
        """
        own = self._parts.get(part)
        if own is None:
            return np.ones(len(pages_G), np.bool_)
        size, pages = self._page_size, pages_G.astype(np.int64)
        raw = np.ascontiguousarray(own.data_PY[pages, own.kv_bytes :])
        stored = raw.view(np.int64).reshape(len(pages), 2 * part.halves, size, STAMP_FIELDS)
        wanted = self._wanted(stored, origin, first)
        if own.coefficients is not None:
            found_GS2 = self._kernels.page_digests(own.data_PY, pages, size, own.row_bytes, own.coefficients)
            wanted[:, part.halves :, :, 3] = found_GS2[..., : part.halves].transpose(0, 2, 1)
        sound: NDArray[np.bool_] = (stored == wanted).all((1, 2, 3))
        with self._lock:
            self.slots += len(pages) * size
            for at in np.flatnonzero(~sound).tolist():
                self._found.append(self._violation(part, int(pages[at]), stored[at], wanted[at]))
        return sound

    def _wanted(self, stored: NDArray[np.int64], origin: PageOrigin | None, first: int) -> NDArray[np.int64]:
        """The stamps that the pages should have, without digests."""
        wanted = np.zeros_like(stored)
        pages, lanes, size, _ = stored.shape
        tail = lanes // 2
        if origin is None:
            wanted[..., :3] = stored[:, tail, None, :, :3]
            return wanted
        begin = first * size
        end = begin + pages * size
        chain = int(stored[0, tail, 0, 2]) if origin.chain is None else origin.chain
        if origin.chain is None:  # not known: these pages must agree among themselves
            hashes = self._kernels.chain_hashes(origin.tokens[begin:end], origin.start + begin, chain)
            before = np.concatenate(([chain], hashes[:-1]))
        else:
            before = self._hashes(origin)[begin:end]
        shape = (pages, 1, size)
        wanted[..., 0] = origin.tokens[begin:end].reshape(shape)
        wanted[..., 1] = np.arange(origin.start + begin, origin.start + end).reshape(shape)
        wanted[..., 2] = before.reshape(shape)
        return wanted

    def _hashes(self, origin: PageOrigin) -> NDArray[np.int64]:
        """The chain hash before each token; kept, as an operation is carried out in shares."""
        with self._lock:
            for known, hashes in self._chains:
                if known is origin:
                    return hashes
        assert origin.chain is not None, "canary: hashes of pages whose chain is not known"
        behind = self._kernels.chain_hashes(origin.tokens, origin.start, origin.chain)
        hashes = np.concatenate((np.array([origin.chain], np.int64), behind[:-1]))
        with self._lock:
            self._chains = [*self._chains[1 - _CHAINS_KEPT :], (origin, hashes)]
        return hashes

    def _violation(self, part: Part, page: int, stored: NDArray[np.int64], wanted: NDArray[np.int64]) -> Violation:
        """Of one page: the first slot that is wrong, and the lane where it is, a stamp with a digest before others."""
        size = self._page_size
        wrong_LS = (stored != wanted).any(2)
        offset = int(wrong_LS.any(0).argmax())
        lanes = stamp_lanes(part)
        lane = next(lane for lane in np.roll(range(len(lanes)), part.halves).tolist() if wrong_LS[lane, offset])
        token, position, chain, digest = stored[lane, offset].tolist()
        right = wanted[lane, offset].tolist()
        reasons = differing(token, position, chain, digest, *right)  # type: ignore[no-untyped-call]
        return Violation(
            step=0, tag=host_tag(lanes[lane], part), reasons=Reason(reasons), part=part, slot=page * size + offset,
            page=page, position=right[1], stored_position=position, stored_token=token, expected_token=right[0],
            stored_hash=chain, expected_hash=right[2], stored_digest=digest, found_digest=right[3],
        )  # fmt: skip
