"""How a process ended, as far as that can be known afterwards."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

from lens_core.journal.process_identity import boot_id, oom_kills
from lens_core.journal.read.liveness import Liveness
from lens_core.journal.read.reader import JournalHead
from lens_core.shared_files import read_regular_text

__all__ = ["death_reason"]

#: No span started, changed or ended in the last minute of its life.
_HANG_NS: Final = 60_000_000_000
_FATAL: Final = (
    ("Fatal Python error: Aborted", "sigabrt"),
    ("Fatal Python error: Segmentation fault", "sigsegv"),
    ("Fatal Python error: Bus error", "sigbus"),
    ("Fatal Python error: Floating", "sigfpe"),
    ("Fatal Python error: Illegal instruction", "sigill"),
    ("Fatal Python error:", "sigabrt"),
)


def death_reason(
    journal: JournalHead, liveness: Liveness, *, stacks: Path, exit_status: int | None = None
) -> str:
    """Why the open spans of a journal were cut off.

    Args:
        journal: The journal.
        liveness: What is known of its process.
        stacks: The file that faulthandler of that process wrote to.
        exit_status: How the process ended, if its parent told: minus the number of the signal, or
            the exit status.

    Returns:
        ``shutdown`` (closed in good order), ``exec``, the name of a signal such as ``sigkill``,
        ``oom``, ``exit`` (without clean-up), ``hang`` (nothing had moved in the last minute) or
        ``unknown``.
    """
    if journal.closed:
        return "shutdown"
    if liveness is Liveness.REPLACED:
        return "exec"
    killed_for_memory = _oom_killed(journal)
    if exit_status is not None:
        if exit_status >= 0:
            return "exit"
        if -exit_status == signal.SIGKILL and killed_for_memory:
            return "oom"
        try:
            return signal.Signals(-exit_status).name.lower()
        except ValueError:
            return "unknown"
    try:
        written = read_regular_text(stacks)
    except OSError:
        written = ""
    for text, reason in _FATAL:
        if text in written:
            return reason
    if killed_for_memory:
        return "oom"
    if journal.beat is not None and journal.beat.time_ns - journal.beat.activity_ns >= _HANG_NS:
        return "hang"
    return "unknown"


def _oom_killed(journal: JournalHead) -> bool:
    """Whether a process of its cgroup was killed for want of memory since its last sign of life."""
    if journal.process.boot_id != boot_id():
        return False  # the counter of that name is here another one
    before = journal.process.oom_kills if journal.beat is None else journal.beat.oom_kills
    now = oom_kills(journal.process.cgroup_events)
    return now is not None and now > before
