"""From set-up to the end of the process: how telemetry ends, whatever ends the process.

Whatever the reason, the same happens within one deadline: open spans are ended and marked, metrics
are collected a last time, and what is queued is sent or else written to a file.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from lens_core.telemetry.control_thread import ControlThread
from lens_core.telemetry.export.files import LineFile
from lens_core.telemetry.metrics.meters import Meters
from lens_core.telemetry.pipeline.delivery import DeliveryCounts
from lens_core.telemetry.pipeline.span_pipeline import SpanPipeline
from lens_core.telemetry.termination import TerminationGuard

__all__ = ["AnyDelivery", "Lifetime"]

_log = logging.getLogger("lens_core")

#: Share of a deadline for ending spans and collecting metrics; the rest is for sending.
_PREPARE_SHARE = 0.4
#: Least time that exporters get to shut down, also where sending used up the deadline.
_CLOSE_S = 0.2


class AnyDelivery(Protocol):
    """A :class:`~lens_core.telemetry.pipeline.delivery.Delivery` of any signal."""

    counts: DeliveryCounts
    signal: str

    def flush(self, timeout_s: float) -> bool:
        """Send what is queued."""

    def hurry(self, timeout_s: float) -> None:
        """Start to send with one attempt each."""

    def settle(self) -> bool:
        """Wait for that, then spill the rest."""

    def close(self) -> None:
        """Take nothing more."""


class Lifetime:
    """Ends telemetry exactly once.

    Args:
        pipeline: Knows the open spans.
        deliveries: Of all signals.
        meters: The metrics half of the set-up.
        spill_file: Where what could not be sent is kept.
        deadline_s: Of an end that nobody called for with a deadline of its own.
    """

    def __init__(
        self,
        pipeline: SpanPipeline,
        deliveries: Sequence[AnyDelivery],
        meters: Meters,
        spill_file: LineFile,
        *,
        deadline_s: float = 5.0,
    ) -> None:
        self._pipeline = pipeline
        self._deliveries = tuple(deliveries)
        self._meters = meters
        self._spill_file = spill_file
        self._release: Callable[[], None] | None = None
        self._deadline_s = deadline_s
        # Re-entrant: a signal handler may stop while the thread that it interrupts does.
        self._stop_lock = threading.RLock()
        self._stopped = False
        self._exit_reason = "exit"
        self._previous_hook = sys.excepthook
        self._hook = self._on_uncaught
        self.control = ControlThread()
        pipeline.exit_reason = lambda: "SIGTERM" if self._guard.was_signalled() else "exit"
        self._guard = TerminationGuard(flush=self.flush, save=self._save, deadline_s=deadline_s)

    def start(self, release: Callable[[], None]) -> None:
        """Watch for the end of the process.

        Args:
            release: Undoes what the set-up did to the process: providers, groups, log handlers.
        """
        self._release = release
        self.control.start()
        self._guard.install()
        sys.excepthook = self._hook
        atexit.register(self._at_exit)
        # multiprocessing ends its children with os._exit, past atexit; it runs its own finalizers.
        multiprocessing.util.register_after_fork(self, Lifetime._in_multiprocessing_child)
        if multiprocessing.parent_process() is not None:
            Lifetime._in_multiprocessing_child(self)  # set up in such a child
        fork = weakref.WeakMethod(self._after_fork)
        os.register_at_fork(after_in_child=lambda: (method := fork()) and method())
        if self._meters.reader is not None:
            self._meters.reader.start()

    def on_child_start(self) -> None:
        """The first span of a forked child: from now on it has telemetry of its own to save."""
        self._guard.install()
        if self._meters.reader is not None:
            self._meters.reader.start()

    def flush(self, timeout_s: float) -> None:
        """Send what is queued, within a deadline."""
        deadline = time.monotonic() + timeout_s
        for delivery in self._deliveries:
            delivery.flush(max(0.0, deadline - time.monotonic()))

    def stop(self, reason: str, timeout_s: float) -> bool:
        """End telemetry; whether everything was sent. A second call does nothing."""
        with self._stop_lock:
            if self._stopped:
                return True
            self._stopped = True
        deadline = time.monotonic() + timeout_s
        complete = False
        try:
            if self._release is not None:
                self._release()

            def prepare() -> None:
                self._pipeline.truncate(reason)
                self._meters.shut_down()

            # Not on this thread: it may be a signal handler's, and hold the lock of a span.
            self.control.run(prepare, timeout_s * _PREPARE_SHARE)
            complete = self._settle(deadline)
            left_s = max(0.0, deadline - time.monotonic())
            self.control.run(self._pipeline.shutdown, min(left_s, timeout_s * (1 - _PREPARE_SHARE)))
            # An exporter may take its time to shut down.
            self.control.run(self._close, max(_CLOSE_S, deadline - time.monotonic()))
        except BaseException:
            # An impatient interrupt: what is not sent yet goes to the file at once.
            self._settle(time.monotonic())
            raise
        finally:
            self.control.stop()
            self._unwatch()
            self._report()
        return complete and self._spill_file.path is None

    def _close(self) -> None:
        for delivery in self._deliveries:
            delivery.close()

    def counts(self) -> Mapping[str, int]:
        """What became of spans, metrics and logs so far, such as ``spans.sent``."""
        totals: dict[str, int] = {}
        for delivery in self._deliveries:
            for name in ("sent", "rejected", "spilled", "dropped", "lost", "failed_attempts"):
                key = f"{delivery.signal}.{name}"
                totals[key] = totals.get(key, 0) + getattr(delivery.counts, name)
        return totals

    def _save(self, reason: str, timeout_s: float) -> None:
        """End spans and send, as the process may be killed; keep working, as it may not."""
        deadline = time.monotonic() + timeout_s
        self._pipeline.truncate(reason)
        if self._meters.reader is not None:
            self._meters.reader.collect_now()
        self._settle(deadline)
        # Elsewhere, with a limit: the thread that is stuck may hold the lock of a log handler.
        self.control.run(self._report, 0.5)

    def _settle(self, deadline: float) -> bool:
        for delivery in self._deliveries:
            delivery.hurry(max(0.0, deadline - time.monotonic()))
        complete = True
        for delivery in self._deliveries:
            complete = delivery.settle() and complete
        return complete

    def _unwatch(self) -> None:
        atexit.unregister(self._at_exit)
        self._guard.uninstall()
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook

    def _report(self) -> None:
        counts = self.counts()
        bad = {
            name: count
            for name, count in counts.items()
            if count and name.partition(".")[2] in ("rejected", "spilled", "dropped", "lost")
        }
        if bad:
            text = ", ".join(f"{name} {count}" for name, count in bad.items())
            path = self._spill_file.path
            where = f" What could not be sent is in {path}." if path is not None else ""
            _log.warning("telemetry ended incompletely: %s.%s", text, where)

    def _at_exit(self) -> None:
        self.stop(self._exit_reason, self._deadline_s)

    def _on_uncaught(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        self._exit_reason = "uncaught_exception"
        self._previous_hook(kind, error, traceback)

    def _after_fork(self) -> None:
        self._stop_lock = threading.RLock()

    @staticmethod
    def _in_multiprocessing_child(lifetime: Lifetime) -> None:
        if not lifetime._stopped:
            multiprocessing.util.Finalize(None, lifetime._at_exit, exitpriority=-100)
