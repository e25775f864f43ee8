"""Finds journals that were created since a command began; looks only where a directory changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lens_core.journal.format import JOURNAL_SUFFIX
from lens_core.whole_number import whole_number

__all__ = ["NewJournals"]

#: What changed this recently may change again without a later time stamp.
_RECENT_NS: Final = 2_000_000_000
#: A clock may be set back by so much.
_CLOCK_STEP_NS: Final = 60_000_000_000


@dataclass(slots=True)
class NewJournals:
    """The journals below some directories that are newer than this object.

    Attributes:
        roots: Directories of journals, each with one directory per run.
    """

    roots: Sequence[Path]
    _began_ns: int = field(default_factory=time.time_ns)
    _known: set[Path] = field(default_factory=set)
    _changed_ns: dict[str, int] = field(default_factory=dict)

    def new(self) -> Iterator[Path]:
        """Those that were not there when it was asked before."""
        for root in self.roots:
            for entry in _entries(root, os.DirEntry.is_dir):
                if not self._has_changed(entry.path):
                    continue
                for file in _entries(entry.path, _is_journal):
                    path = Path(file.path)
                    if path not in self._known:
                        self._known.add(path)
                        if _created_ns(path) >= self._began_ns - _CLOCK_STEP_NS:
                            yield path

    def _has_changed(self, directory: str) -> bool:
        try:
            found = os.stat(directory)
        except OSError:
            return False
        if found.st_uid != os.getuid():
            return False
        before = self._changed_ns.get(directory)
        self._changed_ns[directory] = found.st_mtime_ns
        return before != found.st_mtime_ns or time.time_ns() - found.st_mtime_ns < _RECENT_NS


def _entries(
    directory: str | Path, wanted: Callable[[os.DirEntry[str]], bool]
) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return [entry for entry in entries if wanted(entry)]
    except OSError:
        return []  # no process has begun yet, or it is not ours


def _is_journal(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(JOURNAL_SUFFIX) and not entry.name.startswith(".")


def _created_ns(journal: Path) -> int:
    """When a journal was created, by its name: others may have left thousands that are older."""
    text = journal.name.removesuffix(JOURNAL_SUFFIX).rpartition("-")[2]
    created_ns = whole_number(text)
    return time.time_ns() if created_ns is None else created_ns
