"""RequestTable: req_to_token, the device table from (row, position) to slot. Follows the plan; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serinus.core.errors import ConfigError, InvariantError
from serinus.core.plan import TableWrite

__all__ = ["RequestTable"]


class RequestTable:
    """int32 [rows, context]; row 0 is padding. Entries that no plan wrote are 0, the padding slot."""

    def __init__(self, rows: int, context: int, device: str = "cpu") -> None:
        if rows < 2 or context < 1:
            raise ConfigError(
                f"pool: table of {rows} rows, {context} positions; expected at least 2 (row 0 is padding) and 1"
            )
        self.table: torch.Tensor = torch.zeros((rows, context), dtype=torch.int32, device=device)
        """The table itself, as kernels read it."""

    def apply(self, table_writes: Sequence[TableWrite]) -> None:
        """Carry out the writes of a plan, in order.

        Raises:
            InvariantError: a write leaves the table or goes to the padding row.
        Cost: 4 bytes a slot written.
        """
        rows, context = self.table.shape
        for write in table_writes:
            end = write.start + len(write.slots)
            if not (1 <= write.row < rows and 0 <= write.start <= end <= context):
                raise InvariantError(
                    f"pool: table write to row {write.row}, positions {write.start} .. {end - 1}, "
                    f"expected row 1 .. {rows - 1}, positions 0 .. {context - 1}"
                )
            self.table[write.row, write.start : end] = torch.from_numpy(write.slots).to(self.table.device)
