"""Finds the journals of a command's processes, and notes beside them how these end.

Looks for new journals five times a second, and only where a directory has changed. A process is one
of the command's if it descends from this one.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lens_core.journal.notes import write_exit_note
from lens_core.journal.process_identity import boot_id, pid_namespace, start_ticks
from lens_core.journal.read.reader import JournalError, JournalHead, read_head
from lens_core.semconv import NV_DL_RANK
from lens_tools.launch.child import Ended
from lens_tools.launch.exits import exit_status_of, parent_of
from lens_tools.launch.new_journals import NewJournals

__all__ = ["ExitWatch", "Watched"]

_INTERVAL_S: Final = 0.2
_MAX_DEPTH: Final = 256


@dataclass(slots=True)
class Watched:
    """A process of the command that has a journal.

    Attributes:
        journal: The file.
        pid: Its process id.
        start_ticks: When it started, in clock ticks after boot.
        rank: Its global rank, where it has one.
        ships: Whether an agent delivers its spans.
        pidfd: Refers to it while it lives; -1 otherwise.
        status: How it ended; ``None`` while that is not known.
        ended_in_order: Whether it had closed its journal when it ended.
    """

    journal: Path
    pid: int
    start_ticks: int
    rank: int | None
    ships: bool
    pidfd: int = -1
    status: int | None = None
    ended_in_order: bool = False

    @property
    def name(self) -> str:
        """How it is called for people."""
        process = f"process {self.pid}"
        return process if self.rank is None else f"rank {self.rank} ({process})"


@dataclass(slots=True)
class ExitWatch:
    """Watches over the processes of a command.

    Attributes:
        roots: Directories of journals, each with one directory per run.
        ancestor: Whose descendants belong to the command.
        found: Its processes that have, or had, a journal, in the order in which they were found.
        ended: Those of them that ended, in the order in which they did.
    """

    roots: Sequence[Path]
    ancestor: int
    found: list[Watched] = field(default_factory=list)
    ended: list[Watched] = field(default_factory=list)
    _journals: NewJournals = field(init=False)
    _reaped: dict[tuple[int, int], int] = field(default_factory=dict)
    _living: dict[int, Watched] = field(default_factory=dict)
    _wake: tuple[int, int] = field(default_factory=lambda: os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
    _stopped: threading.Event = field(default_factory=threading.Event)
    _asked: int = 0
    _answered: int = 0
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._journals = NewJournals(self.roots)

    def start(self) -> None:
        """Watch from now on, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="lens-run-watch", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Look a last time, and watch no longer."""
        self._stopped.set()
        self._rouse()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def look_again(self) -> None:
        """Look at once; :attr:`has_looked` until then says that this was not done yet."""
        self._asked += 1
        self._rouse()

    @property
    def has_looked(self) -> bool:
        """Whether all journals that were there at the last :meth:`look_again` are known."""
        return self._answered == self._asked

    def note(self, child: Ended) -> None:
        """Take down how a child of this process ended; before it is reaped."""
        if child.start_ticks is not None:
            self._reaped[child.pid, child.start_ticks] = child.status

    @property
    def living(self) -> list[Watched]:
        """The processes that have a journal and have not ended."""
        return list(self._living.values())

    @property
    def directories(self) -> list[Path]:
        """The directories of the journals that are not an agent's to deliver."""
        named = dict.fromkeys(one.journal.parent for one in self.found if not one.ships)
        return [path for path in named if path.is_dir()]

    @property
    def statuses(self) -> Mapping[int, int]:
        """How processes ended, by process id, as far as that is known."""
        return {one.pid: one.status for one in self.ended if one.status is not None}

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake[1], b"\0")

    def _run(self) -> None:
        last = False
        while not last:
            last = self._stopped.is_set()
            asked = self._asked
            # A fault here must cost no more than the reasons of deaths.
            with contextlib.suppress(Exception):
                self._look()
            with contextlib.suppress(Exception):
                self._see_ends(0.0 if last or asked != self._answered else _INTERVAL_S)
            self._answered = asked

    def _look(self) -> None:
        for path in self._journals.new():
            try:
                head = read_head(path)
            except (OSError, JournalError):
                continue
            process = head.process
            if process.boot_id != boot_id() or process.pid_namespace != pid_namespace():
                continue
            rank = head.attributes.get(NV_DL_RANK)
            one = Watched(
                path,
                process.pid,
                process.start_ticks,
                rank if isinstance(rank, int) else None,
                head.meta.get("keeps") == "ship",
            )
            reaped = self._reaped.get((process.pid, process.start_ticks))
            if reaped is not None:
                self.found.append(one)
                self._end(one, reaped)
            elif start_ticks(process.pid) == process.start_ticks and self._descends(process.pid):
                self.found.append(one)
                self._follow(one)

    def _follow(self, one: Watched) -> None:
        with contextlib.suppress(OSError, AttributeError):
            pidfd = os.pidfd_open(one.pid)
            if start_ticks(one.pid) == one.start_ticks:
                one.pidfd = pidfd
                self._living[pidfd] = one
            else:
                os.close(pidfd)

    def _see_ends(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._wake[0], select.POLLIN)
        for pidfd in self._living:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(timeout_s * 1000):
            if pidfd == self._wake[0]:
                os.read(pidfd, 4096)
                continue
            one = self._living.pop(pidfd)
            status = exit_status_of(pidfd, one.pid, one.start_ticks)
            if status is None:
                status = self._reaped.get((one.pid, one.start_ticks))
            os.close(pidfd)
            one.pidfd = -1
            self._end(one, status)

    def _end(self, one: Watched, status: int | None) -> None:
        one.status = status
        with contextlib.suppress(OSError):
            if status is not None:
                write_exit_note(one.journal, status)
        one.ended_in_order = _is_closed(one.journal)
        self.ended.append(one)

    def _descends(self, pid: int | None) -> bool:
        for _ in range(_MAX_DEPTH):
            if pid is None or pid <= 1:
                return False
            if pid == self.ancestor:
                return True
            pid = parent_of(pid)
        return False


def _is_closed(journal: Path) -> bool:
    """Whether a process has closed its journal; it deletes it where all has been exported."""
    try:
        head: JournalHead = read_head(journal)
    except FileNotFoundError:
        return True
    except (OSError, JournalError):
        return False
    return head.closed
