"""How a process ended that is somebody else's child, such as a worker of ``torchrun``.

Only its parent is told, and the parent need not tell anybody: torchrun's agent records the exit
codes of the last attempt only. But the kernel lets every process of the same user look: a process
that has ended stays in ``/proc`` until its parent asks for it, with its exit status, and a *pidfd*
becomes readable at that moment. Since Linux 6.15 the pidfd tells the status also afterwards.

Before that, a parent that asks within the time it takes to look is faster, and the status is not
known. An elastic agent asks ten times a second.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from pathlib import Path
from typing import Final

__all__ = ["exit_status_of", "parent_of"]

#: Fields of ``/proc/PID/stat`` after the command's closing bracket.
_STATE: Final = 0
_PARENT: Final = 1
_START_TICKS: Final = 19
_EXIT_CODE: Final = 49
#: ``PIDFD_GET_INFO``, whose argument is a ``struct pidfd_info`` of 64 bytes (linux/pidfd.h).
_GET_INFO: Final = 0xC040FF0B
_INFO_BYTES: Final = 64
_INFO_EXIT: Final = 1 << 3
_EXIT_CODE_AT: Final = 60


def exit_status_of(pidfd: int, pid: int, start_ticks: int) -> int | None:
    """How a process ended: its exit status, or minus a signal's number; ``None`` if unknown.

    Args:
        pidfd: Refers to the process.
        pid: Its process id.
        start_ticks: When it started, in clock ticks after boot.
    """
    code = _of_zombie(pid, start_ticks)
    if code is None:
        code = _of_pidfd(pidfd)
    return None if code is None else os.waitstatus_to_exitcode(code)


def parent_of(pid: int) -> int | None:
    """The parent of a process; ``None`` if there is no such process."""
    fields = _stat(pid)
    return int(fields[_PARENT]) if len(fields) > _PARENT else None


def _of_zombie(pid: int, start_ticks: int) -> int | None:
    fields = _stat(pid)
    if len(fields) <= _EXIT_CODE or fields[_STATE] not in "ZX":
        return None
    if int(fields[_START_TICKS]) != start_ticks:
        return None  # another one has its number by now
    return int(fields[_EXIT_CODE])


def _of_pidfd(pidfd: int) -> int | None:
    info = bytearray(_INFO_BYTES)
    struct.pack_into("<Q", info, 0, _INFO_EXIT)
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _GET_INFO, info)
        if struct.unpack_from("<Q", info)[0] & _INFO_EXIT:
            return int(struct.unpack_from("<i", info, _EXIT_CODE_AT)[0])
    return None


def _stat(pid: int) -> list[str]:
    try:
        # The command may hold spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
