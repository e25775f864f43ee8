"""Starts a command as a shell would, and ends in the way that it did."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Final, NoReturn

from lens_core.journal.process_identity import start_ticks

__all__ = [
    "Ended",
    "adopt_orphans",
    "end_like",
    "let_go_of_streams",
    "reap",
    "start",
    "start_error",
]

_PR_SET_CHILD_SUBREAPER: Final = 36
#: The interpreter ignores them, and what is ignored stays so in a new program.
_IGNORED_BY_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)
#: What a shell says with its exit status.
_NOT_FOUND: Final = 127
_NOT_EXECUTABLE: Final = 126


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that ended.

    Attributes:
        pid: Its process id.
        start_ticks: When it started, in clock ticks after boot; ``None`` if unknown.
        status: Its exit status, or minus the number of the signal that ended it.
    """

    pid: int
    start_ticks: int | None
    status: int


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends before them, where the system can do that.

    How they end is then told to this process, and not to the first process of the host.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(arguments: Sequence[str], signal_mask: Set[int]) -> int:
    """Start a command in this process group, with this process's files and environment.

    Args:
        arguments: Its name, looked for in ``PATH``, and its arguments.
        signal_mask: The signals that it is to start with as blocked.

    Returns:
        Its process id.

    Raises:
        OSError: it cannot be started; see :func:`start_error`.
    """
    # Not subprocess: that closes the files which a launcher before us hands to its ranks.
    mask = sorted(signal_mask)
    try:
        return os.posix_spawnp(
            arguments[0],
            list(arguments),
            os.environ,
            setsigmask=mask,
            setsigdef=_IGNORED_BY_PYTHON,
        )
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
    # A script without "#!" is one for the shell.
    script = shutil.which(arguments[0]) or arguments[0]
    return os.posix_spawn(
        "/bin/sh",
        ["/bin/sh", script, *arguments[1:]],
        os.environ,
        setsigmask=mask,
        setsigdef=_IGNORED_BY_PYTHON,
    )


def start_error(name: str, error: OSError) -> tuple[str, int]:
    """What to say of a command that cannot be started, and the exit status: 127 or 126."""
    if error.errno == errno.ENOENT:
        what = "no such file" if os.sep in name else "command not found"
        return f"{name}: {what}", _NOT_FOUND
    return f"{name}: {error.strerror or error}", _NOT_EXECUTABLE


def let_go_of_streams() -> None:
    """Hold standard input and output no longer: who is at the other end waits for the command."""
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        if nothing > 1:
            os.close(nothing)


def reap() -> Iterator[Ended]:
    """The children that have ended; each is gone when the next is asked for."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None:
            return
        exited = found.si_code == os.CLD_EXITED
        status = found.si_status if exited else -found.si_status
        yield Ended(found.si_pid, start_ticks(found.si_pid), status)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(found.si_pid, 0)


def end_like(status: int) -> NoReturn:
    """End this process in the way that another did, so that whoever waits for it sees no other.

    Args:
        status: The exit status, or minus the number of a signal.
    """
    if status < 0:
        number = -status
        with contextlib.suppress(OSError, ValueError):
            # The core that is worth a look is that of the command.
            resource.setrlimit(
                resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
            )
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError, ValueError):
            os.kill(os.getpid(), number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            time.sleep(0.1)
        # The first process of a container is not ended by its own signals.
        os._exit(128 + number)
    os._exit(status)
