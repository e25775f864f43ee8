"""Spans as they are read from a journal: the reverse of ``encoding``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
from opentelemetry.trace import SpanKind, StatusCode

from lens_core.journal.format import IS_REMOTE, Kind, records

__all__ = [
    "JournalSpan",
    "decode_scope",
    "decode_span",
]


@dataclass(slots=True)
class JournalSpan:
    """What a journal holds of one span.

    Attributes:
        trace_id: Trace id.
        span_id: Span id.
        parent_span_id: The parent's span id; 0 for a root.
        parent_is_remote: Whether the parent is in another process.
        trace_flags: W3C trace flags.
        trace_state: W3C ``tracestate`` header; empty if there is none.
        name: Name.
        kind: Number of the kind, in the SDK's counting (0 is internal).
        start_ns: Start, in nanoseconds since the epoch.
        end_ns: End, likewise; ``None`` while the span is open.
        attributes: Attributes as set so far.
        events: ``(name, time_ns, attributes)`` of each event.
        links: ``(trace_id, span_id, flags, trace_state, attributes)`` of each link.
        status: Status code, and its description or ``None``.
        thread: The thread that started it; 0 if unknown.
        scope: ``(name, version, schema_url, attributes)`` of the instrumentation scope.
    """

    trace_id: int
    span_id: int
    parent_span_id: int
    parent_is_remote: bool
    trace_flags: int
    trace_state: str
    name: str
    kind: int
    start_ns: int
    end_ns: int | None = None
    attributes: dict[str, object] = field(default_factory=dict)
    events: list[tuple[str, int, Mapping[str, object]]] = field(default_factory=list)
    links: list[Sequence[object]] = field(default_factory=list)
    status: tuple[int, str | None] = (0, None)
    thread: int = 0
    scope: Sequence[object] = ("", None, None, None)

    @property
    def last_ns(self) -> int:
        """The latest time that the span itself proves its process to have lived."""
        times = [self.start_ns, *(time_ns for _, time_ns, _ in self.events)]
        return max(times) if self.end_ns is None else max(*times, self.end_ns)


def decode_scope(payload: bytes) -> tuple[int, Sequence[object]]:
    """The reverse of :func:`encode_scope`.

    Raises:
        ValueError: the payload is not of this form.
    """
    content = _unpack(payload)
    if not isinstance(content, list) or len(content) != 2:
        raise ValueError("not an instrumentation scope")
    index, scope = content
    if not isinstance(index, int) or not isinstance(scope, list) or len(scope) != 4:
        raise ValueError("not an instrumentation scope")
    name, version, schema_url, attributes = scope
    return index, (name, version, schema_url, _attributes(attributes))


def decode_span(
    stream: bytes,
    generation: int,
    end_ns: int | None,
    scopes: Mapping[int, Sequence[object]],
) -> JournalSpan:
    """The span whose records are in a stream.

    Raises:
        ValueError: the stream is damaged or does not start with the start of a span.
    """
    span: JournalSpan | None = None
    for kind, payload in records(stream, generation):
        content = _unpack(payload)
        try:
            if kind == Kind.START:
                span = _decode_start(content, scopes)
            elif span is None:
                raise ValueError("no start of a span")
            elif kind == Kind.ATTRIBUTES:
                span.attributes.update(_attributes(content))
            elif kind == Kind.EVENT:
                name, time_ns, attributes = content
                span.events.append((_text(name), _unsigned(time_ns), _attributes(attributes)))
            elif kind == Kind.LINK:
                span.links.append(_decode_link(content))
            elif kind == Kind.NAME:
                span.name = _text(content)
            elif kind == Kind.STATUS:
                code, description = content
                span.status = (
                    StatusCode(code).value,
                    None if description is None else _text(description),
                )
        except (TypeError, KeyError, IndexError) as error:
            raise ValueError(f"a record of kind {kind} is not of its form: {error}") from error
    if span is None:
        raise ValueError("no start of a span")
    span.end_ns = end_ns
    return span


def _decode_start(content: Any, scopes: Mapping[int, Sequence[object]]) -> JournalSpan:
    # Journals of earlier versions do not name the thread.
    (*content, thread) = content if len(content) == 12 else [*content, 0]
    trace_id, span_id, parent, flags, state, name, kind, start_ns, attributes, links, scope = (
        content
    )
    flags = _unsigned(flags)
    return JournalSpan(
        trace_id=_trace_id(trace_id),
        span_id=_unsigned(span_id),
        parent_span_id=_unsigned(parent),
        parent_is_remote=bool(flags & IS_REMOTE),
        trace_flags=flags & 0xFF,
        trace_state=str(state),
        name=str(name),
        kind=SpanKind(kind).value,
        start_ns=_unsigned(start_ns),
        attributes=_attributes(attributes),
        links=[_decode_link(link) for link in links or ()],
        thread=_unsigned(thread),
        scope=scopes.get(_unsigned(scope), ("", None, None, None)),
    )


def _decode_link(content: Any) -> Sequence[object]:
    trace_id, span_id, flags, state, attributes = content
    _trace_id(trace_id)
    return trace_id, _unsigned(span_id), _unsigned(flags), str(state), _attributes(attributes)


# What is read may come from anybody: each value is looked at before it is believed, so that one
# span which is not of its form costs that span, and not all spans of its process.


def _attributes(content: object) -> dict[str, object]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError("not attributes")
    return {str(name): value for name, value in content.items()}


def _trace_id(content: object) -> int:
    if not isinstance(content, bytes) or len(content) != 16:
        raise ValueError("not a trace id")
    return int.from_bytes(content, "big")


def _unsigned(content: object) -> int:
    if not isinstance(content, int) or not 0 <= content < 2**64:
        raise ValueError(f"{content!r:.40} is not an unsigned integer of 64 bits")
    return content


def _text(content: object) -> str:
    if not isinstance(content, str):
        raise ValueError(f"{content!r:.40} is not text")
    return content


def _unpack(payload: bytes) -> Any:
    try:
        return msgpack.unpackb(payload, unicode_errors="surrogatepass", strict_map_key=False)
    except TypeError as error:  # a key that cannot be one
        raise ValueError(str(error)) from error
