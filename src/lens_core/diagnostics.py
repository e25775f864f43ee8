"""What went wrong and was survived: counted, and logged once per kind with what to do.

Telemetry never raises into a training step, so a failure needs another way to be seen. Every
such failure is an *diagnostic* of a named kind. The first of a kind in a process is logged at
WARNING; all are counted, and the counts can be read by a person (on the spans), by a metric, or
by a test.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Mapping

__all__ = ["Diagnostics", "describe", "diagnostics"]

_log = logging.getLogger("lens_core")


def describe(error: BaseException) -> str:
    """The exception's class and text, for a log line; never raises.

    The text of what a foreign provider, exporter or propagator raises is foreign code too.
    """
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except Exception:  # noqa: BLE001 - a broken __str__ must not become a second failure
        return f"{kind}: <str() of the exception failed>"


class Diagnostics:
    """Counts diagnostics by kind and logs the first of each kind.

    Thread-safe. A kind is a short dotted name, such as ``"carrier.rejected"``. The counters only
    grow; to see what a piece of code did, compare :meth:`counts` before and after it.
    """

    def __init__(self) -> None:
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)
        self._counts: Counter[str] = Counter()

    def _renew_lock(self) -> None:
        # Re-entrant: a signal handler may record one while its thread is recording another. New
        # after a fork: another thread of the parent may have held it.
        self._lock = threading.RLock()

    def record(self, kind: str, what: str, *, todo: str = "") -> None:
        """Count one diagnostic; log the first of its kind in this process.

        Never raises.

        Args:
            kind: Short dotted name that is counted.
            what: What happened, for the log line.
            todo: What the reader can do about it, for the log line.
        """
        with self._lock:
            self._counts[kind] += 1
            first = self._counts[kind] == 1
        if first:
            advice = f" {todo}" if todo else ""
            # A handler or filter of the application may raise.
            with contextlib.suppress(Exception):
                _log.warning("%s: %s.%s Further ones are only counted.", kind, what, advice)

    def count(self, kind: str) -> int:
        """How many diagnostics of this kind this process has seen."""
        with self._lock:
            return self._counts[kind]

    def counts(self) -> Mapping[str, int]:
        """A snapshot: kind to count, for all kinds seen so far."""
        with self._lock:
            return dict(self._counts)


#: The diagnostics of this process.
diagnostics = Diagnostics()
