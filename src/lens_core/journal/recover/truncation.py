"""Spans of a journal as spans of the SDK: those that were open are marked as cut off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from lens_core.journal.decoding import JournalSpan
from lens_core.journal.format import IS_REMOTE
from lens_core.semconv import LENS_STACKS, NEMO_SPAN_TRUNCATED, NEMO_SPAN_TRUNCATED_REASON

__all__ = ["readable_spans"]


def readable_spans(
    spans: Iterable[JournalSpan],
    meta: Mapping[str, object],
    *,
    reason: str,
    alive_ns: int = 0,
    stacks: str = "",
) -> list[ReadableSpan]:
    """Spans of a journal as spans of the SDK, the open ones marked as truncated.

    Args:
        spans: The spans, of one process.
        meta: What its journal says of it.
        reason: Why its open spans were cut off.
        alive_ns: When it is known to have lived.
        stacks: Stacks of its threads, for the events of the innermost open spans.
    """
    attributes = meta.get("attributes")
    resource = Resource(
        cast("dict[str, str]", attributes) if isinstance(attributes, dict) else {},
        str(meta.get("schema_url", "")),
    )
    spans = list(spans)
    parents = {span.parent_span_id for span in spans if span.end_ns is None}
    for span in spans:
        if span.end_ns is None:
            innermost = span.span_id not in parents
            _truncate(span, reason, max(alive_ns, span.last_ns), stacks if innermost else "")
    return [_readable(span, resource) for span in spans]


def _truncate(span: JournalSpan, reason: str, end_ns: int, stacks: str) -> None:
    about: dict[str, object] = {NEMO_SPAN_TRUNCATED_REASON: reason}
    span.attributes.update({NEMO_SPAN_TRUNCATED: True, **about})
    if stacks:
        about[LENS_STACKS] = stacks
    span.events.append((NEMO_SPAN_TRUNCATED, end_ns, about))
    span.end_ns = end_ns


def _readable(span: JournalSpan, resource: Resource) -> ReadableSpan:
    """The span as exporters take it; its end is its last sign of life where it has none."""
    context = SpanContext(
        span.trace_id,
        span.span_id,
        is_remote=False,
        trace_flags=TraceFlags(span.trace_flags & 0xFF),
        trace_state=_trace_state(span.trace_state),
    )
    parent = None
    if span.parent_span_id:
        parent = SpanContext(
            span.trace_id,
            span.parent_span_id,
            is_remote=span.parent_is_remote,
            trace_flags=TraceFlags(span.trace_flags & 0xFF),
        )
    name, version, schema_url, scope_attributes = span.scope
    code, description = span.status
    return ReadableSpan(
        name=span.name,
        context=context,
        parent=parent,
        resource=resource,
        attributes=span.attributes,  # type: ignore[arg-type]
        events=[
            Event(event, attributes, time_ns)  # type: ignore[arg-type]
            for event, time_ns, attributes in span.events
        ],
        links=[_to_link(link) for link in span.links],
        kind=SpanKind(span.kind),
        status=Status(StatusCode(code), description),
        start_time=span.start_ns,
        end_time=span.last_ns if span.end_ns is None else span.end_ns,
        instrumentation_scope=InstrumentationScope(
            str(name),
            None if version is None else str(version),
            None if schema_url is None else str(schema_url),
            scope_attributes,  # type: ignore[arg-type]
        ),
    )


def _to_link(link: Any) -> Link:
    trace_id, span_id, flags, state, attributes = link
    context = SpanContext(
        int.from_bytes(trace_id, "big"),
        span_id,
        is_remote=bool(flags & IS_REMOTE),
        trace_flags=TraceFlags(flags & 0xFF),
        trace_state=_trace_state(str(state)),
    )
    return Link(context, attributes)


def _trace_state(header: str) -> TraceState | None:
    return TraceState.from_header([header]) if header else None
