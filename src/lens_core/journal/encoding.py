"""What is written into a journal: one msgpack payload per fact.

Runs on the training thread for every span, with cold caches, so it takes a span context for the
tuple that it is, and enters few functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgpack
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import Event, Span
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status

from lens_core.journal.format import IS_REMOTE
from lens_core.sdk.span_fields import started_fields, values_of

__all__ = [
    "encode_event",
    "encode_link",
    "encode_scope",
    "encode_start",
    "encode_status",
    "encode_value",
]

# One packer for all threads: a call to pack() does not give up the interpreter lock.
_packer: Final = msgpack.Packer(unicode_errors="surrogatepass")


def encode_start(span: Span, context: SpanContext, scope_index: int, thread: int = 0) -> bytes:
    """What a span is when it starts."""
    trace_id, span_id, _, trace_flags, state, _ = context
    flags = int(trace_flags)
    parent, attributes, links, name, kind, start_ns = started_fields(span)
    parent_span_id = 0
    if parent is not None:
        _, parent_span_id, is_remote, _, _, _ = parent
        if is_remote:
            flags |= IS_REMOTE
    content = (
        trace_id.to_bytes(16, "big"),
        span_id,
        parent_span_id,
        flags,
        state.to_header() if state else "",
        name,
        kind._value_,
        start_ns,
        values_of(attributes) if attributes.__class__ is BoundedAttributes else _plain(attributes),
        [_link(link) for link in links] if links else None,
        scope_index,
        thread,
    )
    try:
        return _packer.pack(content)  # type: ignore[no-any-return]
    except (OverflowError, ValueError, TypeError):
        return encode_value(content)


def encode_event(event: Event) -> bytes:
    """An event."""
    return encode_value((event.name, event.timestamp, _plain(event.attributes)))


def encode_link(link: Link) -> bytes:
    """A link that was added while the span was open."""
    return encode_value(_link(link))


def encode_status(status: Status) -> bytes:
    """A new status."""
    return encode_value((status.status_code.value, status.description))


def encode_scope(index: int, scope: InstrumentationScope | None) -> bytes:
    """An instrumentation scope and the index by which spans name it."""
    if scope is None:
        return encode_value((index, ("", None, None, None)))
    attributes = _plain(scope.attributes)
    return encode_value((index, (scope.name, scope.version, scope.schema_url, attributes)))


def _link(link: Link) -> tuple[object, ...]:
    context = link.context
    state = context.trace_state
    return (
        context.trace_id.to_bytes(16, "big"),
        context.span_id,
        context.trace_flags | (IS_REMOTE if context.is_remote else 0),
        state.to_header() if state else "",
        _plain(link.attributes),
    )


def _plain(attributes: Any) -> dict[str, object]:
    if attributes.__class__ is BoundedAttributes:
        return dict(values_of(attributes))  # to copy it is one step for the interpreter
    return dict(attributes or ())


def encode_value(content: object) -> bytes:
    """Attributes that were set while the span was open, a new name, or what else is a value."""
    try:
        return _packer.pack(content)  # type: ignore[no-any-return]
    except (OverflowError, ValueError, TypeError):
        return _packer.pack(_packable(content))  # type: ignore[no-any-return]


def _packable(content: object) -> object:
    """The same with what msgpack has no form for, such as a large integer, as text."""
    if isinstance(content, Mapping):
        return {str(key): _packable(value) for key, value in content.items()}
    if isinstance(content, (str, bytes, float, bool)) or content is None:
        return content
    if isinstance(content, int):
        if -(2**63) <= content < 2**64:
            return content
        try:
            return str(content)
        except ValueError:  # Python writes no more than 4,300 decimal digits
            return hex(content)
    if isinstance(content, Iterable):
        return [_packable(item) for item in content]
    return str(content)
