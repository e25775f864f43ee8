"""What others note beside the files of a process: how it ended, and how much has been shipped.

After a SIGKILL only the parent knows, and only at that moment, while the journal may be recovered
by anybody at any time: by the next attempt of the run, say. So who knows writes it down at once.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from lens_core.journal.format import EXIT_SUFFIX, JOURNAL_SUFFIX
from lens_core.shared_files import read_regular_text, write_atomically
from lens_core.whole_number import whole_number

__all__ = [
    "exit_note_path",
    "read_exit_note",
    "shipped_bytes",
    "shipped_path",
    "write_exit_note",
    "write_shipped_bytes",
]

#: An exit status, or minus the number of a signal.
_STATUS: Final = re.compile(r"-?[0-9]{1,3}")
_SHIPPED_SUFFIX: Final = ".shipped"


def exit_note_path(stem: Path) -> Path:
    """The note that belongs to a journal's path without suffix."""
    return stem.with_name(stem.name + EXIT_SUFFIX)


def read_exit_note(stem: Path) -> int | None:
    """How the process of a journal ended; ``None`` if nobody noted that."""
    try:
        text = read_regular_text(exit_note_path(stem)).strip()
    except OSError:
        return None
    return int(text) if _STATUS.fullmatch(text) else None


def write_exit_note(journal: Path, status: int) -> None:
    """Note how the process of a journal ended; nothing where the journal is gone.

    Args:
        journal: The path of the journal.
        status: Its exit status, or minus the number of the signal that ended it.

    Raises:
        OSError: it cannot be written.
    """
    note = exit_note_path(journal.with_name(journal.name[: -len(JOURNAL_SUFFIX)]))
    if not journal.exists():
        return  # recovered already
    write_atomically(note, [b"%d\n" % status])
    if not journal.exists():
        # Recovered between the two looks: nobody would delete the note any more.
        note.unlink(missing_ok=True)


def shipped_path(spill: Path) -> Path:
    """The note that belongs to a spill file."""
    return spill.with_name(spill.name + _SHIPPED_SUFFIX)


def shipped_bytes(spill: Path) -> int:
    """How much of a spill file has been shipped."""
    try:
        text = read_regular_text(shipped_path(spill))
    except OSError:
        return 0
    return whole_number(text) or 0


def write_shipped_bytes(spill: Path, offset: int) -> None:
    """Note how much of a spill file has been shipped.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(shipped_path(spill), [str(offset).encode()])
