"""SDK log records as OTLP JSON; the rules are those of :mod:`lens_core.otlp.json_spans`."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.sdk._logs import ReadableLogRecord

from lens_core.otlp.json_spans import Grouping, JsonObject, encode_attributes, encode_value

__all__ = ["encode_log", "encode_logs"]


def encode_logs(records: Iterable[ReadableLogRecord]) -> JsonObject:
    """One ``{"resourceLogs": [...]}`` object."""
    grouped = Grouping()
    for record in records:
        grouped.add(record.resource, record.instrumentation_scope, encode_log(record))
    return {"resourceLogs": grouped.encode("scopeLogs", "logRecords")}


def encode_log(readable: ReadableLogRecord) -> JsonObject:
    """One record, as an element of ``scopeLogs[].logRecords``."""
    record = readable.log_record
    encoded: JsonObject = {"timeUnixNano": str(record.timestamp or 0)}
    if record.observed_timestamp:
        encoded["observedTimeUnixNano"] = str(record.observed_timestamp)
    if record.severity_number is not None:
        encoded["severityNumber"] = record.severity_number.value
    if record.severity_text:
        encoded["severityText"] = record.severity_text
    encoded["body"] = encode_value(record.body)
    if record.attributes:
        encoded["attributes"] = encode_attributes(record.attributes)
    if record.trace_id:
        encoded["traceId"] = format(record.trace_id, "032x")
    if record.span_id:
        encoded["spanId"] = format(record.span_id, "016x")
    if record.trace_flags:
        encoded["flags"] = int(record.trace_flags)
    if record.event_name:
        encoded["eventName"] = record.event_name
    if readable.dropped_attributes:
        encoded["droppedAttributesCount"] = readable.dropped_attributes
    return encoded
