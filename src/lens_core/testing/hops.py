"""What the two ends of a real hop do and see, as data that crosses process boundaries.

A hop is a function ``(messages) -> records`` that the transport's tests supply: it starts real
processes, sends every :class:`HopMessage` with the verbs that users call, and reports a
:class:`HopRecord` for every arrival. :class:`Sender` and :class:`Receiver` are the parts of it that
are the same for every transport; both need ``opentelemetry-sdk`` in their process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext

from lens_core.errors import MissingExtraError
from lens_core.links import linked_span
from lens_core.propagation import extract_context, inject_context

try:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON
except ImportError as error:  # pragma: no cover - only without the extra
    raise MissingExtraError("opentelemetry-sdk", "sdk") from error

__all__ = ["HopRecord", "HopMessage", "Receiver", "Sender", "Sent", "arrival", "span_key"]


@dataclass(frozen=True, slots=True)
class HopMessage:
    """One message to send.

    Attributes:
        index: Which message, for ``TransportCase.new_message``.
        carrier: Headers of the context in which the sender's span starts; empty: the sender does
            not trace at all; with flags ``00``: the sender's span is not sampled.
        damaged: The sender damages the carrier's bytes after injecting them.
    """

    index: int
    carrier: Mapping[str, str]
    damaged: bool = False


@dataclass(slots=True)
class Sent:
    """What the sending process saw of one message."""

    index: int
    carrier: dict[str, str] = field(default_factory=dict)
    message_intact: bool = False
    context_unchanged: bool = False


@dataclass(frozen=True, slots=True)
class HopRecord:
    """What both ends saw of one arrival.

    Attributes:
        index: Which message.
        sent: Headers of the sender's context at the moment of sending.
        received: Headers that came out at the receiver.
        message_intact: The received message is the sent one.
        sender_message_intact: Sending did not change the caller's message.
        footprint: Shape, size, dtype, device and number of what went over the wire.
        links: Keys (:func:`span_key`) of the spans that the receiver's span links to.
        parent: Key of the receiver's parent span; empty for a root.
        context_unchanged: On both ends, the context after is the context before.
        where: Who received, for the error message: ``"rank 1 from rank 0"``.
    """

    index: int
    sent: Mapping[str, str]
    received: Mapping[str, str]
    message_intact: bool
    sender_message_intact: bool
    footprint: str
    links: tuple[str, ...]
    parent: str
    context_unchanged: bool
    where: str


def span_key(carrier: Mapping[str, str] | SpanContext | None) -> str:
    """``"<trace id>-<span id>"`` of a carrier's or a span's context; empty where there is none."""
    if carrier is None:
        return ""
    if isinstance(carrier, SpanContext):
        return f"{carrier.trace_id:032x}-{carrier.span_id:016x}" if carrier.is_valid else ""
    return carrier.get("traceparent", "")[3:52]


class Sender:
    """The sending end: puts each message's context in force, under a real span."""

    def __init__(self) -> None:
        self._tracer = TracerProvider(shutdown_on_exit=False).get_tracer("lens_core.testing")

    @contextmanager
    def sending(self, hop_message: HopMessage) -> Iterator[Sent]:
        """A block in which the message is sent; fill in ``message_intact`` in it."""
        before = otel_context.get_current()
        sent = Sent(hop_message.index)
        token = otel_context.attach(extract_context(hop_message.carrier))
        try:
            if hop_message.carrier:
                with self._tracer.start_as_current_span("send"):
                    inside = otel_context.get_current()
                    inject_context(sent.carrier)
                    yield sent
                    sent.context_unchanged = otel_context.get_current() is inside
            else:
                inside = otel_context.get_current()
                yield sent
                sent.context_unchanged = otel_context.get_current() is inside
        finally:
            otel_context.detach(token)
            sent.context_unchanged &= otel_context.get_current() == before


class Receiver:
    """The receiving end of a transport whose receivers link: opens the span that a user would.

    Attributes:
        tracer: Of a provider of its own, which records also what the sender did not sample.
    """

    def __init__(self) -> None:
        provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
        self.tracer = provider.get_tracer("lens_core.testing")

    def open_span(self, carrier: Mapping[str, str] | None) -> tuple[tuple[str, ...], str]:
        """Links and parent of a span that is linked to this carrier."""
        with linked_span(self.tracer, "receive", remote_carrier=carrier) as span:
            return relations(span)


def relations(span: Span) -> tuple[tuple[str, ...], str]:
    """Keys of the spans that a span links to, and the key of its parent."""
    if not isinstance(span, ReadableSpan):
        return (), ""
    return tuple(span_key(link.context) for link in span.links), span_key(span.parent)


def arrival(
    sent: Sent,
    *,
    received: Mapping[str, str] | None,
    message_intact: bool,
    footprint: str,
    links: tuple[str, ...],
    parent: str,
    context_before: Context,
    context_after: Context,
    where: str,
) -> HopRecord:
    """The record of one arrival, put together from what the two ends saw."""
    return HopRecord(
        index=sent.index,
        sent=sent.carrier,
        received=dict(received or {}),
        message_intact=message_intact,
        sender_message_intact=sent.message_intact,
        footprint=footprint,
        links=links,
        parent=parent,
        context_unchanged=sent.context_unchanged and context_before == context_after,
        where=where,
    )
