"""Takes telemetry off the training thread and never loses it in silence.

A :class:`Delivery` is a bounded queue and one thread that sends batches. What cannot be sent is
retried within a bound and then spilled to a file; what cannot be queued is counted. The SDK's own
batch processor does neither: it forgets a batch that the exporter failed to send, and its shutdown
has no deadline (measured: 42 s with a collector that refuses connections).

The training thread only ever appends to a deque and, once per batch, puts a token into a
``SimpleQueue``, whose ``put`` is re-entrant. No lock is taken there, so a signal handler that runs
in the middle of it and emits telemetry itself cannot deadlock.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from lens_core.compat import suppress_instrumentation
from lens_core.diagnostics import describe, diagnostics
from lens_core.telemetry.pipeline.export_result import ExportResult, Outcome, send_in_parts

__all__ = ["Delivery", "DeliveryCounts", "DeliverySettings", "Sink"]

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

_POLL_S: Final = 0.005
#: A queue that is this full while a batch is being sent is emptied into the spill file.
_CROWDED: Final = 0.75
#: A forked child may end without notice: what it emits does not wait longer than this.
_CHILD_DELAY_S: Final = 0.2
#: Share of a shutdown deadline that is kept for writing what was not sent to a file.
_SPILL_SHARE: Final = 0.2


class Sink(Protocol[T_contra]):
    """Where batches go."""

    def send(self, batch: Sequence[T_contra], timeout_s: float) -> ExportResult:
        """Send one batch. May raise; an exception counts as ``REFUSED``."""

    def close(self) -> None:
        """Release what the sink holds."""


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    """Bounds of one delivery.

    Attributes:
        max_queue: Items that may wait; a further one is dropped and counted.
        max_batch: Items that are sent at once.
        delay_s: Longest time that an item waits for company.
        timeout_s: Longest time that one attempt to send may take.
        retry_for_s: How long one batch is retried before it is spilled.
        rest_s: How often it is tried again after that, once and with a short timeout; batches in
            between are spilled unsent.
    """

    max_queue: int = 2048
    max_batch: int = 512
    delay_s: float = 5.0
    timeout_s: float = 10.0
    retry_for_s: float = 10.0
    rest_s: float = 2.0


@dataclass(slots=True)
class DeliveryCounts:
    """What became of the items given to one delivery."""

    sent: int = 0
    rejected: int = 0
    spilled: int = 0
    dropped: int = 0
    lost: int = 0
    failed_attempts: int = 0


class Delivery(Generic[T]):
    """Sends items in batches from a thread of its own.

    Args:
        signal: ``spans``, ``metrics`` or ``logs``: the name in counts and log lines.
        sink: Where batches go.
        spill: Keeps a batch that could not be sent; raises where it cannot either.
        settings: The bounds.
        direct: Send each item on the calling thread before :meth:`put` returns: for a sink that
            does not block, in a process that may be killed.
        direct_in_child: The same in forked children only.
        kept: Called with each batch that was sent or spilled: it is safe from now on.
    """

    def __init__(
        self,
        signal: str,
        sink: Sink[T],
        spill: Callable[[Sequence[T]], None],
        settings: DeliverySettings,
        *,
        direct: bool = False,
        direct_in_child: bool = False,
        kept: Callable[[Sequence[T]], None] | None = None,
    ) -> None:
        self.counts = DeliveryCounts()
        self._direct = direct
        self._kept = kept
        self._direct_in_child = direct_in_child
        self.signal = signal
        self._sink = sink
        self._spill = spill
        self._settings = settings
        self._delay_s = settings.delay_s
        # Not the global one: a failing collector must not shift the user's random stream.
        self._random = random.Random()
        self._start_empty()
        fork = weakref.WeakMethod(self._after_fork)
        os.register_at_fork(after_in_child=lambda: (method := fork()) and method())

    def _start_empty(self) -> None:
        self._queue: deque[T] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._drop_lock = threading.RLock()
        # Re-entrant, for a signal handler on the thread that holds it.
        self._claim_lock = threading.RLock()
        self._busy = False
        self._relieving = False
        self._in_flight: list[T] = []
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None
        self._resting = False
        self._rest_until = 0.0
        self._closed = False

    def _after_fork(self) -> None:
        # The parent sends what was queued, and its thread and locks are not in this process.
        self._start_empty()
        self.counts = DeliveryCounts()
        self._delay_s = min(self._delay_s, _CHILD_DELAY_S)
        self._direct = self._direct or self._direct_in_child

    def put(self, item: T) -> None:
        """Queue one item. Never blocks, never raises."""
        if self._direct:
            self._put_direct(item)
            return
        waiting = self._queue
        if self._closed or len(waiting) >= self._settings.max_queue:
            with self._drop_lock:
                self.counts.dropped += 1
            diagnostics.record(
                f"{self.signal}.dropped",
                "telemetry is shut down" if self._closed else "the export queue is full",
                todo="Emit less (span groups, sampling), or raise OTEL_BSP_MAX_QUEUE_SIZE.",
            )
            return
        waiting.append(item)
        if self._thread is None:
            self._start()
        if len(waiting) >= self._settings.max_batch:
            if self._wake.empty():
                self._wake.put(None)
            if self._busy and len(waiting) >= self._settings.max_queue * _CROWDED:
                self._start_relief()

    def flush(self, timeout_s: float) -> bool:
        """Send all that is queued now, with retries; whether that was done in time."""
        self._wake.put(None)
        return self._wait(time.monotonic() + timeout_s)

    def hurry(self, timeout_s: float) -> None:
        """Have all that is queued sent with one attempt each; :meth:`settle` waits for it."""
        self._rest_until = 0.0  # the receiver may be back: try once
        self._deadline = time.monotonic() + timeout_s * (1 - _SPILL_SHARE)
        self._wake.put(None)

    def settle(self) -> bool:
        """Wait until the deadline of :meth:`hurry`, then spill what is left.

        A batch that is on its way at that moment is spilled although it may yet arrive: twice is
        better than not at all, and the ids are the same.

        Returns:
            Whether everything that this delivery ever got was taken or spilled.
        """
        self._wait(time.monotonic() if self._deadline is None else self._deadline)
        give_up_at = time.monotonic() + 1.0
        while self._relieving and time.monotonic() < give_up_at:
            time.sleep(_POLL_S)
        if batch := self._claim():
            self._give_up(batch)
        while batch := self._take():
            self._give_up(batch)
        self._deadline = None
        return self.counts.lost == self.counts.dropped == self.counts.rejected == 0

    def close(self) -> None:
        """Take nothing more, and end the thread; what is still queued is not sent.

        Never raises; waits as long as the sink does.
        """
        self._closed = True
        self._wake.put(None)
        if self._busy:
            return
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001 - an exporter may raise anything
            diagnostics.record(f"{self.signal}.close_failed", describe(error))

    def _wait(self, deadline: float) -> bool:
        if self._thread is None or not self._thread.is_alive():
            self._drain()  # the interpreter is shutting down, or nothing was ever queued
            return True
        while self._queue or self._busy or self._relieving:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _put_direct(self, item: T) -> None:
        try:
            result = self._sink.send([item], self._settings.timeout_s)
            if result.outcome is Outcome.SENT:
                self._took([item], result)
                return
        except Exception as error:  # noqa: BLE001 - the training thread must not see it
            diagnostics.record(f"{self.signal}.export_failed", describe(error))
        self._give_up([item])

    def _start(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread, or the code this handler interrupted, is starting it
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=f"lens-{self.signal}", daemon=True)
                thread.start()
                self._thread = thread
        except RuntimeError:
            # The interpreter is shutting down: finish_stop sends on the calling thread.
            return
        finally:
            self._lock.release()

    def _start_relief(self) -> None:
        """Empty the queue from a thread of its own: the usual one waits for the network."""
        if self._relieving or not self._lock.acquire(blocking=False):
            return
        try:
            if not self._relieving:
                self._relieving = True
                diagnostics.record(
                    f"{self.signal}.crowded",
                    "the export queue is nearly full while a batch is on its way",
                    todo="The rest goes to a file of the run directory: emit less, or give the "
                    "receiver more room.",
                )
                threading.Thread(target=self._relieve, name="lens-relief", daemon=True).start()
        except RuntimeError:
            self._relieving = False  # the interpreter is shutting down
        finally:
            self._lock.release()

    def _relieve(self) -> None:
        try:
            while len(self._queue) > self._settings.max_queue // 4 and (batch := self._take()):
                self._give_up(batch)
        finally:
            self._relieving = False

    def _run(self) -> None:
        # Our own requests must not become spans of an instrumented HTTP client.
        suppress_instrumentation()
        while True:
            with contextlib.suppress(queue.Empty):
                rest_s = self._settings.rest_s if self._resting else self._delay_s
                self._wake.get(timeout=min(self._delay_s, rest_s))
            if self._closed:
                return
            self._drain()

    def _take(self) -> list[T]:
        batch: list[T] = []
        try:
            while len(batch) < self._settings.max_batch:
                batch.append(self._queue.popleft())
        except IndexError:
            pass
        return batch

    def _claim(self) -> list[T]:
        """The batch in flight, for whoever asks first: the thread itself or the deadline."""
        with self._claim_lock:
            batch, self._in_flight = self._in_flight, []
        return batch

    def _drain(self) -> None:
        self._busy = True
        try:
            while not self._closed:
                with self._claim_lock:
                    batch = self._in_flight = self._take()
                if not batch:
                    return
                self._deliver(batch)
        finally:
            self._busy = False

    def _deliver(self, batch: Sequence[T]) -> None:
        """Send or spill a batch, part by part where it cannot be sent as one."""
        done = 0
        for part, result in send_in_parts(batch, self._send):
            done += len(part)
            with self._claim_lock:
                if not self._in_flight:
                    return  # the deadline has taken what was left
                self._in_flight = list(batch[done:])
            if result.outcome is Outcome.SENT:
                self._took(part, result)
            else:
                self._give_up(part)

    def _took(self, part: Sequence[T], result: ExportResult) -> None:
        self.counts.sent += len(part) - result.rejected
        self.counts.rejected += result.rejected
        if self._kept is not None:
            self._kept(part)

    def _send(self, batch: Sequence[T]) -> ExportResult:
        """Try until sent, refused, or out of patience; while it rests, once in a while."""
        settings = self._settings
        if self._resting and time.monotonic() < self._rest_until and self._deadline is None:
            return ExportResult(Outcome.RETRY)
        give_up_at = time.monotonic() + (0.0 if self._resting else settings.retry_for_s)
        pause_s = 0.5
        while True:
            result, why = self._attempt(batch)
            if result.outcome in (Outcome.SENT, Outcome.SPLIT):
                self._resting = False
                return result
            self.counts.failed_attempts += 1
            diagnostics.record(
                f"{self.signal}.export_failed",
                why,
                todo="Batches are retried, then kept in a file of the run directory.",
            )
            if result.outcome is Outcome.REFUSED:
                return result
            wait_s = max(pause_s * (0.5 + self._random.random()), result.retry_after_s or 0.0)
            wait_until = time.monotonic() + wait_s
            if wait_until > give_up_at or not self._pause(wait_until):
                self._resting = True
                self._rest_until = time.monotonic() + max(
                    settings.rest_s, result.retry_after_s or 0.0
                )
                return result
            pause_s = min(pause_s * 2, 5.0)

    def _pause(self, until: float) -> bool:
        """Wait to try again; false as soon as there is no time or no room for that."""
        while (left_s := until - time.monotonic()) > 0:
            if self._deadline is not None or len(self._queue) > self._settings.max_queue // 2:
                return False
            time.sleep(min(left_s, 0.05))
        return True

    def _attempt(self, batch: Sequence[T]) -> tuple[ExportResult, str]:
        timeout_s = self._settings.timeout_s
        if self._resting:
            timeout_s = min(timeout_s, self._settings.rest_s)
        if self._deadline is not None:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0 or time.monotonic() < self._rest_until:
                return ExportResult(Outcome.RETRY), "out of time"
            timeout_s = min(timeout_s, left_s)
        try:
            result = self._sink.send(batch, timeout_s)
        except Exception as error:  # noqa: BLE001 - an exporter may raise anything
            return ExportResult(Outcome.REFUSED), describe(error)
        except BaseException as error:
            # Such as the panic of a Rust exporter. On the caller's thread it may be an interrupt.
            if threading.current_thread() is not self._thread:
                raise
            return ExportResult(Outcome.REFUSED), describe(error)
        return result, f"the exporter answered {result.outcome.value!r}"

    def _give_up(self, batch: Sequence[T]) -> None:
        try:
            self._spill(batch)
            self.counts.spilled += len(batch)
            if self._kept is not None:
                self._kept(batch)
        except Exception as error:  # noqa: BLE001 - nothing may end this thread
            if len(batch) > 1 and not isinstance(error, OSError):
                # One record that no file can hold must not take the others with it.
                for item in batch:
                    self._give_up([item])
                return
            self.counts.lost += len(batch)
            diagnostics.record(
                f"{self.signal}.lost",
                f"{len(batch)} {self.signal} could be neither sent nor written to a file: "
                f"{describe(error)}",
                todo="Check NEMO_LENS_OUTPUT_DIR.",
            )
