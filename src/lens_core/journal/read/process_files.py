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
from lens_core.journal.exit_note import exit_note_path, read_exit_note
from lens_core.journal.format import (
    ANSWER_SUFFIX,
    ASK_SUFFIX,
    JOURNAL_SUFFIX,
    STACKS_SUFFIX,
    UNFINISHED_SUFFIX,
)
from lens_core.journal.opening import open_regular
from lens_core.journal.process_identity import ProcessIdentity
from lens_core.journal.read.liveness import Liveness, is_alive
from lens_core.journal.read.reader import JournalContent, JournalError, read_journal
from lens_core.journal.spill import SPILL_SUFFIX, SpillReader
from lens_core.whole_number import whole_number

__all__ = [
    "ProcessFiles",
    "Left",
    "find_process_files",
    "remove_unfinished",
    "shipped_bytes",
    "shipped_path",
]

_SPILL_NAME: Final = re.compile(rf"(?P<stem>.+)\.\d{{6}}{re.escape(SPILL_SUFFIX)}")
#: To make a journal takes milliseconds.
_UNFINISHED_S: Final = 60.0
_SHIPPED_SUFFIX: Final = ".shipped"


@dataclass(slots=True)
class Left:
    """What one process left behind and nobody has delivered.

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

    def liveness(self) -> Liveness:
        """Whether the process is still there.

        Raises:
            OSError: the journal cannot be read.
            JournalError: it is no journal.
        """
        if not self.journal.exists():
            return Liveness.DEAD  # its journal was closed, and only spill files are left
        try:
            image = read_journal(self.journal)
        except JournalError:
            process = self._spilled_by()
            if process is None:
                raise
            # It may have given its journal up and live: that it does not map it proves nothing.
            judged = is_alive(process, self.journal)
            return Liveness.ALIVE if judged is Liveness.REPLACED else judged
        return Liveness.DEAD if image.closed else is_alive(image.process, self.journal)

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

    def read(self) -> Left:
        """All spans that nobody has delivered.

        Raises:
            OSError: a file cannot be read.
            JournalError: the journal is none, or its head is damaged.
        """
        image, problems = None, []
        try:
            image = read_journal(self.journal) if self.journal.exists() else None
            problems = list(image.problems) if image is not None else []
        except JournalError as error:
            if not self.spills:
                raise
            problems.append(f"{self.journal}: {error}")  # what it spilled is whole
        meta: Mapping[str, object] = image.meta if image is not None else {}
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
            for span in [*spilled.values(), *(image.spans if image is not None else ())]
            if span.span_id not in done
        }
        return Left(list(spans.values()), meta, image, problems)

    def delete(self) -> None:
        """Delete the files, the table last: without it the others are not looked for first."""
        for path in self.spills:
            shipped_path(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        for path in (self.stacks, self.ask, self.answer, exit_note_path(self.stem)):
            path.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)


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
    """Delete journals whose process was killed before they were complete: nothing is in them."""
    for path in directory.glob(f".spans-*{JOURNAL_SUFFIX}{UNFINISHED_SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNFINISHED_S:
                path.unlink()


def shipped_path(spill: Path) -> Path:
    """The file that says how much of a spill file has been shipped."""
    return spill.with_name(spill.name + _SHIPPED_SUFFIX)


def shipped_bytes(spill: Path) -> int:
    """How much of a spill file has been shipped."""
    try:
        text = shipped_path(spill).read_text(errors="replace")
    except OSError:
        return 0
    return whole_number(text) or 0
