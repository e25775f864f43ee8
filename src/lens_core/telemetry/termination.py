"""SIGTERM: telemetry is saved also while the main thread is stuck inside of a collective.

Python runs signal handlers on the main thread, between two bytecodes. A main thread that waits in C
for a peer that is gone never gets there, and is killed some seconds later with all that was not yet
sent. The interpreter does write each signal's number to a *wake-up file descriptor* at once, in C;
a thread reads it and saves what there is.

What was there before keeps its meaning: the default still kills the process (after telemetry is
saved), an ignored signal stays ignored, and a handler is called as if nothing had been installed.
A process that handles SIGTERM goes on living, so its open spans are left open, unless the main
thread shows no sign of life.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Final

__all__ = ["TerminationGuard"]

_STOP: Final = b"\0"


class TerminationGuard:
    """Saves telemetry on SIGTERM, then lets happen what would have happened.

    Args:
        flush: Sends what has ended, within a number of seconds.
        save: Ends open spans too, for a reason, then sends, within a number of seconds.
        deadline_s: How long saving may take.
        grace_s: How long the main thread may take to react before it counts as stuck.
    """

    def __init__(
        self,
        *,
        flush: Callable[[float], None],
        save: Callable[[str, float], None],
        deadline_s: float = 5.0,
        grace_s: float = 1.0,
    ) -> None:
        self._flush = flush
        self._save = save
        self._deadline_s = deadline_s
        self._grace_s = grace_s
        self._previous: Callable[[int, FrameType | None], object] | int | None = None
        self._handler = self._handle  # one object, so that identity tells whether it is installed
        self._installed = False
        self._owns_wakeup = False
        self._reacted = False
        self._pipe: tuple[int, int] | None = None
        fork = weakref.WeakMethod(self._after_fork)
        os.register_at_fork(after_in_child=lambda: (method := fork()) and method())

    def install(self) -> bool:
        """Start to guard; whether that was possible.

        Not possible outside of the main thread, and not where SIGTERM is ignored or handled by
        code that Python does not know: neither may be replaced.
        """
        if self._installed or threading.current_thread() is not threading.main_thread():
            return self._installed
        previous = signal.getsignal(signal.SIGTERM)
        if previous is None or previous is signal.SIG_IGN:
            return False
        read_fd, write_fd = self._pipe = os.pipe()
        os.set_blocking(write_fd, False)
        self._previous = previous
        try:
            signal.signal(signal.SIGTERM, self._handler)
        except ValueError:  # a sub-interpreter
            self._close_pipe()
            return False
        other = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        self._owns_wakeup = other == -1
        if not self._owns_wakeup:
            signal.set_wakeup_fd(other)  # an event loop's; then only the handler tells us
        self._installed = True
        threading.Thread(
            target=self._watch, args=(read_fd,), name="lens-signals", daemon=True
        ).start()
        return True

    def uninstall(self) -> None:
        """Put back what was there, where that is possible: on the main thread, if still ours."""
        if not self._installed:
            return
        self._installed = False
        if threading.current_thread() is threading.main_thread():
            self._put_back()
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], _STOP)

    def _put_back(self) -> None:
        with contextlib.suppress(ValueError, TypeError):
            if signal.getsignal(signal.SIGTERM) is self._handler and self._previous is not None:
                signal.signal(signal.SIGTERM, self._previous)
            if self._owns_wakeup and self._pipe is not None:
                current = signal.set_wakeup_fd(-1)
                if current not in (-1, self._pipe[1]):
                    signal.set_wakeup_fd(current)
        self._owns_wakeup = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Runs on the main thread. Must not wait: that thread may hold any lock."""
        self._reacted = True
        if not self._installed:
            if self._previous is signal.SIG_DFL:
                _die(signum)
        elif self._pipe is not None:
            # Also where the wake-up descriptor was ours: an event loop may have taken it since.
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], bytes([signum]))
        if callable(self._previous):
            self._previous(signum, frame)

    def _watch(self, read_fd: int) -> None:
        while True:
            try:
                signals = os.read(read_fd, 64)
            except OSError:
                return
            if not signals or _STOP[0] in signals:
                self._close_pipe()
                return
            if signal.SIGTERM in signals:
                self._on_sigterm()

    def _on_sigterm(self) -> None:
        give_up_at = time.monotonic() + self._deadline_s
        ours = signal.getsignal(signal.SIGTERM) is self._handler
        if ours and self._previous is signal.SIG_DFL:
            self._save("SIGTERM", self._deadline_s)
            _die(signal.SIGTERM)
        before = _position_of_main_thread()
        react_until = time.monotonic() + self._grace_s
        self._flush(self._deadline_s / 2)
        while time.monotonic() < react_until:
            if (ours and self._reacted) or _position_of_main_thread() != before:
                return
            time.sleep(0.02)
        self._save("SIGTERM", max(0.0, give_up_at - time.monotonic()))

    def _close_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None
        for descriptor in pipe or ():
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _after_fork(self) -> None:
        # The pipe is shared with the parent: a signal of the child must not wake its thread.
        if self._installed:
            self._installed = False
            self._put_back()
            self._close_pipe()


def _position_of_main_thread() -> tuple[int, int] | None:
    frame = sys._current_frames().get(threading.main_thread().ident or -1)
    return None if frame is None else (id(frame), frame.f_lasti)


def _die(signum: int) -> None:
    """End this process by the signal, from any thread."""
    with contextlib.suppress(Exception):
        # signal.signal() works on the main thread only, which may be the one that is stuck.
        ctypes.CDLL(None).signal(signum, None)
        os.kill(os.getpid(), signum)
        time.sleep(1.0)
    os._exit(128 + signum)
