"""How a span says that the process ended before its work did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol, runtime_checkable

from opentelemetry.sdk.trace import Event, ReadableSpan, Span, SpanProcessor
from opentelemetry.util.types import AttributeValue

from lens_core.sdk.span_fields import attributes_of, end_time_of, with_fields
from lens_core.semconv import NEMO_SPAN_TRUNCATED, NEMO_SPAN_TRUNCATED_REASON

__all__ = ["ENDS_OF_PROCESS", "SeesTruncation", "cut_short", "truncation"]

#: What leaves a block because the process, or a thread of it, ends.
ENDS_OF_PROCESS: Final = (KeyboardInterrupt, SystemExit)
_Attributes = dict[str, AttributeValue]


@runtime_checkable
class SeesTruncation(Protocol):
    """A processor that writes down also what is found out about a span when it has ended."""

    def on_truncated(
        self, span: Span, attributes: Mapping[str, AttributeValue], event: Event
    ) -> None:
        """Before ``on_end``: the span is truncated, with these attributes and this event."""


def truncation(reason: str) -> tuple[_Attributes, _Attributes]:
    """The attributes of a truncated span, and those of its event."""
    return (
        {NEMO_SPAN_TRUNCATED: True, NEMO_SPAN_TRUNCATED_REASON: reason},
        {NEMO_SPAN_TRUNCATED_REASON: reason},
    )


def cut_short(
    span: ReadableSpan, reason: str, live: Span, processors: Iterable[SpanProcessor]
) -> ReadableSpan:
    """An ended span as a truncated one: its block was left because the process ends.

    Whoever's ``with`` block closed it: an interrupted data loader must not look done.

    Args:
        span: What has ended.
        reason: Why.
        live: The span that it was.
        processors: Those that are told, if they want to know.
    """
    attributes = attributes_of(span) or {}
    if NEMO_SPAN_TRUNCATED in attributes:
        return span
    marks, of_event = truncation(reason)
    event = Event(NEMO_SPAN_TRUNCATED, of_event, end_time_of(span) or None)
    for processor in processors:
        if isinstance(processor, SeesTruncation):
            processor.on_truncated(live, marks, event)
    return with_fields(span, attributes={**attributes, **marks}, events=(*span.events, event))
