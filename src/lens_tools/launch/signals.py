"""Which signals to pass on to the command: those that it has not got itself.

The command is in the process group of ``lens run``, so the terminal sends both of them Ctrl-C, and
so do ``timeout``, a shell's ``kill %1``, and a scheduler that signals each process of a job. To
pass those on would interrupt a launcher a second time, while it ends its workers. What was sent to
``lens run`` alone, though, is meant for the command.

The kernel says of the terminal's signals that they are. For the others there is a witness: a
process in the same group, with the arguments of the command, that does nothing. What it gets as
well, the command has got.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Final, NoReturn

__all__ = ["WATCHED", "Relay", "Witness", "block_signals", "is_interrupt", "stop", "taken_so_far"]

_PR_SET_PDEATHSIG: Final = 1
#: ``si_code`` of what the kernel sends, as it does for the terminal.
_SI_KERNEL: Final = 128
#: A scheduler signals the processes of a job one after the other.
_SAME_TIME_S: Final = 0.1
#: What the witness saw this long ago belongs to another signal of that number.
_LONG_AGO_NS: Final = 1_000_000_000
#: A program may put its terminal in order before it stops.
_STOPS_WITHIN_S: Final = 1.0
#: A signal's number and the time, as the witness tells it.
_SEEN: Final = struct.Struct("<Bq")
#: Field of ``/proc/PID/stat`` after the command's closing bracket: where the arguments lie.
_ARG_START: Final = 45

_INTERRUPTS: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
_PASSED_ON: Final[frozenset[int]] = frozenset(
    {
        *_INTERRUPTS,
        signal.SIGALRM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGTSTP,
        signal.SIGCONT,
        *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
    }
)
#: All signals that the main thread waits for.
WATCHED: Final[frozenset[int]] = _PASSED_ON | {signal.SIGCHLD}


def block_signals() -> Set[int]:
    """Keep all signals back from now on, for the main thread to wait for them.

    Returns:
        Those that were blocked before, and must be in the command.
    """
    # Where the parent ignores the end of its children, nobody would be told of that of ours.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)


def taken_so_far() -> list[int]:
    """The signals for the command that have come already, each once; they are taken."""
    taken: list[int] = []
    while (info := signal.sigtimedwait(_PASSED_ON, 0)) is not None:
        taken.append(info.si_signo)
    return taken


def is_interrupt(number: int) -> bool:
    """Whether a signal asks this process to end."""
    return number in _INTERRUPTS


class Witness:
    """A process that gets the signals that the command gets too; it ends with this one.

    To be started while there is one thread only.

    Args:
        arguments: The command's, which ``pkill -f`` goes by.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._pipe, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._seen_ns: dict[int, int] = {}
        self.pid = os.fork()
        if self.pid == 0:
            _bear_witness(tell, arguments)
        os.close(tell)

    def saw(self, number: int) -> bool:
        """Whether it got this signal at about this time."""
        deadline = time.monotonic() + _SAME_TIME_S
        while True:
            with contextlib.suppress(BlockingIOError):
                self._seen_ns.update(_SEEN.iter_unpack(os.read(self._pipe, 256 * _SEEN.size)))
            seen_ns = self._seen_ns.pop(number, None)
            if seen_ns is not None and time.monotonic_ns() - seen_ns < _LONG_AGO_NS:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)

    def end(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _bear_witness(tell: int, arguments: Sequence[str]) -> NoReturn:
    try:
        _show_arguments(arguments)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for stream in (0, 1, 2):
            with contextlib.suppress(OSError):
                os.close(stream)
        while True:
            number = signal.sigwait(_PASSED_ON)
            with contextlib.suppress(BlockingIOError):
                os.write(tell, _SEEN.pack(number, time.monotonic_ns()))
    finally:
        os._exit(0)  # not back into the program that it is a copy of


def _show_arguments(arguments: Sequence[str]) -> None:
    """Have ``/proc/self/cmdline`` show these; they must be no longer than what stands there."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
        shown = b"\0".join(map(os.fsencode, arguments)) + b"\0"
        if start and len(shown) <= end - start:
            ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


class Relay:
    """Passes signals on to the command.

    Args:
        child: Process id of the command.
        witness: Sees what is sent to all; ``None`` where there is none.
    """

    def __init__(self, child: int, witness: Witness | None) -> None:
        self._child = child
        self._witness = witness

    def lose_witness(self, pid: int) -> None:
        """Do without the witness if this is its process, which has ended."""
        if self._witness is not None and self._witness.pid == pid:
            self._witness = None

    def pass_on(self, info: signal.struct_siginfo) -> None:
        """Pass a signal on, unless the command has got it itself."""
        number = info.si_signo
        if number not in _PASSED_ON:
            return
        reached_all = info.si_code == _SI_KERNEL or (
            self._witness is not None and self._witness.saw(number)
        )
        # One that the command sent is not for the command.
        if not reached_all and info.si_pid != self._child:
            self.send(number)
        if number == signal.SIGTSTP and self._stops():
            stop()

    def _stops(self) -> bool:
        """Whether the command stops: first it, so that it reads nothing of a terminal in between.

        It may ignore the signal, and then goes on.
        """
        deadline = time.monotonic() + _STOPS_WITHIN_S
        stopped = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        while True:
            try:
                if os.waitid(os.P_PID, self._child, stopped) is not None:
                    return True
            except ChildProcessError:
                return False
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)

    def send(self, number: int) -> None:
        """Send the command a signal."""
        with contextlib.suppress(OSError):
            os.kill(self._child, number)


def stop() -> None:
    """Stop this process, as the command has stopped, so that a shell takes its terminal back."""
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
