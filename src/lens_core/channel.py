"""Crossing a process boundary with any transport: all policy, in one place.

A :class:`Channel` puts the current context on a message that leaves and takes it off one that
arrived. It never raises for what telemetry did wrong: that is counted and logged once
(:mod:`lens_core.diagnostics`), the message goes on without a context, and the carrier's status
says what became of it. :func:`outbound` and :func:`inbound` are the same for a single message, the
latter under the receiver's span (``lens.carrier`` = ``ok | absent | rejected``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from lens_core.carrier import Carrier
from lens_core.diagnostics import diagnostics
from lens_core.errors import CarrierError, FrameError, MessageError
from lens_core.links import linked_span
from lens_core.propagation import current_carrier, read_carrier
from lens_core.semconv import LENS_CARRIER, LENS_TRANSPORT
from lens_core.sequence import SequenceChecker
from lens_core.transport import Received, Transport

__all__ = ["Channel", "Inbound", "Relation", "inbound", "outbound"]

M = TypeVar("M")

#: How a receiver's span relates to the sender's: ``"link"`` for peers that run at the same time,
#: ``"child"`` for calls.
Relation = Literal["link", "child"]


class Channel(Generic[M]):
    """A transport between two ends, the count of its messages, and what is done when it fails.

    Args:
        transport: Where the carrier rides.
        sequence: The count of the messages; a new one if not given.
        where: Names the two ends, if they ever have to be named: ``"rank 1 from rank 0"``.
        needs_span: Whether a context without a valid span is sent as no context, baggage or not.
    """

    __slots__ = ("_needs_span", "_where", "sequence", "transport")

    def __init__(
        self,
        transport: Transport[M],
        sequence: SequenceChecker | None = None,
        *,
        where: Callable[[], str] | None = None,
        needs_span: bool = False,
    ) -> None:
        self.transport = transport
        self.sequence = SequenceChecker() if sequence is None else sequence
        self._where = where
        self._needs_span = needs_span

    def outgoing(
        self, message: M, *, context: Context | None = None, sequence: int | None = None
    ) -> M:
        """The message with a context on it, of the same shape whether or not there is one.

        Args:
            message: What the user is about to send; not changed.
            context: The context to send; the current one if not given.
            sequence: Number of the message; the next one if not given.

        Raises:
            MessageError: If nothing can ride on this message. The same call would fail on every
                rank and with tracing off, so it is the caller's to mend.
        """
        counted = sequence is None
        if sequence is None:
            sequence = next(self.sequence.sent)
        carrier = current_carrier(context, sequence=sequence, needs_span=self._needs_span)
        try:
            return self.transport.inject(message, carrier)
        except (CarrierError, FrameError) as error:
            # The peer still expects a message of this shape, so send one that holds no context.
            diagnostics.record(
                "carrier.inject_failed",
                f"{self._ends()}: {error}",
                todo="Check OTEL_PROPAGATORS: a propagator wrote what no message can hold.",
            )
            return self.transport.inject(message, Carrier(sequence=sequence))
        except MessageError:
            if counted:
                self.sequence.put_back(sequence)
            raise

    def arrived(self, message: M, *, due: int | None = None, follow: bool = True) -> Received[M]:
        """The parts of a message that arrived; the carrier's status says what became of it.

        Args:
            message: What arrived.
            due: Sequence number that it must have, where messages are counted.
            follow: Whether to count on from the sender's number after a message out of turn.

        Raises:
            MessageError: If the message is of a kind that this transport cannot have made.
        """
        received: Received[M] = self.transport.extract(message)
        carrier = received.carrier
        if type(carrier) is not Carrier:  # a transport of the user's may give a dict
            carrier = received.carrier = read_carrier(carrier)
        if carrier.ids is None or (due is not None and carrier.sequence != due):
            received.carrier = self._judged(carrier, due, follow)
        return received

    def _judged(self, carrier: Carrier, due: int | None, follow: bool) -> Carrier:
        """The carrier, where it is in order; what is not is counted and reported once."""
        sequence = carrier.sequence
        refused = carrier.take_problem()
        if refused is not None:
            diagnostics.record(
                "carrier.rejected",
                f"{self._ends()}: {refused}",
                todo="Let both ends use the same version of lens, the same calls and modes.",
            )
        elif due is not None and sequence is not None and sequence != due:
            problem = f"message {sequence} came where {due} was due"
            diagnostics.record(
                "carrier.out_of_turn",
                f"{self._ends()}: {problem}; its context is dropped",
                todo="A rank made a call that another skipped; all must make the same calls.",
            )
            if follow:
                self.sequence.ahead += sequence - due
            return Carrier.refused(problem, sequence=sequence, reported=True)
        elif carrier.truncated:
            diagnostics.record(
                "carrier.truncated",
                f"{self._ends()}: the sender left out headers that did not fit",
                todo="Put less into baggage and tracestate; the trace itself is complete.",
            )
        return carrier

    def _ends(self) -> str:
        name = self.transport.name
        return name if self._where is None else f"{name}, {self._where()}"


@dataclass(frozen=True, slots=True)
class Inbound(Generic[M]):
    """One arrived message, under the receiver's span.

    Attributes:
        message: The user's part.
        carrier: The sender's carrier; empty unless its status is ``ok``.
        span: The receiver's open span.
    """

    message: M
    carrier: Carrier
    span: Span


def outbound(
    channel: Channel[M] | Transport[M], message: M, *, context: Context | None = None
) -> M:
    """The message with the current context on it (:meth:`Channel.outgoing`).

    Args:
        channel: A channel; or a transport, for a message that is not counted.
        message: What the user is about to send; not changed.
        context: The context to send; the current one if not given.

    Raises:
        MessageError: If nothing can ride on this message.
    """
    return _channel(channel).outgoing(message, context=context)


@contextmanager
def inbound(
    channel: Channel[M] | Transport[M],
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
        channel: A channel, or a transport.
        message: What arrived.
        name: Name of the span.
        relation: How the span relates to the sender's.
        tracer: Tracer for the span; one of the global provider if not given.
        kind: Kind of the span.
        attributes: Attributes of the span, given at its start.
        link_attributes: Attributes of the Link, such as ``lens.peer.rank``.

    Yields:
        The user's message with the carrier and the open span.

    Raises:
        MessageError: If the message is of a kind that this transport cannot have made.
    """
    channel = _channel(channel)
    received = channel.arrived(message)
    carrier = received.carrier
    marked = dict(attributes or ())
    marked[LENS_CARRIER] = carrier.status.value
    marked[LENS_TRANSPORT] = channel.transport.name
    with linked_span(
        tracer if tracer is not None else trace.get_tracer("lens_core"),
        name,
        remote_contexts=(carrier.context(),) if relation == "link" else (),
        parent=carrier.context() if relation == "child" and carrier else None,
        kind=kind,
        span_attributes=marked,
        link_attributes=link_attributes,
    ) as span:
        yield Inbound(received.message, carrier, span)


def _channel(channel: Channel[M] | Transport[M]) -> Channel[M]:
    return channel if isinstance(channel, Channel) else Channel(channel)
