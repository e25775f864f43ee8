"""SIGTERM: telemetry is saved also while the main thread is stuck inside of a collective.

Python runs signal handlers on the main thread, between two bytecodes. A main thread that waits in C
for a peer that is gone never gets there, and is killed some seconds later with all that was not yet
sent. So a thread of ours reads the signal's number from a pipe. The interpreter writes it there at
once, in C; but of its *wake-up file descriptor* there is only one, which an event loop with signal
handlers takes, and leaves none behind. So the compiled part writes it too, from a C handler before
Python's. Both are looked after once a second, and the handler too, which a loop leaves at default.

What was there before keeps its meaning: the default still kills the process (after telemetry is
saved), an ignored signal stays ignored, and a handler is called as if nothing had been installed.
A process that handles SIGTERM goes on living, so its open spans are left open, unless the main
thread shows no sign of life.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Final

from lens_core.native import signal_watch
from lens_core.telemetry.main_thread import on_main_thread

__all__ = ["TerminationGuard"]

_STOP: Final = b"\0"
_LOOK_AFTER_EVERY_S: Final = 1.0


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
        self._reacted = False
        self._signalled = False
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
        self._installed = True
        self._watch_c_handler()
        self._take_wakeup_fd()
        threading.Thread(
            target=self._watch, args=(read_fd,), name="lens-signals", daemon=True
        ).start()
        return True

    def was_signalled(self) -> bool:
        """Whether SIGTERM came, also where the thread that is told of it has not run since."""
        if not self._signalled and self._pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                return bool(select.select([self._pipe[0]], [], [], 0)[0])
        return self._signalled

    def uninstall(self) -> None:
        """Put back what was there, if it is still ours; on the main thread, at once or soon."""
        if not self._installed:
            return
        self._installed = False
        if threading.current_thread() is threading.main_thread():
            self._end()
        else:
            on_main_thread(self._end)

    def _end(self) -> None:
        self._put_back()
        if self._pipe is not None:  # closed by who reads it, when nobody writes to it any more
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], _STOP)

    def _put_back(self) -> None:
        with contextlib.suppress(ValueError, TypeError):
            if signal.getsignal(signal.SIGTERM) is self._handler and self._previous is not None:
                signal.signal(signal.SIGTERM, self._previous)
        if self._pipe is not None:
            _swap_wakeup_fd(self._pipe[1], -1)

    def _watch_c_handler(self) -> None:
        """Have the pipe told of each SIGTERM by a C handler in front of Python's; on any thread."""
        if self._installed and self._pipe is not None and signal_watch is not None:
            signal_watch.watch_signal(signal.SIGTERM, self._pipe[1])

    def _take_wakeup_fd(self) -> None:
        """The same by the wake-up descriptor, if nobody has it; on the main thread."""
        if self._installed and self._pipe is not None:
            _swap_wakeup_fd(-1, self._pipe[1])

    def _look_after(self) -> None:
        """Put back what an event loop took when it closed, and what a new handler took."""
        self._watch_c_handler()
        at_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if signal_watch is None or (at_default and self._previous is signal.SIG_DFL):
            on_main_thread(self._restore)

    def _restore(self) -> None:
        if not self._installed:
            return
        if self._previous is signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handler)
        self._watch_c_handler()
        self._take_wakeup_fd()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Runs on the main thread. Must not wait: that thread may hold any lock."""
        self._reacted = self._signalled = True
        if not self._installed:
            if self._previous is signal.SIG_DFL:
                _die(signum)
        elif self._pipe is not None:
            # Also where C has told us: an event loop may have taken what does.
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], bytes([signum]))
        if callable(self._previous):
            self._previous(signum, frame)

    def _watch(self, read_fd: int) -> None:
        while True:
            try:
                if not select.select([read_fd], [], [], _LOOK_AFTER_EVERY_S)[0]:
                    self._look_after()
                    continue
                signals = os.read(read_fd, 64)
            except (OSError, ValueError):
                return
            if not signals or _STOP[0] in signals:
                self._close_pipe()
                return
            self._signalled = True
            if signal.SIGTERM in signals:  # once or twice
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
        if pipe is not None and signal_watch is not None:
            signal_watch.unwatch_signal(pipe[1])
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


def _swap_wakeup_fd(expected: int, wanted: int) -> None:
    """Set the interpreter's wake-up descriptor if it is the expected one."""
    with contextlib.suppress(ValueError):  # not on the main thread
        found = signal.set_wakeup_fd(wanted, warn_on_full_buffer=False)
        if found not in (expected, wanted):
            signal.set_wakeup_fd(found)  # an event loop's; then only the handler tells us


def _die(signum: int) -> None:
    """End this process by the signal, from any thread."""
    with contextlib.suppress(Exception):
        # signal.signal() works on the main thread only, which may be the one that is stuck.
        ctypes.CDLL(None).signal(signum, None)
        os.kill(os.getpid(), signum)
        time.sleep(1.0)
    os._exit(128 + signum)
