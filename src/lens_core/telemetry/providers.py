"""Builds the providers of a configuration and puts them in place, and takes them away again."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.util.types import AttributeValue

from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import ConfigError
from lens_core.identity.run import RunIdentity
from lens_core.spans.managed import span_tracer
from lens_core.spans.switch import span_groups
from lens_core.telemetry.config import EXPORTERS, NemoLensConfig
from lens_core.telemetry.export.destinations import (
    LOGS,
    METRICS,
    SPANS,
    Destinations,
    SpanExporterSink,
    build_deliveries,
)
from lens_core.telemetry.export.files import LineFile, run_directory
from lens_core.telemetry.global_providers import make_global
from lens_core.telemetry.group_file import GroupFileWatch
from lens_core.telemetry.handle import TelemetryHandle
from lens_core.telemetry.journaling import JournalPlan, open_journal
from lens_core.telemetry.lifetime import Lifetime
from lens_core.telemetry.logs.log_bridge import log_bridges
from lens_core.telemetry.logs.log_pipeline import LogPipeline
from lens_core.telemetry.metrics.meters import build_meters
from lens_core.telemetry.metrics.self_metrics import observe_self
from lens_core.telemetry.resources import build_resource
from lens_core.telemetry.traces import build_traces

if TYPE_CHECKING:
    from lens_core.telemetry.lifetime import AnyDelivery

__all__ = ["Request", "install"]

_CHECK_DIRECTORY = "Check NEMO_LENS_OUTPUT_DIR; until then lens groups cannot reach this process."


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of :func:`lens_core.setup_telemetry`, with the run resolved."""

    config: NemoLensConfig
    identity: RunIdentity
    resource_attributes: Mapping[str, AttributeValue] | None
    span_exporter: SpanExporter | None
    metric_reader: MetricReader | None
    otlp_endpoint: str | None
    id_generator: IdGenerator | None
    span_processors: Sequence[SpanProcessor]
    write_through: bool
    on_released: Callable[[], None]


def install(request: Request) -> TelemetryHandle:
    """Set everything up, or nothing.

    Raises:
        ConfigError: the exporter is not one of the known ones.
    """
    config = request.config
    if config.exporter not in EXPORTERS:
        raise ConfigError("exporter", config.exporter, "one of " + ", ".join(EXPORTERS))
    directory = run_directory(config.output_dir, request.identity.run_id)
    resource = build_resource(config, request.identity, request.resource_attributes)
    destinations = Destinations(
        config.exporter,
        LineFile(directory),
        LineFile(directory, stem="spill"),
        request.otlp_endpoint,
        request.write_through,
    )
    with ExitStack() as undo:
        given = None if request.span_exporter is None else SpanExporterSink(request.span_exporter)
        wanted = config.traces_enabled or given is not None
        plan = JournalPlan(config, request.identity.run_id, resource, directory, given is not None)
        journal = open_journal(plan) if wanted else None
        if wanted and plan.keeps == "ship" and journal is None:
            diagnostics.record(
                "journal.replaced",
                "exporter journal has no journal, so spans go to a file of the run directory",
                todo="Set NEMO_LENS_JOURNAL_DIR to a local directory with room; lens agent sends "
                "the file too.",
            )
            destinations = dataclasses.replace(destinations, exporter="file", write_through=True)
        # One that keeps spans until they end has nothing to forget when they have been exported.
        kept = None if journal is None or plan.keeps == "open" else journal.exported
        if journal is not None:
            # Only where set-up fails: otherwise the pipeline shuts it down, after the last span.
            undo.push(lambda kind, *_: journal.shutdown() if kind is not None else None)
        traces = build_traces(
            build_deliveries(SPANS, destinations, given=given, kept=kept) if wanted else (),
            # First: a span must be known as ended before it can be known as exported.
            [*([] if journal is None else [journal]), *request.span_processors],
            resource,
            request.id_generator,
        )
        wanted = config.metrics_enabled and request.metric_reader is None
        metric_deliveries = build_deliveries(METRICS, destinations) if wanted else ()
        metrics = build_meters(metric_deliveries, resource, request.metric_reader)
        log_deliveries = build_deliveries(LOGS, destinations)
        logs = LoggerProvider(resource, shutdown_on_exit=False)
        logs.add_log_record_processor(LogPipeline(log_deliveries))
        # Nothing outside of this function has changed so far; from here on, each change is undone.
        undo.callback(traces.remove)
        traces.put_in_place()
        undo.callback(metrics.remove)
        metrics.put_in_place()
        log_bridges.provider = logs
        undo.callback(log_bridges.detach_all)
        deliveries: list[AnyDelivery] = [
            *traces.deliveries,
            *metric_deliveries,
            *log_deliveries,
        ]
        span_groups.set(config.span_groups)
        undo.callback(span_groups.set, "")
        lifetime = Lifetime(
            traces.pipeline,
            deliveries,
            metrics,
            destinations.spill_file,
        )
        traces.pipeline.on_child_start = lifetime.on_child_start
        lifetime.control.ticks.append(log_bridges.check)
        if config.logs_enabled:
            log_bridges.attach("", logging.INFO)
        if config.live_span_groups:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                diagnostics.record("groups.not_live", describe(error), todo=_CHECK_DIRECTORY)
            watch = GroupFileWatch(directory, span_groups, config.span_groups)
            lifetime.control.ticks.append(watch.look)
        observe_self(metrics.meter, lifetime.counts)
        span_tracer.tracer = traces.tracer
        undo.callback(span_tracer.reset)
        make_global(tracers=traces.is_ours, meters=metrics.is_ours)
        lifetime.start(release=undo.pop_all().close)

    def shut_down(timeout_s: float) -> bool:
        try:
            return lifetime.stop("shutdown", timeout_s)
        finally:
            request.on_released()

    return TelemetryHandle(
        request.identity,
        tracer=traces.tracer,
        meter=metrics.meter,
        is_exporting=bool(
            traces.deliveries
            or metrics.reader
            or request.metric_reader
            or (journal is not None and config.exporter == "journal")
        ),
        resource_attributes=resource.attributes,
        counts=lifetime.counts,
        on_shutdown=shut_down,
    )
