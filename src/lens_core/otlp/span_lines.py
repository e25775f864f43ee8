"""Spans as lines of OTLP JSON, quick enough to be written where the span ends.

A Ray worker writes each span to its file before the call returns. There the general encoder, which
makes a tree of dicts and has ``json`` walk it, is most of the cost of a traced call. Of a usual
span this writes the text at once, and the resource and scope, the same for all spans of a process,
only once (``benchmarks/bench_ray.py``, the row "each span on disk"). What is unusual is left to
:mod:`lens_core.otlp.json_spans`; both give the same JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import JSONEncoder
from json.encoder import encode_basestring as _quoted
from typing import Final

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import StatusCode

from lens_core.otlp.json_spans import (
    encode_span,
    encode_spans,
    encode_value,
    span_flags,
    to_line,
)
from lens_core.sdk.span_fields import ended_fields, resource_of, scope_of, values_of

__all__ = ["SpanLines"]

_json: Final = JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
_SPAN: Final = '"spans":['
_INT64: Final = range(-(2**63), 2**63)


class SpanLines:
    """Encodes batches of spans, each as one line."""

    def __init__(self) -> None:
        self._frame: tuple[Resource | None, InstrumentationScope | None, str, str] = (
            None,
            None,
            "",
            "",
        )

    def encode(self, spans: Sequence[ReadableSpan]) -> bytes:
        """One line for a batch."""
        if len(spans) != 1:
            return to_line(encode_spans(spans))
        span = spans[0]
        resource, scope, head, tail = self._frame
        if resource_of(span) is not resource or scope_of(span) is not scope or not head:
            head, tail = self._new_frame(span)
        return (head + _span(span) + tail).encode("utf-8", "replace")

    def _new_frame(self, span: ReadableSpan) -> tuple[str, str]:
        whole = _json(encode_spans([span]))
        text = _json(encode_span(span))
        at = whole.rindex(_SPAN + text) + len(_SPAN)
        head, tail = whole[:at], whole[at + len(text) :] + "\n"
        self._frame = (span.resource, span.instrumentation_scope, head, tail)
        return head, tail


def _span(span: ReadableSpan) -> str:
    context, parent, status, attributes, events, links, name, kind, start_ns, end_ns = ended_fields(
        span
    )
    if (
        context is None
        or events
        or links
        or getattr(events, "dropped", 0)
        or getattr(links, "dropped", 0)
        or attributes.__class__ is not BoundedAttributes
        or attributes.dropped
        or status is not StatusCode.UNSET
        or context.trace_state
    ):
        return _json(encode_span(span))
    # The SDK's own mapping locks and enters four functions a value; what it guards is a dictionary,
    # which nobody changes any more.
    inner = values_of(attributes)
    return (
        f'{{"traceId":"{context.trace_id:032x}","spanId":"{context.span_id:016x}",'
        f'"flags":{span_flags(context, parent)},'
        + ("" if parent is None else f'"parentSpanId":"{parent.span_id:016x}",')
        + f'"name":{_quoted(str(name))},"kind":{kind._value_ + 1},'
        f'"startTimeUnixNano":"{start_ns or 0}","endTimeUnixNano":"{end_ns or 0}",'
        + (_attributes(inner) if inner else "")
        + '"status":{}}'
    )


def _attributes(attributes: Mapping[str, object]) -> str:
    parts = []
    for key, value in attributes.items():
        if type(value) is str:
            encoded = f'{{"stringValue":{_quoted(value)}}}'
        elif type(value) is int and value in _INT64:
            encoded = f'{{"intValue":"{value}"}}'
        else:
            encoded = _json(encode_value(value))
        parts.append(f'{{"key":{_quoted(key)},"value":{encoded}}}')
    return '"attributes":[' + ",".join(parts) + "],"
