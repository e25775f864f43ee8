"""SDK records as serialized OTLP protobuf requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Status

from lens_core.diagnostics import describe, diagnostics
from lens_core.otlp.json_spans import span_flags
from lens_core.sdk.span_fields import with_fields
from lens_core.spans.attributes import to_utf8

__all__ = ["logs_request", "metrics_request", "spans_request"]


def spans_request(spans: Sequence[ReadableSpan]) -> bytes:
    """An ``ExportTraceServiceRequest``.

    The SDK's encoder leaves out the W3C trace flags, in ``Span.flags`` and ``Link.flags``, and the
    tracestate of links. They are put in here, so that a reader can tell a link to a sampled span
    from one to a span that was never exported.
    """
    try:
        request = encode_spans(spans)
    except Exception:  # noqa: BLE001 - which one it is, and of what, the encoder does not say
        spans = [_encodable(span) for span in spans]
        request = encode_spans(spans)
    by_id = {span.context.span_id.to_bytes(8, "big"): span for span in spans if span.context}
    scopes = chain.from_iterable(group.scope_spans for group in request.resource_spans)
    for encoded in chain.from_iterable(scope.spans for scope in scopes):
        span = by_id[encoded.span_id]
        if span.context is not None:
            encoded.flags = span_flags(span.context, span.parent)
        for encoded_link, link in zip(encoded.links, span.links, strict=True):
            encoded_link.flags = span_flags(link.context, link.context)
            encoded_link.trace_state = link.context.trace_state.to_header()
    return bytes(request.SerializeToString())


def _encodable(span: ReadableSpan) -> ReadableSpan:
    """The span with texts that protobuf can hold: one bad name must not cost the whole batch."""
    status = span.status
    return with_fields(
        span,
        name=to_utf8(str(span.name)),
        status=Status(status.status_code, to_utf8(status.description or "") or None),
        events=[Event(to_utf8(str(e.name)), e.attributes, e.timestamp) for e in span.events],
    )


def metrics_request(batch: Sequence[MetricsData]) -> bytes:
    """An ``ExportMetricsServiceRequest``."""
    request = ExportMetricsServiceRequest()
    for data in batch:
        try:
            request.MergeFrom(encode_metrics(data))
        except Exception as error:  # noqa: BLE001 - one metric must not cost the others
            diagnostics.record("metrics.not_encodable", describe(error))
            request.MergeFrom(encode_metrics(_encodable_metrics(data)))
    return bytes(request.SerializeToString())


def _encodable_metrics(data: MetricsData) -> MetricsData:
    """What can be encoded of a collection, metric by metric."""
    groups = []
    for group in data.resource_metrics:
        scopes = []
        for scope in group.scope_metrics:
            good = [m for m in scope.metrics if _is_encodable(replace(scope, metrics=[m]), group)]
            scopes.append(replace(scope, metrics=good))
        groups.append(replace(group, scope_metrics=scopes))
    return MetricsData(resource_metrics=groups)


def _is_encodable(scope: ScopeMetrics, group: ResourceMetrics) -> bool:
    try:
        encode_metrics(MetricsData(resource_metrics=[replace(group, scope_metrics=[scope])]))
    except Exception:  # noqa: BLE001 - asked for exactly that
        return False
    return True


def logs_request(records: Sequence[ReadableLogRecord]) -> bytes:
    """An ``ExportLogsServiceRequest``."""
    return bytes(encode_logs(records).SerializeToString())
