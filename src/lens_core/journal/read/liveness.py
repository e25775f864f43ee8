"""Whether the process that wrote a journal is still there.

A process id alone does not tell: ids are used again, and ``exec`` keeps the id while it discards
the spans. So a process counts as alive if one with its id and its start time exists *and* still has
the journal mapped. What cannot be decided from here (another host, another namespace of process
ids) is ``UNKNOWN``, and is never touched unless the caller knows better.
"""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

from lens_core.journal.process_identity import (
    ProcessIdentity,
    boot_id,
    host_name,
    pid_namespace,
    start_ticks,
)

__all__ = ["Liveness", "is_alive"]


class Liveness(Enum):
    """What is known of a process."""

    ALIVE = "alive"
    DEAD = "dead"
    #: The process is there, but it has replaced its program by ``exec``.
    REPLACED = "replaced"
    UNKNOWN = "unknown"


def is_alive(process: ProcessIdentity, journal: Path) -> Liveness:
    """Whether a process still writes the journal at this path."""
    here = boot_id()
    if not here or process.boot_id != here:
        # The same host after a restart: nothing from before it is alive.
        rebooted = bool(here) and process.host == host_name()
        return Liveness.DEAD if rebooted else Liveness.UNKNOWN
    if process.pid_namespace != pid_namespace():
        return Liveness.UNKNOWN
    if start_ticks(process.pid) != process.start_ticks:
        return Liveness.DEAD
    mapped = _maps(process.pid, journal)
    if mapped is None:
        return Liveness.ALIVE  # not ours to look into: better safe
    if mapped:
        return Liveness.ALIVE
    return Liveness.DEAD if _is_zombie(process.pid) else Liveness.REPLACED


def _maps(pid: int, journal: Path) -> bool | None:
    """Whether a process has a file mapped; ``None`` if the system does not tell."""
    try:
        found = os.stat(journal)
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
        needle = f" {device} {found.st_ino} "
        with open(f"/proc/{pid}/maps", errors="replace") as maps:
            return any(needle in line for line in maps)
    except OSError:
        return None


def _is_zombie(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return True
    return not fields or fields[0] in "ZX"
