"""Where one span stands in the table of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the table hands out slots, and each names its table
    from lens_core.journal.write.table import Table

__all__ = ["Slot"]


class Slot:
    """Where one span stands in the table.

    Attributes:
        block: Index of its first block.
        at: Offset of that block.
        generation: Seed of its checksums.
        cursor: Offset at which the next record goes.
        limit: Offset of the end of the block that ``cursor`` is in.
        more: Indices of the further blocks.
        thread: The thread that started the span.
    """

    __slots__ = ("at", "block", "cursor", "generation", "limit", "more", "table", "thread")

    def __init__(
        self, table: Table, block: int, at: int, generation: int, cursor: int, limit: int
    ) -> None:
        self.table = table
        self.block = block
        self.at = at
        self.generation = generation
        self.cursor = cursor
        self.limit = limit
        self.more: list[int] | None = None
        self.thread = 0
