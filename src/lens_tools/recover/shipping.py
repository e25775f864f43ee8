"""Ships what live processes spill, and recovers what dead ones leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lens_core.journal.decoding import JournalSpan
from lens_core.journal.read.liveness import Liveness
from lens_core.journal.read.process_files import (
    Left,
    ProcessFiles,
    find_process_files,
    shipped_bytes,
    shipped_path,
)
from lens_core.journal.recover.recovery import (
    Recovered,
    RecoveredSink,
    readable_spans,
    recover,
)
from lens_core.journal.spill import SpillReader

__all__ = ["Round", "Shipper"]

_BATCH: Final = 2048


@dataclass(slots=True)
class Round:
    """What one round did.

    Attributes:
        shipped: Spans of live processes that were delivered.
        recovered: Processes that were found dead, and what became of their spans.
        problems: One line per file that could not be read or delivered; it is tried again.
    """

    shipped: int = 0
    recovered: Recovered = field(default_factory=Recovered)
    problems: list[str] = field(default_factory=list)


class Shipper:
    """Delivers the spans of all processes that have a journal below a directory.

    A span is delivered once, unless this process is killed between the delivery and its note of
    it: then it is delivered again, with the same ids.

    Args:
        root: A directory of journals, or one that holds one such directory per run.
        sink: Where spans go.
    """

    def __init__(self, root: Path, sink: RecoveredSink) -> None:
        self._root = root
        self._sink = sink
        self._readers: dict[Path, SpillReader] = {}

    def round(self) -> Round:
        """Deliver all that is there now. Never raises for what it finds there."""
        result = Round()
        for directory in self._directories():
            for family in self._families(directory, result):
                try:
                    self._ship(family, result)
                except (OSError, ValueError) as error:
                    for path in family.spills:
                        self._readers.pop(path, None)  # read again from what is noted as shipped
                    result.problems.append(f"{family.stem.name}: {error}")
        result.recovered = recover(self._directories(), lambda meta: self._sink)
        result.problems.extend(result.recovered.problems)
        return result

    def _directories(self) -> list[Path]:
        try:
            return [self._root, *sorted(path for path in self._root.iterdir() if path.is_dir())]
        except OSError:
            return []  # no process has begun yet

    def _families(self, directory: Path, result: Round) -> list[ProcessFiles]:
        try:
            return [family for family in find_process_files(directory) if family.spills]
        except OSError as error:
            result.problems.append(f"{directory}: {error.strerror or error}")
            return []

    def _ship(self, family: ProcessFiles, result: Round) -> None:
        if family.liveness() is not Liveness.ALIVE:
            return  # recovery delivers all of it
        with family.locked() as mine:
            if not mine:
                return
            for path in family.spills:
                result.shipped += self._ship_file(path)
            # The process still appends to the last one, and recovery compares the table with it.
            for path in family.spills[:-1]:
                self._readers.pop(path, None)
                path.unlink()
                shipped_path(path).unlink(missing_ok=True)

    def _ship_file(self, path: Path) -> int:
        reader = self._readers.get(path)
        if reader is None:
            reader = self._readers[path] = SpillReader(path)
            for _ in reader.read(until=shipped_bytes(path)):
                pass  # only for the instrumentation scopes that stand there
        if path.stat().st_size <= reader.offset:
            return 0
        count = 0
        for batch in _batches(reader.read()):
            wanted = [span for span in batch if span.span_id not in reader.exported]
            left = Left(wanted, reader.meta, None)
            self._sink.deliver(path.name, readable_spans(left, reason=""))
            _note_shipped(path, reader.offset)
            count += len(wanted)
        return count


def _note_shipped(spill: Path, offset: int) -> None:
    part = shipped_path(spill).with_suffix(".part")
    part.write_text(str(offset))
    os.replace(part, shipped_path(spill))


def _batches(spans: Iterator[JournalSpan]) -> Iterator[list[JournalSpan]]:
    batch: list[JournalSpan] = []
    for span in spans:
        batch.append(span)
        if len(batch) >= _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
