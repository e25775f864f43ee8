"""Builds the SDK's providers for a configuration, and takes them down again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
    SpanExporter,
)
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.util.types import AttributeValue

from lens_core.errors import ConfigError
from lens_core.telemetry.config import EXPORTERS, NemoLensConfig
from lens_core.telemetry.files import FileSpanExporter, LineFile, run_directory
from lens_core.telemetry.global_tracer import SwitchTracerProvider
from lens_core.telemetry.handle import TelemetryHandle
from lens_core.telemetry.ids import PrivateIdGenerator
from lens_core.telemetry.resources import build_resource
from lens_core.telemetry.run_identity import RunIdentity

__all__ = ["install"]

_SCOPE: Final = "lens_core"
_switch: Final = SwitchTracerProvider()


def install(
    config: NemoLensConfig,
    *,
    identity: RunIdentity,
    resource_attributes: Mapping[str, AttributeValue] | None,
    span_exporter: SpanExporter | None,
    metric_reader: MetricReader | None,
    otlp_endpoint: str | None,
    id_generator: IdGenerator | None,
    span_processors: Sequence[SpanProcessor],
    write_through: bool,
    on_released: Callable[[], None],
) -> TelemetryHandle:
    """Set everything up; ``on_released`` is called when the handle has shut it down."""
    if config.exporter not in EXPORTERS:
        raise ConfigError("exporter", config.exporter, "one of " + ", ".join(EXPORTERS))
    resource = build_resource(config, identity, resource_attributes)
    exporting = _span_pipeline(config, identity, span_exporter, otlp_endpoint, write_through)
    provider = TracerProvider(
        resource=resource,
        id_generator=PrivateIdGenerator() if id_generator is None else id_generator,
    )
    for processor in (*span_processors, *exporting):
        provider.add_span_processor(processor)
    meters = MeterProvider([metric_reader], resource) if metric_reader is not None else None
    _switch.switch_to(provider)
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        trace.set_tracer_provider(_switch)

    def shut_down(timeout_s: float) -> bool:
        _switch.switch_to(None)
        provider.shutdown()
        if meters is not None:
            meters.shutdown(timeout_s * 1e3)
        on_released()
        return True

    return TelemetryHandle(
        identity,
        tracer=_switch.get_tracer(_SCOPE),
        meter=None if meters is None else meters.get_meter(_SCOPE),
        is_exporting=bool(exporting) or meters is not None,
        on_shutdown=shut_down,
    )


def _span_pipeline(
    config: NemoLensConfig,
    identity: RunIdentity,
    given: SpanExporter | None,
    otlp_endpoint: str | None,
    write_through: bool,
) -> list[SpanProcessor]:
    processors: list[SpanProcessor] = []
    if given is not None:
        processors.append(BatchSpanProcessor(given))
    elif not config.traces_enabled:
        return processors
    elif config.exporter == "file":
        exporter = FileSpanExporter(LineFile(run_directory(config.output_dir, identity.run_id)))
        kind = SimpleSpanProcessor if write_through else BatchSpanProcessor
        processors.append(kind(exporter))
    elif config.exporter == "console":
        processors.append(BatchSpanProcessor(ConsoleSpanExporter()))
    elif config.exporter == "otlp" and otlp_endpoint is None:
        processors.append(BatchSpanProcessor(OTLPSpanExporter()))
    if otlp_endpoint is not None:
        url = otlp_endpoint.rstrip("/") + "/v1/traces"
        processors.append(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return processors
