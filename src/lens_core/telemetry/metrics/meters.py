"""The metrics half of a set-up: our own provider and reader, the caller's reader, or both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry.metrics import Meter, MeterProvider, NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, MetricsData
from opentelemetry.sdk.resources import Resource

from lens_core.diagnostics import diagnostics
from lens_core.telemetry.export.otlp_settings import positive_number
from lens_core.telemetry.global_providers import foreign_meter_provider, meter_switch
from lens_core.telemetry.metrics.metric_reader import DeliveryMetricReader, temporality_from_name
from lens_core.telemetry.pipeline.delivery import Delivery

__all__ = ["Meters", "build_meters"]

_SCOPE: Final = "lens_core"
_INTERVAL: Final = "OTEL_METRIC_EXPORT_INTERVAL"
#: The specification's default is a minute; who watches a training job wants to see more.
_DEFAULT_INTERVAL_MS: Final = 10_000.0
_TEMPORALITY: Final = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"


@dataclass(frozen=True, slots=True)
class Meters:
    """The metrics half of a set-up.

    Attributes:
        provider: Makes instruments.
        is_ours: Whether the provider is ours; otherwise it is the application's.
        reader: Collects for our deliveries, where there are any.
        meter: Makes this library's instruments.
    """

    provider: MeterProvider
    is_ours: bool
    reader: DeliveryMetricReader | None
    meter: Meter

    def put_in_place(self) -> None:
        """Let instruments be made."""
        if self.is_ours:
            meter_switch.switch_to(self.provider)
        elif self.reader is not None and isinstance(self.provider, SdkMeterProvider):
            self.provider.add_metric_reader(self.reader)

    def remove(self) -> None:
        """Make no new instruments; the present ones can be collected a last time."""
        if self.is_ours:
            meter_switch.switch_to(None)

    def shut_down(self) -> None:
        """Collect a last time; the application's provider goes on without us."""
        if self.reader is not None:
            self.reader.shutdown()
        if not isinstance(self.provider, SdkMeterProvider):
            return
        if self.is_ours:
            self.provider.shutdown()
        elif self.reader is not None:
            self.provider.remove_metric_reader(self.reader)


def build_meters(
    deliveries: Sequence[Delivery[MetricsData]],
    resource: Resource,
    given: MetricReader | None,
) -> Meters:
    """Everything for metrics; nothing global is touched yet."""
    foreign = foreign_meter_provider()
    can_add = isinstance(foreign, SdkMeterProvider) and hasattr(foreign, "add_metric_reader")
    reader = None
    if deliveries and (foreign is None or can_add):
        reader = DeliveryMetricReader(
            deliveries,
            positive_number(_INTERVAL, os.environ.get(_INTERVAL, ""), _DEFAULT_INTERVAL_MS) / 1e3,
            temporality=temporality_from_name(os.environ.get(_TEMPORALITY, "").strip()),
            overlay=None if foreign is None else resource,
        )
    if foreign is not None:
        if given is not None:
            diagnostics.record(
                "provider.foreign",
                "the application installed a meter provider; the given metric reader is not used",
                todo="Give the reader to that provider.",
            )
        return Meters(foreign, False, reader, foreign.get_meter(_SCOPE))
    readers = [each for each in (given, reader) if each is not None]
    if not readers:
        none = NoOpMeterProvider()
        return Meters(none, True, None, none.get_meter(_SCOPE))
    provider = SdkMeterProvider(readers, resource, shutdown_on_exit=False)
    return Meters(provider, True, reader, provider.get_meter(_SCOPE))
