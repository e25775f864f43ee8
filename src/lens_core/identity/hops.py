"""Links for hand-written pipeline schedules: a span around the user's own send and recv calls.

    with hop_span("recv_forward", peer=previous, microbatch=i):
        dist.recv(activation, previous)
    ...
    with hop_span("send_forward", peer=following, microbatch=i):
        dist.send(output, following)

Nothing is sent beside the payload. The sender's span is started under an id that is derived from
step, direction, ranks and microbatch; the receiver derives the same id and links to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from lens_core.carrier import Carrier, TraceIds, remote_context
from lens_core.channel import Channel
from lens_core.current_context import detach
from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import ConfigError
from lens_core.identity.current import Identity
from lens_core.identity.derive import HopId
from lens_core.identity.hop_end import HopEnd, hop_end, parse_operation
from lens_core.identity.owned import start_owned_span
from lens_core.identity.scope import StepScope, current_step
from lens_core.identity.transports import DerivedMessage, DerivedTransport
from lens_core.spans.managed import span_tracer
from lens_core.spans.start import checked_argument, start_span
from lens_core.spans.status import end_span, record_error
from lens_core.spans.switch import span_groups

__all__ = ["Hop", "hop_span", "record_sequence_mismatch"]

#: The span group of hops.
HOP_GROUP: Final = "communication"
#: What a sender knows of its span before it starts; the message itself names the ids.
_NOTHING: Final = Carrier()
_OPERATIONS: Final = "such as send_forward or send_forward_recv_backward"


@dataclass(slots=True)
class Hop:
    """An open hop.

    Attributes:
        span: The open span.
        send: The hop that the body sends; ``None`` where it only receives.
        recv: The hop that the body receives; ``None`` where it only sends.
    """

    span: Span
    send: HopId | None = None
    recv: HopId | None = None
    _pending: Link | None = None

    def confirm(self, sequence: int) -> bool:
        """Link to the sender, if the sequence number that its frame brought is the expected one.

        For :func:`hop_span` with ``confirm=True``. A difference means that one side skipped or
        repeated a call: the link would lead to another message's span, so none is made, and
        ``hop.sequence_mismatch`` is counted.

        Returns:
            Whether the numbers agree.
        """
        if self.send is None and self.recv is None:
            return False  # the group is off: nothing is counted and nothing linked
        expected = None if self.recv is None else self.recv.sequence
        if sequence != expected:
            record_sequence_mismatch(expected, sequence)
            return False
        link, self._pending = self._pending, None
        if link is not None:
            self.span.add_link(link.context, link.attributes)
        return True


def record_sequence_mismatch(expected: int | None, received: int) -> None:
    """Count that a frame brought another sequence number than was expected."""
    diagnostics.record(
        "hop.sequence_mismatch",
        f"expected message {expected}, the frame is of message {received}",
        todo="One side skipped or repeated a send or recv; the link is left out.",
    )


@contextmanager
def hop_span(
    operation: str,
    *,
    peer: int,
    microbatch: int | None = None,
    recv_peer: int | None = None,
    recv_microbatch: int | None = None,
    chunk: int = 0,
    recv_chunk: int | None = None,
    group: str = "",
    confirm: bool = False,
    tracer: Tracer | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[Hop]:
    """A span around a send, a recv, or both at once, linked to the sender of what is received.

    Inside :func:`~lens_core.identity.step_span`. Both sides must name the hop alike: the same
    direction, microbatch, chunk and group. Outside a step, or where the peer starts no spans under
    derived ids, the span is opened all the same, without a link; the latter is counted as
    ``link.missing``.

    Args:
        operation: ``send_forward``, ``recv_forward``, ``send_backward`` or ``recv_backward``; or
            one of each joined by ``_``, such as ``send_forward_recv_backward``, for a combined
            call.
        peer: Global rank at the other end.
        microbatch: Microbatch index. Where it is not given, hops of one direction between two
            ranks are counted; then a call that one side skips shifts all later links of the step,
            so give it, or send a frame and use ``confirm``.
        recv_peer: Global rank that a combined call receives from; ``peer`` if not given.
        recv_microbatch: Microbatch that a combined call receives; ``microbatch`` if not given.
        chunk: Model chunk of the **receiving** stage, where a rank holds several.
        recv_chunk: The same for what a combined call receives; ``chunk`` if not given.
        group: Tells pipelines apart that run in one step.
        confirm: Make the link only in :meth:`Hop.confirm`, when a frame has brought the sender's
            sequence number.
        tracer: Tracer for the span; that of the telemetry set up here if not given.
        attributes: Attributes of the span.

    Yields:
        The open hop.

    Raises:
        ConfigError: If ``operation`` is not one of those above.
        TypeError: If a number is not an integer.
    """
    sends, receives = parse_operation(operation) if isinstance(operation, str) else ("", "")
    if not sends and not receives:
        raise ConfigError("operation", operation, _OPERATIONS)
    ours = theirs = None
    if sends:
        ours = hop_end("send", sends, peer, microbatch, chunk)
    if receives:
        theirs = hop_end(
            "recv",
            receives,
            peer if ours is None or recv_peer is None else recv_peer,
            microbatch if ours is None or recv_microbatch is None else recv_microbatch,
            chunk if ours is None or recv_chunk is None else recv_chunk,
        )
    scope = current_step()
    if _is_off(scope):
        yield Hop(trace.NonRecordingSpan(trace.get_current_span().get_span_context()))
        return
    try:
        if scope is not None and not scope.identity.derives:
            scope = None
        send = recv = link = None
        if scope is None:
            diagnostics.record(
                "link.missing",
                f"{operation} runs outside a step whose ids can be derived",
                todo="Call hop_span() inside step_span(), with a run key that all ranks share.",
            )
        else:
            channel = scope.channel
            if channel is None:
                channel = scope.channel = Channel(DerivedTransport(scope))
            if ours is not None:
                # Not Channel.outgoing(): the context to send is that of the span yet to start.
                send = channel.transport.inject(
                    DerivedMessage(None, ours.hop(scope, group)), _NOTHING
                ).hop
            if theirs is not None:
                recv = theirs.hop(scope, group)
                ids = channel.arrived(DerivedMessage(None, recv)).carrier.ids
                link = _link(scope.identity, theirs, recv, ids)
        marked: dict[str, AttributeValue] = {}
        # What a combined call waits for is what it receives.
        if theirs is not None:
            marked = theirs.span_attributes(recv)
        elif ours is not None:
            marked = ours.span_attributes(send)
        is_ours = not attributes
        if attributes:
            marked.update(checked_argument("hop_span", "attributes", attributes, Mapping, {}))
        used = span_tracer.tracer if tracer is None else tracer
        kind = SpanKind.PRODUCER if operation.startswith("send") else SpanKind.CONSUMER
        links = () if link is None or confirm else (link,)
        # Where steps are off, what is received is in the trace of the step all the same.
        in_step = send is not None or (
            scope is not None and not scope.identity.emits(scope.identity.rank, "step")
        )
        if scope is not None and scope.owned and in_step:
            span, _ = start_owned_span(
                used,
                operation,
                scope.trace_id,
                0 if send is None else scope.hop_span_id(send),
                links=links,
                kind=kind,
                attributes=marked,
                ours=is_ours,
            )
        else:
            span = start_span(used, operation, None, kind, marked, links, ours=is_ours)
        hop = Hop(span, send, recv, link if confirm else None)
    except Exception as error:  # noqa: BLE001 - a foreign tracer or sampler may raise anything
        diagnostics.record("span.failed", describe(error))
        hop = Hop(trace.INVALID_SPAN)
    token = otel_context.attach(trace.set_span_in_context(hop.span))
    try:
        yield hop
    except BaseException as error:
        record_error(hop.span, error)
        raise
    finally:
        detach(token)
        end_span(hop.span)


def _is_off(scope: StepScope | None) -> bool:
    """Whether this rank makes no spans of hops: as the ranks agreed, inside a step."""
    if scope is None:
        return HOP_GROUP in span_groups.removed
    return not scope.identity.emits(scope.identity.rank, HOP_GROUP)


def _link(identity: Identity, end: HopEnd, hop: HopId, ids: TraceIds | None) -> Link | None:
    if not identity.emits(end.peer, HOP_GROUP):
        return None  # it has no such span: that is what its groups are set to
    if ids is None:
        diagnostics.record(
            "link.missing",
            f"rank {end.peer} starts no spans under derived ids",
            todo="Set up telemetry and install lens on that rank too.",
        )
        return None
    attributes = identity.peer_attributes(end.peer)
    attributes.update(end.link_attributes(hop))
    # By its ids and not as text: a link needs no propagator that reads a traceparent.
    return Link(remote_context(ids), attributes)
