"""The files that one process left behind, read together."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lens_core.journal.decoding import JournalSpan
from lens_core.journal.format import ANSWER_SUFFIX, ASK_SUFFIX, JOURNAL_SUFFIX, STACKS_SUFFIX
from lens_core.journal.notes import exit_note_path, read_exit_note, shipped_bytes, shipped_path
from lens_core.journal.process_identity import ProcessIdentity, boot_id
from lens_core.journal.read.liveness import Liveness, is_alive
from lens_core.journal.read.reader import (
    JournalContent,
    JournalError,
    JournalHead,
    read_head,
    read_journal,
)
from lens_core.journal.spill import SPILL_SUFFIX, SpillReader
from lens_core.shared_files import UNFINISHED_SUFFIX, open_regular, read_regular_text

__all__ = ["ProcessFiles", "UndeliveredSpans", "find_process_files", "remove_unfinished"]

_SPILL_NAME: Final = re.compile(rf"(?P<stem>.+)\.\d{{6}}{re.escape(SPILL_SUFFIX)}")
#: To make a journal, or to write one of the small files beside it, takes milliseconds.
_UNFINISHED_S: Final = 60.0
_MAX_STACKS: Final = 16_384


@dataclass(slots=True)
class UndeliveredSpans:
    """What one process recorded and nobody has delivered.

    Attributes:
        spans: Each span once, ended and open.
        meta: What is true of the process for its life.
        journal: The journal that they were read from; ``None`` where only spill files are left.
        problems: One line per piece that could not be read.
    """

    spans: list[JournalSpan]
    meta: Mapping[str, object]
    journal: JournalContent | None
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ProcessFiles:
    """The files of one process.

    Attributes:
        stem: What their paths begin with.
        journal: The file of the table; it may be gone.
        spills: Spill files, oldest first.
    """

    stem: Path
    journal: Path
    spills: tuple[Path, ...]

    @property
    def ask(self) -> Path:
        """The file that asks the process for its stacks."""
        return self.stem.with_name(self.stem.name + ASK_SUFFIX)

    @property
    def answer(self) -> Path:
        """The file with what it answers."""
        return self.stem.with_name(self.stem.name + ANSWER_SUFFIX)

    @property
    def stacks(self) -> Path:
        """The file that faulthandler wrote to."""
        return self.stem.with_name(self.stem.name + STACKS_SUFFIX)

    @property
    def exit_status(self) -> int | None:
        """How the process ended, where its launcher noted that."""
        return read_exit_note(self.stem)

    def liveness(self, head: JournalHead | None = None) -> Liveness:
        """Whether the process is still there.

        Args:
            head: Its journal, where that has been read.

        Raises:
            OSError: the journal cannot be read.
            JournalError: it is no journal.
        """
        if not self.journal.exists():
            return Liveness.DEAD  # its journal was closed, and only spill files are left
        try:
            head = head or read_head(self.journal)
        except JournalError:
            process = self._spilled_by()
            if process is None:
                raise
            # It may have given its journal up and live: that it does not map it proves nothing.
            judged = is_alive(process, self.journal)
            return Liveness.ALIVE if judged is Liveness.REPLACED else judged
        return Liveness.DEAD if head.closed else is_alive(head.process, self.journal)

    def _spilled_by(self) -> ProcessIdentity | None:
        """Which process wrote the spill files, where one of them says it."""
        for path in self.spills:
            with contextlib.suppress(OSError, ValueError):
                return ProcessIdentity.from_mapping(SpillReader(path).meta)
        return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Whether this process alone may recover these files, for the length of the block.

        False where somebody else is doing that, or has done it.
        """
        # Without spill files and with a journal that is gone, somebody else has recovered it.
        path = self.spills[0] if self.spills and not self.journal.exists() else self.journal
        try:
            file = open_regular(path)
        except OSError:
            yield False
            return
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            # It may have been recovered between the listing and the lock.
            yield os.fstat(file.fileno()).st_nlink > 0

    def last_stacks(self, head: JournalHead) -> tuple[int, str]:
        """The latest stacks of its threads, and when faulthandler wrote them.

        After a fatal signal that is the moment of its death, nearer than the last sign of life. The
        time is 0 where the stacks are those that it wrote itself when nothing moved, or there are
        none, or the files are a copy: the time would be that of the copying.
        """
        try:
            text = read_regular_text(self.stacks)
            written_ns = self.stacks.stat().st_mtime_ns
        except OSError:
            text, written_ns = "", 0
        if not text or written_ns < head.stacks_ns:
            return 0, head.stacks
        return written_ns if head.process.boot_id == boot_id() else 0, text[-_MAX_STACKS:]

    def read(self) -> UndeliveredSpans:
        """All spans that nobody has delivered.

        Raises:
            OSError: a file cannot be read.
            JournalError: the journal is none, or its head is damaged.
        """
        journal, problems = None, []
        try:
            journal = read_journal(self.journal) if self.journal.exists() else None
            problems = list(journal.problems) if journal is not None else []
        except JournalError as error:
            if not self.spills:
                raise
            problems.append(f"{self.journal}: {error}")  # what it spilled is whole
        meta: Mapping[str, object] = journal.meta if journal is not None else {}
        spilled: dict[int, JournalSpan] = {}
        done: set[int] = set()
        for path in self.spills:
            try:
                reader = SpillReader(path)
            except ValueError as error:
                problems.append(f"{path}: {error}")
                continue
            meta = meta or reader.meta
            done.update(span.span_id for span in reader.read(until=shipped_bytes(path)))
            spilled.update((span.span_id, span) for span in reader.read())
            done |= reader.exported
            if reader.problem:
                problems.append(reader.problem)
        spans = {
            span.span_id: span
            for span in [*spilled.values(), *(journal.spans if journal is not None else ())]
            if span.span_id not in done
        }
        return UndeliveredSpans(list(spans.values()), meta, journal, problems)

    def delete(self) -> None:
        """Delete the files, the table last: without it the others are not looked for first."""
        for path in self.spills:
            self.delete_spill(path)
        for path in (self.stacks, self.ask, self.answer, exit_note_path(self.stem)):
            path.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)

    def delete_spill(self, spill: Path) -> None:
        """Delete a spill file, and the note of what of it has been shipped."""
        shipped_path(spill).unlink(missing_ok=True)
        spill.unlink(missing_ok=True)

    def set_aside(self) -> None:
        """Keep files of which not all can be read under a name that is not looked for again."""
        for path in (*self.spills, self.journal):
            if path.exists():
                path.replace(path.with_name(path.name + ".damaged"))
        self.stacks.unlink(missing_ok=True)
        exit_note_path(self.stem).unlink(missing_ok=True)


def find_process_files(directory: Path) -> list[ProcessFiles]:
    """The processes that have files in a directory, by name."""
    spills: dict[str, list[Path]] = {}
    stems: set[str] = set()
    for path in sorted(directory.iterdir()):
        if path.name.endswith(JOURNAL_SUFFIX) and not path.name.startswith("."):
            stems.add(path.name[: -len(JOURNAL_SUFFIX)])
        elif match := _SPILL_NAME.fullmatch(path.name):
            spills.setdefault(match["stem"], []).append(path)
    return [
        ProcessFiles(
            directory / stem, directory / (stem + JOURNAL_SUFFIX), tuple(spills.get(stem, ()))
        )
        for stem in sorted(stems | set(spills))
    ]


def remove_unfinished(directory: Path) -> None:
    """Delete files whose writer was killed before they were complete: nothing is in them."""
    for path in directory.glob(f".spans-*{UNFINISHED_SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNFINISHED_S:
                path.unlink()
