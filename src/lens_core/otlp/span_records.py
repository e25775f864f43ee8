"""Spans as OTLP JSON describes them, in plain values: the reverse of ``json_spans``."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from opentelemetry.util.types import AttributeValue

from lens_core.otlp.json_spans import JsonObject
from lens_core.otlp.lines import json_list, json_object, span_groups
from lens_core.semconv import NEMO_SPAN_TRUNCATED, NV_DL_RANK

__all__ = ["EventRecord", "LinkRecord", "SpanRecord", "span_records"]

_HEX_DIGITS: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """A link of a span: the ids of what it points at, in hex, and its attributes."""

    trace_id: str
    span_id: str
    attributes: Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event of a span; ``time_ns`` is nanoseconds since the epoch, by the process's clock."""

    name: str
    time_ns: int
    attributes: Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span of a run.

    Attributes:
        trace_id: 32 hex digits.
        span_id: 16 hex digits.
        parent_span_id: 16 hex digits; empty for a root.
        name: Name of the span.
        kind: OTLP number: 1 internal, 2 server, 3 client, 4 producer, 5 consumer.
        start_ns: Start, in nanoseconds since the epoch by the clock of its process.
        end_ns: End, likewise.
        status_code: OTLP number: 0 unset, 1 ok, 2 error.
        status_message: Description of an error; empty where there is none.
        attributes: Attributes of the span.
        links: Links, in order.
        events: Events, in order.
        resource: Attributes of the process.
        scope: Name of the instrumentation scope.
        source: File that it was read from.
    """

    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    status_code: int
    status_message: str
    attributes: Mapping[str, AttributeValue]
    links: Sequence[LinkRecord]
    events: Sequence[EventRecord]
    resource: Mapping[str, AttributeValue]
    scope: str
    source: Path

    @property
    def key(self) -> tuple[str, str]:
        """What identifies the span: its trace id and span id."""
        return self.trace_id, self.span_id

    @property
    def rank(self) -> int | None:
        """Global rank of the process, where it has one."""
        rank = self.resource.get(NV_DL_RANK)
        return rank if isinstance(rank, int) else None

    @property
    def truncated(self) -> bool:
        """Whether the span was ended by lens rather than by its code: its duration is not real."""
        return self.attributes.get(NEMO_SPAN_TRUNCATED) is True


def span_records(message: JsonObject, source: Path) -> list[SpanRecord]:
    """All spans of a message: a message that is wrong somewhere is wrong as a whole.

    Args:
        message: The message.
        source: File that it was read from.

    Raises:
        ValueError, TypeError, KeyError: it is not of that form.
    """
    spans = []
    for group, scope, encoded in span_groups(message):
        resource = _attributes(json_object(group.get("resource", {})).get("attributes", ()))
        name = str(json_object(scope.get("scope", {})).get("name", ""))
        spans += [_span(span, resource, name, source) for span in encoded]
    return spans


def _span(
    span: Mapping[str, object],
    resource: Mapping[str, AttributeValue],
    scope: str,
    path: Path,
) -> SpanRecord:
    status = json_object(span.get("status", {}))
    return SpanRecord(
        trace_id=_hex(span["traceId"], 32),
        span_id=_hex(span["spanId"], 16),
        parent_span_id=_hex(span["parentSpanId"], 16) if span.get("parentSpanId") else "",
        name=str(span.get("name", "")),
        kind=_integer(span.get("kind", 0)),
        start_ns=_integer(span.get("startTimeUnixNano", 0)),
        end_ns=_integer(span.get("endTimeUnixNano", 0)),
        status_code=_integer(status.get("code", 0)),
        status_message=str(status.get("message", "")),
        attributes=_attributes(span.get("attributes", ())),
        links=tuple(
            LinkRecord(
                _hex(link["traceId"], 32),
                _hex(link["spanId"], 16),
                _attributes(link.get("attributes", ())),
            )
            for link in map(json_object, json_list(span.get("links", ())))
        ),
        events=tuple(
            EventRecord(
                str(event.get("name", "")),
                _integer(event.get("timeUnixNano", 0)),
                _attributes(event.get("attributes", ())),
            )
            for event in map(json_object, json_list(span.get("events", ())))
        ),
        resource=resource,
        scope=scope,
        source=path,
    )


def _attributes(pairs: object) -> dict[str, AttributeValue]:
    return {
        str(pair["key"]): _value(json_object(pair.get("value", {})))
        for pair in map(json_object, json_list(pairs))
    }


def _value(value: Mapping[str, object]) -> AttributeValue:
    if "stringValue" in value:
        return str(value["stringValue"])
    if "intValue" in value:
        return _integer(value["intValue"])
    if "boolValue" in value:
        return bool(value["boolValue"])
    if "doubleValue" in value:
        # Also "NaN", "Infinity" and "-Infinity", as the protobuf JSON mapping writes them.
        return float(str(value["doubleValue"]))
    if "bytesValue" in value:
        return base64.b64decode(str(value["bytesValue"])).decode("utf-8", "backslashreplace")
    if "arrayValue" in value:
        return _array(json_list(json_object(value["arrayValue"]).get("values", ())))
    if "kvlistValue" in value:
        return json.dumps(
            _attributes(json_object(value["kvlistValue"]).get("values", ())), default=str
        )
    return ""


def _array(items: Iterable[object]) -> AttributeValue:
    values = [_value(json_object(item)) for item in items]
    # An attribute is a sequence of one scalar type; anything else is shown as text.
    if all(isinstance(value, str) for value in values):
        return cast("list[str]", values)
    if all(isinstance(value, bool) for value in values):
        return cast("list[bool]", values)
    if all(isinstance(value, int) for value in values):
        return cast("list[int]", values)
    if all(isinstance(value, float) for value in values):
        return cast("list[float]", values)
    return [str(value) for value in values]


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"expected an integer, got {value!r}")
    return int(value)


def _hex(value: object, digits: int) -> str:
    text = str(value).lower()
    # By its digits: int() also takes "0x", signs, underscores and the digits of other scripts.
    if len(text) != digits or not _HEX_DIGITS.issuperset(text) or not text.strip("0"):
        raise ValueError(f"{text!r} is not an id of {digits} hex digits")
    return text
