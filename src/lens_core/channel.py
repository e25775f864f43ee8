"""Crossing a process boundary with any transport: all policy, in one place.

:func:`outbound` puts the current context on a message that leaves; :func:`inbound` takes it off one
that arrived and opens the receiver's span. They never raise for what telemetry did wrong: it is
counted and logged once (:mod:`lens_core.diagnostics`), the message goes on without a context, and
the receiver's span says what became of the carrier (``lens.carrier`` = ``ok | absent | rejected``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from lens_core.carrier import inject_context, read_carrier
from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import CarrierError, FrameError
from lens_core.links import CarrierStatus, linked_span
from lens_core.semconv import LENS_CARRIER, LENS_TRANSPORT
from lens_core.transport import Received, Transport

__all__ = [
    "CarrierStatus",
    "Inbound",
    "Relation",
    "current_carrier",
    "inbound",
    "outbound",
    "receive",
]

M = TypeVar("M")

#: How a receiver's span relates to the sender's: ``"link"`` for peers that run at the same time,
#: ``"child"`` for calls.
Relation = Literal["link", "child"]


@dataclass(frozen=True, slots=True)
class Inbound(Generic[M]):
    """One arrived message.

    Attributes:
        message: The user's part.
        carrier: The sender's carrier; empty unless ``status`` is ``OK``.
        status: What became of the carrier.
        context: The sender's context, extracted; empty unless ``status`` is ``OK``.
        span: The receiver's open span; invalid where the message was only :func:`receive`-d.
    """

    message: M
    carrier: Mapping[str, str]
    status: CarrierStatus
    context: Context
    span: Span = trace.INVALID_SPAN


def current_carrier(context: Context | None = None) -> dict[str, str]:
    """The headers of a context as a new carrier; empty where it holds nothing. Never raises."""
    carrier: dict[str, str] = {}
    try:
        return inject_context(carrier, context)
    except Exception as error:  # noqa: BLE001 - a foreign propagator may raise anything
        diagnostics.record("carrier.inject_failed", describe(error))
        return {}


def outbound(transport: Transport[M], message: M, *, context: Context | None = None) -> M:
    """The message with the current context on it.

    A message is made in any case, of the same shape, whether or not there is a context.

    Args:
        transport: Where the carrier rides.
        message: What the user is about to send; not changed.
        context: The context to send; the current one if not given.

    Raises:
        MessageError: If nothing can ride on this message. The same call would fail on every rank
            and with tracing off, so it is the caller's to mend.
    """
    carrier = current_carrier(context)
    try:
        return transport.inject(message, carrier)
    except (CarrierError, FrameError) as error:
        # The peer still expects a message of this shape, so send one that holds no context.
        diagnostics.record("carrier.inject_failed", f"{transport.name}: {error}")
        return transport.inject(message, {})


def receive(transport: Transport[M], message: M) -> Inbound[M]:
    """The parts of a message that arrived, with no span opened.

    Args:
        transport: Where the carrier rides.
        message: What arrived.

    Raises:
        MessageError: If the message is of a kind that this transport cannot have made.
    """
    received: Received[M] = transport.extract(message)
    if received.rejected is not None:
        diagnostics.record(
            "carrier.rejected",
            f"{transport.name}: {received.rejected}",
            todo="Check that both ends use the same version of lens and the same mode.",
        )
        return Inbound(received.message, {}, CarrierStatus.REJECTED, Context())
    if not received.carrier:
        return Inbound(received.message, {}, CarrierStatus.ABSENT, Context())
    if received.truncated:
        diagnostics.record(
            "carrier.truncated",
            f"{transport.name}: the sender left out headers that did not fit",
            todo="Send less baggage; the trace itself is complete.",
        )
    context, refused = read_carrier(received.carrier)
    if not context:
        # Headers that no propagator here reads are as good as none.
        status = CarrierStatus.REJECTED if refused else CarrierStatus.ABSENT
        return Inbound(received.message, {}, status, context)
    return Inbound(received.message, received.carrier, CarrierStatus.OK, context)


@contextmanager
def inbound(
    transport: Transport[M],
    message: M,
    name: str,
    *,
    relation: Relation = "link",
    tracer: Tracer | None = None,
    kind: SpanKind = SpanKind.CONSUMER,
    attributes: Mapping[str, AttributeValue] | None = None,
    link_attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[Inbound[M]]:
    """A message that arrived, under an open span that relates to the sender's.

    With ``relation="link"`` the span is local (a child of the local current span, or a root) and
    has a Link to the sender's. With ``"child"`` it is a child of the sender's span, and the
    sender's baggage is current in the body. An exception of any kind from the body is recorded and
    propagates; the span ends and the context before is restored in every case.

    Args:
        transport: Where the carrier rides.
        message: What arrived.
        name: Name of the span.
        relation: How the span relates to the sender's.
        tracer: Tracer for the span; one of the global provider if not given.
        kind: Kind of the span.
        attributes: Attributes of the span, given at its start.
        link_attributes: Attributes of the Link, such as ``lens.peer.rank``.

    Yields:
        The user's message with the carrier, its status and the open span.

    Raises:
        MessageError: If the message is of a kind that this transport cannot have made.
    """
    arrived = receive(transport, message)
    marked = dict(attributes or ())
    marked[LENS_CARRIER] = arrived.status.value
    marked[LENS_TRANSPORT] = transport.name
    with linked_span(
        tracer if tracer is not None else trace.get_tracer("lens_core"),
        name,
        remote_contexts=(arrived.context,) if relation == "link" else (),
        parent=arrived.context if relation == "child" and arrived.context else None,
        kind=kind,
        span_attributes=marked,
        link_attributes=link_attributes,
    ) as span:
        yield Inbound(arrived.message, arrived.carrier, arrived.status, arrived.context, span)
