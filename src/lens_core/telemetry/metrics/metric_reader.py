"""Collects the metrics of this process periodically and hands them to a delivery.

The SDK's periodic reader exports on its own thread with a timeout that it does not keep, and in a
forked child goes on exporting the parent's sums under the parent's name. This one gives the child
a fresh start: what the parent had counted at the fork is subtracted, and points that the child did
not change are left out.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.sdk.metrics import Counter, Histogram, ObservableCounter
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricReader, MetricsData
from opentelemetry.sdk.resources import Resource

from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import ConfigError
from lens_core.sdk.compat import is_registered
from lens_core.telemetry.metrics.forked_sums import (
    Baseline,
    has_deltas,
    points_by_key,
    since_fork,
    with_overlay,
)
from lens_core.telemetry.pipeline.delivery import Delivery

__all__ = ["DeliveryMetricReader", "temporality_from_name"]

#: Longest wait at a fork for a collection in progress.
_FORK_WAIT_S: Final = 1.0


class DeliveryMetricReader(MetricReader):
    """Collects every ``interval_s`` from a thread of its own.

    Args:
        deliveries: Where collections go.
        interval_s: Time between two collections.
        temporality: Per instrument class, as the SDK's readers take it.
        overlay: Resource attributes for metrics of a provider that is not ours.
    """

    def __init__(
        self,
        deliveries: Sequence[Delivery[MetricsData]],
        interval_s: float,
        *,
        temporality: Mapping[type, AggregationTemporality] | None = None,
        overlay: Resource | None = None,
    ) -> None:
        super().__init__(preferred_temporality=dict(temporality or {}))
        self._deliveries = tuple(deliveries)
        self._overlay = overlay
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._keep: MetricsData | None = None
        self._keeping = False
        self._baseline: Baseline | None = None
        self._forked_at_ns = 0
        before, in_parent, in_child = (
            weakref.WeakMethod(method)
            for method in (self._before_fork, self._after_fork_in_parent, self._after_fork_in_child)
        )
        os.register_at_fork(
            before=lambda: (method := before()) and method(),
            after_in_parent=lambda: (method := in_parent()) and method(),
            after_in_child=lambda: (method := in_child()) and method(),
        )

    def start(self) -> None:
        """Start collecting; in a forked child again, where the parent's thread is missing."""
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="lens-metrics", daemon=True)
            self._thread.start()

    def collect_now(self) -> None:
        """Collect once, on this thread. Never raises."""
        with self._lock:
            self._collect_guarded()

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: object) -> None:
        """Collect a last time and stop; the delivery sends it."""
        if not self._stop.is_set():
            self._stop.set()
            self.collect_now()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.collect_now()

    def _collect_guarded(self) -> None:
        try:
            self.collect()
        except Exception as error:  # noqa: BLE001 - a user's callback may raise anything
            diagnostics.record("metrics.collect_failed", describe(error))

    def _receive_metrics(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
    ) -> None:
        if self._keeping:
            self._keep = metrics_data
            if not has_deltas(metrics_data):
                return
        if self._baseline is not None:
            metrics_data = since_fork(metrics_data, self._baseline, self._forked_at_ns)
        if self._overlay is not None:
            metrics_data = with_overlay(metrics_data, self._overlay)
        if any(group.scope_metrics for group in metrics_data.resource_metrics):
            for delivery in self._deliveries:
                delivery.put(metrics_data)

    def _before_fork(self) -> None:
        # No collection may be in progress: the child would find its locks held for ever. The
        # collection made here is what the child subtracts.
        self._keep = None
        self._keeping = self._lock.acquire(timeout=_FORK_WAIT_S)
        if self._keeping and is_registered(self) and not self._stop.is_set():
            self._collect_guarded()

    def _after_fork_in_parent(self) -> None:
        if self._keeping:
            self._keeping = False
            self._keep = None
            self._lock.release()

    def _after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._thread = None
        self._keeping = False
        self._forked_at_ns = time.time_ns()
        if self._keep is not None:
            self._baseline = points_by_key(self._keep)
        elif is_registered(self) and not self._stop.is_set():
            # Better silent than the parent's sums a second time.
            self._stop.set()
            diagnostics.record("metrics.child_muted", "no collection was possible at the fork")
        self._keep = None


def temporality_from_name(name: str) -> dict[type, AggregationTemporality]:
    """What ``OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE`` means; cumulative if unknown."""
    delta: tuple[type, ...] = ()
    if name.lower() == "delta":
        delta = (Counter, ObservableCounter, Histogram)
    elif name.lower() == "lowmemory":
        delta = (Counter, Histogram)
    elif name and name.lower() != "cumulative":
        setting = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
        error = ConfigError(setting, name, "cumulative, delta or lowmemory")
        todo = f"Correct {setting}; cumulative is used."
        diagnostics.record("config.invalid", str(error), todo=todo)
    return dict.fromkeys(delta, AggregationTemporality.DELTA)
