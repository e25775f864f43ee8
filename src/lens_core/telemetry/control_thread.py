"""A thread that waits for work, so that none has to be started when it is too late for that.

Threads cannot be started while the interpreter exits, and starting one inside of a signal handler
may deadlock. What must run off the calling thread under a deadline runs here.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence

from lens_core.diagnostics import describe, diagnostics

__all__ = ["ControlThread"]


class ControlThread:
    """Runs functions on a thread of its own, and ``ticks`` about once per ``tick_s``."""

    def __init__(self, ticks: Sequence[Callable[[], None]] = (), *, tick_s: float = 1.0) -> None:
        self.ticks = list(ticks)
        self._tick_s = tick_s
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        fork = weakref.WeakMethod(self._after_fork)
        os.register_at_fork(after_in_child=lambda: (method := fork()) and method())

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="lens-control", daemon=True)
        self._thread.start()

    def run(self, action: Callable[[], None], timeout_s: float) -> bool:
        """Run an action there and wait for it; whether it was done in time.

        In a forked child, which has no such thread, it runs here.
        """
        thread = self._thread
        if thread is None or not thread.is_alive() or thread is threading.current_thread():
            _guarded(action)
            return True
        done = threading.Event()

        def task() -> None:
            try:
                _guarded(action)
            except BaseException as error:  # noqa: BLE001 - such as the panic of a Rust exporter
                diagnostics.record("control.failed", describe(error))
            finally:
                done.set()

        self._tasks.put(task)
        return done.wait(timeout_s)

    def stop(self) -> None:
        """End the thread after what it is doing; does not wait."""
        self._tasks.put(None)

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=self._tick_s if self.ticks else None)
            except queue.Empty:
                for tick in list(self.ticks):
                    _guarded(tick)
                continue
            if task is None:
                return
            task()

    def _after_fork(self) -> None:
        self._thread = None
        self._tasks = queue.SimpleQueue()


def _guarded(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - nothing may end this thread
        diagnostics.record("control.failed", describe(error))
