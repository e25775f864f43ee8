"""What telemetry says about itself: dropped spans, failed exports, rejected carriers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from lens_core.diagnostics import diagnostics

__all__ = ["EXPORT_FAILURES", "INCIDENTS", "RECORDS", "REJECTED_CARRIERS", "observe_self"]

#: Records by ``lens.signal`` and ``lens.outcome`` (sent, spilled, dropped, lost).
RECORDS: Final = "lens.telemetry.records"
EXPORT_FAILURES: Final = "lens.export.failures"
REJECTED_CARRIERS: Final = "lens.carriers.rejected"
#: All diagnostics by ``lens.kind``.
INCIDENTS: Final = "lens.diagnostics"


def observe_self(meter: Meter, counts: Callable[[], Mapping[str, int]]) -> None:
    """Make the instruments; they read the counters that are kept anyway.

    Args:
        meter: Meter of the current set-up.
        counts: Counts of its deliveries by ``signal.outcome``.
    """

    def records(options: CallbackOptions) -> Iterable[Observation]:
        for name, count in counts().items():
            signal, _, outcome = name.partition(".")
            if outcome != "failed_attempts":
                yield Observation(count, {"lens.signal": signal, "lens.outcome": outcome})

    def failures(options: CallbackOptions) -> Iterable[Observation]:
        for name, count in counts().items():
            signal, _, outcome = name.partition(".")
            if outcome == "failed_attempts":
                yield Observation(count, {"lens.signal": signal})

    def rejected(options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(diagnostics.count("carrier.rejected"))

    def kinds(options: CallbackOptions) -> Iterable[Observation]:
        for kind, count in diagnostics.counts().items():
            yield Observation(count, {"lens.kind": kind})

    meter.create_observable_counter(
        RECORDS, [records], unit="{record}", description="Telemetry records by what became of them"
    )
    meter.create_observable_counter(
        EXPORT_FAILURES, [failures], unit="{attempt}", description="Attempts to export that failed"
    )
    meter.create_observable_counter(
        REJECTED_CARRIERS, [rejected], unit="{carrier}", description="Carriers that were not valid"
    )
    meter.create_observable_counter(
        INCIDENTS,
        [kinds],
        unit="{diagnostic}",
        description="Failures of telemetry that were survived",
    )
