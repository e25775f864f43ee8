"""SDK records as serialized OTLP protobuf requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.trace import ReadableSpan

from lens_core.telemetry.otlp_json import span_flags

__all__ = ["logs_request", "metrics_request", "spans_request"]


def spans_request(spans: Sequence[ReadableSpan]) -> bytes:
    """An ``ExportTraceServiceRequest``.

    The SDK's encoder leaves out the W3C trace flags, in ``Span.flags`` and ``Link.flags``, and the
    tracestate of links. They are put in here, so that a reader can tell a link to a sampled span
    from one to a span that was never exported.
    """
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


def metrics_request(batch: Sequence[MetricsData]) -> bytes:
    """An ``ExportMetricsServiceRequest``."""
    request = encode_metrics(batch[0])
    for data in batch[1:]:
        request.MergeFrom(encode_metrics(data))
    return bytes(request.SerializeToString())


def logs_request(records: Sequence[ReadableLogRecord]) -> bytes:
    """An ``ExportLogsServiceRequest``."""
    return bytes(encode_logs(records).SerializeToString())
