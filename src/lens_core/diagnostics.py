"""What went wrong and was survived: counted by kind, logged once per kind and remedy.

Telemetry never raises into a training step, so a failure needs another way to be seen. Every such
failure is a *diagnostic* of a named kind. All are counted, and the metric ``lens.diagnostics`` has
the counts. The first of a kind in a process is logged at WARNING, and so is the first of each
further remedy: of two bad settings, both are named. A remedy's text says what to do and not how it
was this time, and where one varies all the same, :data:`MAX_REMEDIES` bounds what is logged and
remembered. ``docs/diagnostics.md`` lists all kinds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

__all__ = ["MAX_REMEDIES", "Diagnostics", "describe", "diagnostics"]

_log = logging.getLogger("lens_core")

#: Most remedies that are logged of one kind. More than any kind has in this code but
#: ``config.invalid``, which has one for each setting.
MAX_REMEDIES: Final = 16


#: Characters of what a foreign error says: one may quote a whole message, or a page.
_MAX_TEXT: Final = 2_000


def describe(error: BaseException) -> str:
    """The exception's class and text, for a log line; never raises.

    The text of what a foreign provider, exporter or propagator raises is foreign code too.
    """
    kind = type(error).__name__
    try:
        text = f"{kind}: {error}"
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    except Exception:  # noqa: BLE001 - a broken __str__ must not become a second failure
        return f"{kind}: <str() of the exception failed>"


class Diagnostics:
    """Counts diagnostics by kind and logs the first of each kind and remedy.

    Safe in threads, forks and signal handlers. A kind is a short dotted name, such as
    ``"carrier.rejected"``. The counters only grow; to see what a piece of code did, compare
    :meth:`counts` before and after it.
    """

    def __init__(self) -> None:
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, set[str]] = {}

    def _renew_lock(self) -> None:
        # Re-entrant: a signal handler may record one while its thread is recording another. New
        # after a fork: another thread of the parent may have held it.
        self._lock = threading.RLock()

    def record(self, kind: str, what: str, *, todo: str = "") -> None:
        """Count one diagnostic; log the first of its kind and remedy in this process.

        Never raises.

        Args:
            kind: Short dotted name that is counted.
            what: What happened, for the log line.
            todo: What the reader can do about it, for the log line. It names the setting or the
                call that is to be changed, and nothing that differs from one time to the next.
        """
        with self._lock:
            self._counts[kind] += 1
            remedies = self._logged.setdefault(kind, set())
            if todo in remedies or len(remedies) >= MAX_REMEDIES:
                return
            remedies.add(todo)
            last = len(remedies) == MAX_REMEDIES
        advice = f" {todo}" if todo else ""
        further = "All further ones of this kind" if last else "Further ones"
        # A handler or filter of the application may raise.
        with contextlib.suppress(Exception):
            _log.warning("%s: %s.%s %s are only counted.", kind, what, advice, further)

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
