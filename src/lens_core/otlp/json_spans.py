"""SDK spans as OTLP JSON, in the form that the OpenTelemetry Collector reads and writes.

The JSON mapping of the OTLP specification ("JSON Protobuf Encoding"): camelCase names, ids in
lower-case hex, 64-bit integers as decimal strings, enums as integers, no field that holds its
default. ``flags`` holds the W3C trace flags in its low byte, which the SDK's protobuf encoder
leaves out.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext

__all__ = [
    "Grouping",
    "JsonObject",
    "encode_attributes",
    "encode_double",
    "encode_resource",
    "encode_scope",
    "encode_span",
    "encode_spans",
    "encode_value",
    "span_flags",
    "to_line",
]

JsonObject = dict[str, object]
_ScopeGroup = tuple[InstrumentationScope | None, list[JsonObject]]

_INT64_MIN: Final = -(2**63)
_INT64_MAX: Final = 2**63 - 1
_MAX_BITS: Final = 1024
_HAS_IS_REMOTE: Final = 0x100
_IS_REMOTE: Final = 0x200


def encode_spans(spans: Iterable[ReadableSpan]) -> JsonObject:
    """One ``{"resourceSpans": [...]}`` object, spans grouped by resource and scope."""
    grouped = Grouping()
    for span in spans:
        grouped.add(span.resource, span.instrumentation_scope, encode_span(span))
    return {"resourceSpans": grouped.encode("scopeSpans", "spans")}


class Grouping:
    """Encoded records under their resource and scope, as all OTLP messages hold them.

    Grouped by the identity of resource and scope: the SDK's resources hash by dumping themselves
    as JSON, which for a single span costs more than the rest.
    """

    def __init__(self) -> None:
        self._groups: dict[int, tuple[Resource, dict[int, _ScopeGroup]]] = {}

    def add(
        self, resource: Resource, scope: InstrumentationScope | None, record: JsonObject
    ) -> None:
        """Add one encoded record."""
        group = self._groups.get(id(resource))
        if group is None:
            group = self._groups[id(resource)] = (resource, {})
        scoped = group[1].get(id(scope))
        if scoped is None:
            scoped = group[1][id(scope)] = (scope, [])
        scoped[1].append(record)

    def encode(self, scopes_name: str, records_name: str) -> list[JsonObject]:
        """The value of ``resourceSpans``, ``resourceMetrics`` or ``resourceLogs``."""
        return [
            _with_schema(
                {
                    "resource": encode_resource(resource),
                    scopes_name: [
                        _with_schema(
                            {"scope": encode_scope(scope), records_name: records},
                            scope.schema_url if scope else None,
                        )
                        for scope, records in scopes.values()
                    ],
                },
                resource.schema_url,
            )
            for resource, scopes in self._groups.values()
        ]


def encode_span(span: ReadableSpan) -> JsonObject:
    """One span, as an element of ``scopeSpans[].spans``."""
    context = span.get_span_context()
    encoded: JsonObject = {}
    if context is not None:
        encoded["traceId"] = format(context.trace_id, "032x")
        encoded["spanId"] = format(context.span_id, "016x")
        if context.trace_state:
            encoded["traceState"] = context.trace_state.to_header()
        encoded["flags"] = span_flags(context, span.parent)
    if span.parent is not None:
        encoded["parentSpanId"] = format(span.parent.span_id, "016x")
    encoded["name"] = str(span.name)
    # The SDK numbers kinds from 0 (INTERNAL); in OTLP 0 is "unspecified".
    encoded["kind"] = span.kind.value + 1
    encoded["startTimeUnixNano"] = str(span.start_time or 0)
    encoded["endTimeUnixNano"] = str(span.end_time or 0)
    _put_attributes(encoded, span.attributes, span.dropped_attributes)
    if span.events:
        encoded["events"] = [_encode_event(event) for event in span.events]
    if span.dropped_events:
        encoded["droppedEventsCount"] = span.dropped_events
    if span.links:
        encoded["links"] = [_encode_link(link) for link in span.links]
    if span.dropped_links:
        encoded["droppedLinksCount"] = span.dropped_links
    status: JsonObject = {}
    if span.status.description:
        status["message"] = span.status.description
    if span.status.status_code.value:
        status["code"] = span.status.status_code.value
    encoded["status"] = status
    return encoded


def span_flags(context: SpanContext, remote: SpanContext | None) -> int:
    """OTLP span flags: trace flags of ``context``, and whether ``remote`` is remote."""
    flags = (context.trace_flags & 0xFF) | _HAS_IS_REMOTE
    return flags | _IS_REMOTE if remote is not None and remote.is_remote else flags


def encode_resource(resource: Resource) -> JsonObject:
    """A resource, as ``resourceSpans[].resource``."""
    encoded: JsonObject = {}
    _put_attributes(encoded, resource.attributes, 0)
    return encoded


def encode_scope(scope: InstrumentationScope | None) -> JsonObject:
    """An instrumentation scope, as ``scopeSpans[].scope``."""
    encoded: JsonObject = {}
    if scope is None:
        return encoded
    encoded["name"] = scope.name
    if scope.version:
        encoded["version"] = scope.version
    _put_attributes(encoded, scope.attributes, 0)
    return encoded


def encode_attributes(attributes: Mapping[str, object]) -> list[JsonObject]:
    """Attributes as a list of key and typed value."""
    return [{"key": str(key), "value": encode_value(value)} for key, value in attributes.items()]


def encode_double(value: float) -> float | str:
    """A number; NaN and the infinities by the names of the Protobuf JSON mapping."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def to_line(message: Mapping[str, object] | bytes) -> bytes:
    """One message as one line of UTF-8; lone surrogates, which UTF-8 cannot hold, become ``?``.

    What is a line already comes back as it is.
    """
    if isinstance(message, bytes):
        return message
    text = json.dumps(message, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace") + b"\n"


def _put_attributes(
    encoded: JsonObject, attributes: Mapping[str, object] | None, dropped: int
) -> None:
    if attributes:
        encoded["attributes"] = encode_attributes(attributes)
    if dropped:
        encoded["droppedAttributesCount"] = dropped


def _encode_event(event: Event) -> JsonObject:
    encoded: JsonObject = {"timeUnixNano": str(event.timestamp), "name": event.name}
    _put_attributes(encoded, event.attributes, event.dropped_attributes)
    return encoded


def _encode_link(link: Link) -> JsonObject:
    context = link.context
    encoded: JsonObject = {
        "traceId": format(context.trace_id, "032x"),
        "spanId": format(context.span_id, "016x"),
        "flags": span_flags(context, context),
    }
    if context.trace_state:
        encoded["traceState"] = context.trace_state.to_header()
    _put_attributes(encoded, link.attributes, link.dropped_attributes)
    return encoded


def encode_value(value: object) -> JsonObject:
    """One typed value (``AnyValue``)."""
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        if _INT64_MIN <= value <= _INT64_MAX:
            return {"intValue": int.__repr__(value)}
        # Python writes no more than some thousand digits in decimal.
        return {"stringValue": str(value) if value.bit_length() <= _MAX_BITS else hex(value)}
    if isinstance(value, float):
        return {"doubleValue": encode_double(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"bytesValue": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return {"kvlistValue": {"values": encode_attributes(value)}}
    if isinstance(value, Sequence):
        return {"arrayValue": {"values": [encode_value(item) for item in value]}}
    return {} if value is None else {"stringValue": str(value)}


def _with_schema(encoded: JsonObject, schema_url: str | None) -> JsonObject:
    if schema_url:
        encoded["schemaUrl"] = schema_url
    return encoded
