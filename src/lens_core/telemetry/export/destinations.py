"""The deliveries of one signal: which sinks a configuration means, each with its own queue."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from lens_core.errors import MissingExtraError
from lens_core.otlp.json_logs import encode_logs
from lens_core.otlp.json_metrics import encode_metrics
from lens_core.otlp.json_spans import JsonObject, to_line
from lens_core.otlp.protobuf import logs_request, metrics_request, spans_request
from lens_core.otlp.span_lines import SpanLines
from lens_core.telemetry.export.files import FileSink, LineFile
from lens_core.telemetry.export.http_sink import HttpSink
from lens_core.telemetry.export.otlp_settings import positive_number, read_otlp_settings
from lens_core.telemetry.pipeline.delivery import Delivery, DeliverySettings, Sink
from lens_core.telemetry.pipeline.export_result import ExportResult, Outcome

__all__ = ["LOGS", "METRICS", "SPANS", "Destinations", "Signal", "build_deliveries", "otlp_sink"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Signal(Generic[T]):
    """How one kind of telemetry is called and encoded.

    Attributes:
        name: In counts and log lines.
        otlp_name: In OTLP's variables and paths.
        to_json: A batch as an OTLP JSON message, or as a line that holds one.
        to_protobuf: A batch as a serialized OTLP request.
        to_text: One item for the console.
        batching: Prefix of the variables that set queue and batch sizes; empty for none.
    """

    name: str
    otlp_name: str
    to_json: Callable[[Sequence[T]], JsonObject | bytes]
    to_protobuf: Callable[[Sequence[T]], bytes]
    to_text: Callable[[T], str]
    batching: str


SPANS: Final[Signal[ReadableSpan]] = Signal(
    "spans", "traces", SpanLines().encode, spans_request, lambda span: span.to_json(), "OTEL_BSP"
)
METRICS: Final[Signal[MetricsData]] = Signal(
    "metrics", "metrics", encode_metrics, metrics_request, lambda data: data.to_json(), ""
)
LOGS: Final[Signal[ReadableLogRecord]] = Signal(
    "logs", "logs", encode_logs, logs_request, lambda record: record.to_json(), "OTEL_BLRP"
)


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where the telemetry of this process goes.

    Attributes:
        exporter: ``otlp``, ``console``, ``file``, ``journal`` or ``none``.
        file: The file of exporter ``file``.
        spill_file: Keeps what could not be sent.
        otlp_endpoint: Base URL of a further OTLP/HTTP receiver.
        write_through: Whether a record is in its file when it has been made.
    """

    exporter: str
    file: LineFile
    spill_file: LineFile
    otlp_endpoint: str | None = None
    write_through: bool = False


def build_deliveries(
    signal: Signal[T],
    destinations: Destinations,
    *,
    given: Sink[T] | None = None,
    kept: Callable[[Sequence[T]], None] | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Delivery[T]]:
    """One delivery per destination of a signal; none where it goes nowhere.

    Args:
        signal: The kind of telemetry.
        destinations: Where the telemetry of this process goes.
        given: Used instead of the configured exporter.
        kept: Called with each batch that the first destination has, or a file of this process.
        environ: The environment; that of the process if not given.
    """
    source = os.environ if environ is None else environ
    settings = _delivery_settings(signal.batching, source)
    deliveries: list[Delivery[T]] = []

    def add(sink: Sink[T], *, is_file: bool = False) -> None:
        deliveries.append(
            Delivery(
                signal.name,
                sink,
                lambda batch: destinations.spill_file.write(signal.to_json(batch)),
                settings,
                direct=is_file and destinations.write_through,
                direct_in_child=is_file,
                kept=None if deliveries else kept,
            )
        )

    exporter = destinations.exporter
    if exporter == "journal" and signal.name != SPANS.name:
        exporter = "file"  # there is no journal for these; the agent ships the file
    if source.get(f"OTEL_{signal.otlp_name.upper()}_EXPORTER", "").strip().lower() == "none":
        exporter = "none"
    if given is not None:
        add(given)
    elif exporter == "file":
        add(FileSink(destinations.file, signal.to_json), is_file=True)
    elif exporter == "console":
        add(_ConsoleSink(signal.to_text))
    elif exporter == "otlp" and destinations.otlp_endpoint is None:
        add(otlp_sink(signal, source))
    if destinations.otlp_endpoint is not None:
        add(otlp_sink(signal, source, destinations.otlp_endpoint))
    return deliveries


class SpanExporterSink:
    """Hands batches to an exporter that the caller gave."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter

    def send(self, batch: Sequence[ReadableSpan], timeout_s: float) -> ExportResult:
        """Export one batch."""
        result = self._exporter.export(batch)
        # An exporter that forgets to answer has sent: to repeat would send all of it again.
        failed = result is SpanExportResult.FAILURE
        return ExportResult(Outcome.RETRY if failed else Outcome.SENT)

    def close(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()


class _ConsoleSink(Generic[T]):
    def __init__(self, to_text: Callable[[T], str]) -> None:
        self._to_text = to_text

    def send(self, batch: Sequence[T], timeout_s: float) -> ExportResult:
        sys.stdout.write("".join(self._to_text(item) + "\n" for item in batch))
        sys.stdout.flush()
        return ExportResult(Outcome.SENT)

    def close(self) -> None:
        """Nothing to release."""


def otlp_sink(
    signal: Signal[T], environ: Mapping[str, str], endpoint: str | None = None
) -> Sink[T]:
    """Sends one signal over OTLP, as the variables of OpenTelemetry say.

    Args:
        signal: The kind of telemetry.
        environ: The environment.
        endpoint: Base URL of the receiver, instead of the one that the environment names.
    """
    settings = read_otlp_settings(signal.otlp_name, environ=environ, endpoint=endpoint)
    if settings.protocol == "grpc":
        # Heavy to import, and its threads do not like forks: only where it was asked for.
        try:
            from lens_core.telemetry.export.grpc_sink import GrpcSink  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "grpc", "sdk") from error

        return GrpcSink(settings, signal.to_protobuf)
    if settings.protocol == "http/json":
        return HttpSink(settings, lambda batch: to_line(signal.to_json(batch)))
    return HttpSink(settings, signal.to_protobuf)


def _delivery_settings(prefix: str, environ: Mapping[str, str]) -> DeliverySettings:
    defaults = DeliverySettings()
    if not prefix:
        return defaults

    def number(name: str, default: float) -> float:
        return positive_number(f"{prefix}_{name}", environ.get(f"{prefix}_{name}", ""), default)

    max_queue = int(number("MAX_QUEUE_SIZE", defaults.max_queue))
    return DeliverySettings(
        max_queue=max(1, max_queue),
        max_batch=max(1, min(max_queue, int(number("MAX_EXPORT_BATCH_SIZE", defaults.max_batch)))),
        delay_s=number("SCHEDULE_DELAY", defaults.delay_s * 1e3) / 1e3,
        timeout_s=number("EXPORT_TIMEOUT", 30_000) / 1e3,
    )
