"""Ships what live processes spill, and recovers what dead ones leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lens_core.journal.decoding import JournalSpan
from lens_core.journal.notes import shipped_bytes, write_shipped_bytes
from lens_core.journal.read.liveness import Liveness
from lens_core.journal.read.process_files import ProcessFiles, find_process_files
from lens_core.journal.recover.recovery import RecoveryResult, RecoverySink, recover
from lens_core.journal.recover.truncation import readable_spans
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
    recovered: RecoveryResult = field(default_factory=RecoveryResult)
    problems: list[str] = field(default_factory=list)


class Shipper:
    """Delivers the spans of all processes that have a journal below a directory.

    A span is delivered once, unless this process is killed between the delivery and its note of
    it: then it is delivered again, with the same ids.

    Args:
        root: A directory of journals, or one that holds one such directory per run.
        sink: Where spans go.
    """

    def __init__(self, root: Path, sink: RecoverySink) -> None:
        self._root = root
        self._sink = sink
        self._readers: dict[Path, SpillReader] = {}

    def round(self) -> Round:
        """Deliver all that is there now. Never raises for what it finds there."""
        result = Round()
        for directory in self._directories():
            for files in self._processes(directory, result):
                try:
                    self._ship(files, result)
                except (OSError, ValueError) as error:
                    for path in files.spills:
                        self._readers.pop(path, None)  # read again from what is noted as shipped
                    result.problems.append(f"{files.stem.name}: {error}")
        result.recovered = recover(self._directories(), lambda meta: self._sink)
        result.problems.extend(result.recovered.problems)
        return result

    def _directories(self) -> list[Path]:
        try:
            return [self._root, *sorted(path for path in self._root.iterdir() if path.is_dir())]
        except OSError:
            return []  # no process has begun yet

    def _processes(self, directory: Path, result: Round) -> list[ProcessFiles]:
        try:
            return [files for files in find_process_files(directory) if files.spills]
        except OSError as error:
            result.problems.append(f"{directory}: {error.strerror or error}")
            return []

    def _ship(self, files: ProcessFiles, result: Round) -> None:
        if files.liveness() is not Liveness.ALIVE:
            return  # recovery delivers all of it
        with files.locked() as mine:
            if not mine:
                return
            for path in files.spills:
                result.shipped += self._ship_file(path)
            # The process still appends to the last one, and recovery compares the table with it.
            for path in files.spills[:-1]:
                self._readers.pop(path, None)
                files.delete_spill(path)

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
            spans = [span for span in batch if span.span_id not in reader.exported]
            self._sink.deliver(path.name, readable_spans(spans, reader.meta, reason=""))
            write_shipped_bytes(path, reader.offset)
            count += len(spans)
        return count


def _batches(spans: Iterator[JournalSpan]) -> Iterator[list[JournalSpan]]:
    batch: list[JournalSpan] = []
    for span in spans:
        batch.append(span)
        if len(batch) >= _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
