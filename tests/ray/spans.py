"""Reads back the spans that Ray's workers wrote to the directory of the run."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SpanRead:
    """One exported span."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int  # 1 internal, 4 producer, 5 consumer (opentelemetry.proto.trace.v1.Span.SpanKind)
    status: int  # 0 unset, 2 error
    status_text: str
    attributes: dict[str, object]
    links: tuple[tuple[str, str], ...]
    events: tuple[str, ...]
    resource: dict[str, object]
    scope: str


def read_spans(directory: Path) -> list[SpanRead]:
    """All spans of all files below a directory; a line still being written is left out."""
    spans = []
    for path in sorted(directory.rglob("*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            for resource_spans in json.loads(line).get("resourceSpans", ()):
                resource = _attributes(resource_spans.get("resource", {}))
                for scope_spans in resource_spans["scopeSpans"]:
                    spans.extend(
                        _span(span, resource, scope_spans["scope"]["name"])
                        for span in scope_spans["spans"]
                    )
    return spans


def wait_for_spans(directory: Path, trace_id: str, count: int, *, timeout_s: float = 20):
    """The spans of a trace, once there are at least ``count``."""
    deadline = time.monotonic() + timeout_s
    while True:
        spans = [span for span in read_spans(directory) if span.trace_id == trace_id]
        if len(spans) >= count or time.monotonic() > deadline:
            return spans
        time.sleep(0.05)


def _span(span, resource, scope) -> SpanRead:
    status = span.get("status", {})
    return SpanRead(
        name=span["name"],
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        kind=span.get("kind", 0),
        status=status.get("code", 0),
        status_text=status.get("message", ""),
        attributes=_attributes(span),
        links=tuple((link["traceId"], link["spanId"]) for link in span.get("links", ())),
        events=tuple(event["name"] for event in span.get("events", ())),
        resource=resource,
        scope=scope,
    )


def _attributes(holder) -> dict[str, object]:
    return {item["key"]: _value(item["value"]) for item in holder.get("attributes", ())}


def _value(value) -> object:
    ((kind, content),) = value.items()
    return int(content) if kind == "intValue" else content
