"""The stacks of all threads, beside the journal: on a fatal signal, and when somebody asks.

The standard library's :mod:`faulthandler` writes them from C, so it also works while C code holds
the interpreter lock, which is when a hang is hardest to see. It is turned on for fatal signals only
where nobody did so before: the application's choice of file stands.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from lens_core.diagnostics import describe, diagnostics
from lens_core.journal.format import STACKS_SUFFIX

__all__ = ["StacksFile", "choose_signal", "live_stacks", "stacks_path"]

#: Real-time signals: unlike SIGUSR1 and SIGUSR2, no scheduler or launcher gives them a meaning.
_FIRST_SIGNAL: Final = 7
_SIGNALS: Final = 8
_MAX_FRAMES: Final = 30
_MAX_THREADS: Final = 20


class StacksFile:
    """The file that faulthandler writes to, for one process.

    Args:
        signal_number: The signal that asks for the stacks; 0 for none.
    """

    def __init__(self, signal_number: int) -> None:
        self._signal = signal_number
        self._descriptor = -1
        self._enabled = False

    def open(self, stem: Path) -> None:
        """Write to the file beside a journal from now on."""
        path = stacks_path(stem)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            if self._enabled or not faulthandler.is_enabled():
                faulthandler.enable(descriptor, all_threads=True)
                self._enabled = True
            if self._signal:
                faulthandler.register(self._signal, descriptor, all_threads=True, chain=False)
        except (OSError, RuntimeError, ValueError) as error:
            diagnostics.record("journal.no_stacks", describe(error))
            return
        before, self._descriptor = self._descriptor, descriptor
        if before >= 0:
            os.close(before)

    def close(self) -> None:
        """Undo :meth:`open`, as far as nobody else has replaced it."""
        if self._descriptor < 0:
            return
        if self._signal:
            faulthandler.unregister(self._signal)
        if self._enabled:
            faulthandler.disable()
            self._enabled = False
        os.close(self._descriptor)
        self._descriptor = -1


def stacks_path(stem: Path) -> Path:
    """The file with the stacks that belongs to a journal's path without suffix."""
    return stem.with_name(stem.name + STACKS_SUFFIX)


def choose_signal() -> int:
    """A signal that nobody in this process uses; 0 if there is none."""
    first = getattr(signal, "SIGRTMIN", None)
    if first is None:
        return 0
    for number in range(first + _FIRST_SIGNAL, first + _FIRST_SIGNAL + _SIGNALS):
        if signal.getsignal(number) is signal.SIG_DFL:
            return int(number)
    return 0


def live_stacks(*, skip: int | None = None) -> str:
    """The stacks of all threads but one, innermost frame first, in the form of faulthandler.

    Needs the interpreter lock and no file: it names source lines, it does not read them.
    """
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    order = sorted(frames, key=lambda ident: (ident != main, ident))
    lines: list[str] = []
    for ident in order[:_MAX_THREADS]:
        if ident == skip:
            continue
        lines.append(f"Thread {ident:#018x} [{threads.get(ident, '?')}] (most recent call first):")
        lines.extend(
            f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
            for frame in _outwards(frames[ident])
        )
    return "\n".join(lines) + "\n"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
