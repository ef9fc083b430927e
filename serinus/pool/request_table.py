"""RequestTable: req_to_token, the device table from (row, position) to slot. Follows the plan; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.core.errors import ConfigError, InvariantError
from serinus.core.plan import TableWrite


class RequestTable:
    """int32 [rows, context]; row 0 is padding. Entries that no plan wrote are 0, the padding slot."""

    def __init__(self, rows: int, context: int, device: str = "cpu") -> None:
        if rows < 2 or context < 1:
            raise ConfigError(
                f"pool: table of {rows} rows, {context} positions; expected at least 2 (row 0 is padding) and 1"
            )
        self.table: torch.Tensor = torch.zeros((rows, context), dtype=torch.int32, device=device)
        """The table itself, as kernels read it."""
        self._twins: list[torch.Tensor] = []
        self._staged: tuple[torch.Tensor, ...] | None = None
        """Places in the table and what goes there."""

    def twin(self) -> RequestTable:
        """A table beside this one that gets the same writes; nothing is found by it."""
        rows, context = self.table.shape
        twin = RequestTable(rows, context, self.table.device.type)
        self._twins.append(twin.table)
        return twin

    def stage(
        self, table_writes: Sequence[TableWrite], put: Callable[[NDArray[np.int64]], torch.Tensor] | None = None
    ) -> None:
        """Take the writes of a plan, in order; `write` carries them out.

        Args:
            put: brings an array to the table's device; None = by a copy of its own.
        Raises:
            InvariantError: a write leaves the table or goes to the padding row.
        """
        self._staged = None
        if not table_writes:
            return
        rows, context = self.table.shape
        places: list[NDArray[np.int64]] = []
        for write in table_writes:
            end = write.start + len(write.slots)
            if not (1 <= write.row < rows and 0 <= write.start <= end <= context):
                raise InvariantError(
                    f"pool: table write to row {write.row}, positions {write.start} .. {end - 1}, "
                    f"expected row 1 .. {rows - 1}, positions 0 .. {context - 1}"
                )
            places.append(np.arange(write.row * context + write.start, write.row * context + end, dtype=np.int64))
        places_N, slots_N = np.concatenate(places), np.concatenate([write.slots for write in table_writes])
        if len({write.row for write in table_writes}) < len(table_writes):  # of several to one entry the last counts
            places_N, last_N = np.unique(places_N[::-1], return_index=True)
            slots_N = slots_N[::-1][last_N]
        if put is None:
            self._staged = tuple(torch.from_numpy(each).to(self.table.device) for each in (places_N, slots_N))
        else:
            self._staged = put(places_N), put(slots_N)

    def write(self) -> None:
        """Carry out what was staged. Cost: 4 bytes a slot; no host wait."""
        if self._staged is None:
            return
        (places_N, slots_N), self._staged = self._staged, None
        slots_N = slots_N.int()
        for table in (self.table, *self._twins):
            table.view(-1).index_copy_(0, places_N, slots_N)

    def apply(self, table_writes: Sequence[TableWrite]) -> None:
        """First `stage`, then `write`."""
        self.stage(table_writes)
        self.write()
