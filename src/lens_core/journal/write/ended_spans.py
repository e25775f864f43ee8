"""The ended spans of this process that nobody has delivered yet: in the table, or spilled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from lens_core.diagnostics import diagnostics
from lens_core.journal.spill import SpilledSpan, SpillFile
from lens_core.journal.write.table import Slot, Table

__all__ = ["SPILL_BATCH", "EndedSpans"]

SPILL_BATCH: Final = 256
#: Ids of spilled spans that an exporter may still acknowledge; it holds far fewer in its queue.
_MAX_SPILLED: Final = 100_000


class EndedSpans:
    """Keeps ended spans until they are exported, and moves them to a file where room runs out.

    Args:
        spill: The file.
        awaits_export: Whether an exporter of this process delivers spilled spans too.

    Attributes:
        in_table: Slot and end of each span that stands in the table, oldest first, by span id.
    """

    def __init__(self, spill: SpillFile, *, awaits_export: bool) -> None:
        self.in_table: dict[int, tuple[Slot, int]] = {}
        self._file = spill
        self._awaits_export = awaits_export
        # As an ordered set: the value is always true.
        self._spilled: dict[int, bool] = {}
        self._forgotten = 0

    def __len__(self) -> int:
        """How many stand in the table or a spill file and are not yet exported."""
        return len(self.in_table) + len(self._spilled) + self._forgotten

    def forget(self, span_ids: Iterable[int]) -> None:
        """Forget spans, which somebody else keeps from now on."""
        spilled = []
        for span_id in span_ids:
            waiting = self.in_table.pop(span_id, None)
            if waiting is not None:
                waiting[0].table.release(waiting[0])
            elif self._spilled.pop(span_id, False):
                spilled.append(span_id)
        if spilled:
            try:
                self._file.write_exported(spilled)
            except OSError as error:
                _report(error)

    def spill(self, table: Table, *, keep_free: int) -> None:
        """Move spans to the file, oldest first, until so many blocks are free."""
        while table.live and table.free_blocks < keep_free and self.in_table:
            batch: list[tuple[Slot, SpilledSpan]] = []
            while len(batch) < SPILL_BATCH and (oldest := self._pop_oldest()) is not None:
                batch.append(oldest)
            try:
                self._file.write(spilled for _, spilled in batch)
            except OSError as error:
                for slot, spilled in batch:
                    self.in_table[spilled.span_id] = (slot, spilled.end_ns)
                    self._spilled.pop(spilled.span_id, None)
                _report(error)
                return
            for slot, _ in batch:
                slot.table.release(slot)

    def close(self, *, delete: bool) -> None:
        """Close the file; delete it where nobody needs it any more."""
        self._file.close(delete=delete)

    def _pop_oldest(self) -> tuple[Slot, SpilledSpan] | None:
        while self.in_table:
            try:
                span_id = next(iter(self.in_table))
            except (StopIteration, RuntimeError):
                continue  # another thread changed it in between
            self._spilled[span_id] = True
            waiting = self.in_table.pop(span_id, None)
            if waiting is None:
                self._spilled.pop(span_id, None)
                continue
            if not self._awaits_export:
                self._spilled.pop(span_id, None)
            elif len(self._spilled) > _MAX_SPILLED:
                self._spilled.pop(next(iter(self._spilled)), None)
                self._forgotten += 1
            slot, end_ns = waiting
            stream = slot.table.stream(slot)
            return slot, SpilledSpan(span_id, slot.generation, end_ns, stream)
        return None


def _report(error: OSError) -> None:
    diagnostics.record(
        "journal.spill_failed",
        f"ended spans cannot be moved out of the journal: {error}",
        todo="Make room in the directory of the journal (NEMO_LENS_JOURNAL_DIR).",
    )
