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

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from lens_core.detach import detach
from lens_core.diagnostics import describe, diagnostics
from lens_core.errors import ConfigError
from lens_core.identity.derive import HopId
from lens_core.identity.owned import start_owned_span
from lens_core.identity.scope import StepScope, current_step
from lens_core.identity.transports import DerivedMessage, derived_channel
from lens_core.semconv import (
    LENS_CHUNK,
    LENS_HOP_DIRECTION,
    LENS_HOP_SEQUENCE,
    LENS_MICROBATCH,
    LENS_OP,
    LENS_PEER_RANK,
)
from lens_core.spans.managed import span_tracer
from lens_core.spans.start import checked_argument, start_span
from lens_core.spans.status import end_span, record_error

__all__ = ["Hop", "hop_span", "record_sequence_mismatch"]

_NO_CONTEXT: Final = otel_context.Context()
_ENDS: Final = ("send", "recv")
_DIRECTIONS: Final = ("forward", "backward")
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
    sends, receives = _parse(operation) if isinstance(operation, str) else ("", "")
    if not sends and not receives:
        raise ConfigError("operation", operation, _OPERATIONS)
    theirs = mine = _side(peer, microbatch, chunk)
    if sends and receives:
        theirs = _side(
            peer if recv_peer is None else recv_peer,
            microbatch if recv_microbatch is None else recv_microbatch,
            chunk if recv_chunk is None else recv_chunk,
        )
    marked: dict[str, AttributeValue] = {}
    try:
        scope = current_step()
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
            if sends:
                send = _hop(scope, sends, mine, group, outgoing=True)
            if receives:
                recv = _hop(scope, receives, theirs, group, outgoing=False)
                link = _link(scope, recv, theirs)
        # What a combined call waits for is what it receives.
        if receives:
            _describe(marked, "recv", receives, theirs, recv)
        else:
            _describe(marked, "send", sends, mine, send)
        if attributes:
            marked.update(checked_argument("hop_span", "attributes", attributes, Mapping, {}))
        used = span_tracer.tracer if tracer is None else tracer
        hop = _open(used, operation, scope, send, recv, link, confirm, marked)
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


#: Peer, microbatch and chunk of one end of a call.
_Side = tuple[int, int | None, int]


def _side(peer: int, microbatch: int | None, chunk: int) -> _Side:
    """The same in plain integers, of which both ends make the same ids."""
    number = None if microbatch is None else operator.index(microbatch)
    return operator.index(peer), number, operator.index(chunk)


def _hop(scope: StepScope, direction: str, side: _Side, group: str, *, outgoing: bool) -> HopId:
    peer, microbatch, chunk = side
    rank = scope.identity.rank
    source, destination = (rank, peer) if outgoing else (peer, rank)
    tag = f"{group}/{chunk}"
    if microbatch is None:
        counted = HopId(direction, source, destination, -1, tag)
        return HopId(direction, source, destination, scope.count(counted), tag + "/counted")
    hop = HopId(direction, source, destination, microbatch, tag)
    repeat = scope.count(hop)
    return hop if not repeat else hop._replace(repeat=repeat)


@lru_cache(maxsize=64)
def _parse(operation: str) -> tuple[str, str]:
    """Directions of what is sent and of what is received; both empty where it is no operation."""
    directions = {"send": "", "recv": ""}
    words = operation.split("_")
    for end, direction in zip(words[::2], words[1::2], strict=False):
        if end not in _ENDS or direction not in _DIRECTIONS or directions[end]:
            break
        directions[end] = direction
    else:
        if len(words) in (2, 4):
            return directions["send"], directions["recv"]
    return "", ""


def _link(scope: StepScope, recv: HopId, side: _Side) -> Link | None:
    carrier = derived_channel(scope).arrived(DerivedMessage(None, recv)).carrier
    if not carrier:
        diagnostics.record(
            "link.missing",
            f"rank {recv.source} starts no spans under derived ids",
            todo="Set up telemetry and install lens on that rank too.",
        )
        return None
    attributes = scope.identity.peer_attributes(recv.source)
    attributes[LENS_HOP_DIRECTION] = recv.kind
    if side[2]:
        attributes[LENS_CHUNK] = side[2]
    attributes[LENS_HOP_SEQUENCE if side[1] is None else LENS_MICROBATCH] = recv.sequence
    return Link(carrier.span_context, attributes)


def _describe(
    attributes: dict[str, AttributeValue],
    operation: str,
    direction: str,
    side: _Side,
    hop: HopId | None,
) -> None:
    peer, microbatch, chunk = side
    attributes[LENS_OP] = operation
    attributes[LENS_HOP_DIRECTION] = direction
    attributes[LENS_PEER_RANK] = peer
    if chunk:
        attributes[LENS_CHUNK] = chunk
    if microbatch is not None:
        attributes[LENS_MICROBATCH] = microbatch
    elif hop is not None:
        attributes[LENS_HOP_SEQUENCE] = hop.sequence


def _open(
    tracer: Tracer,
    name: str,
    scope: StepScope | None,
    send: HopId | None,
    recv: HopId | None,
    link: Link | None,
    confirm: bool,
    attributes: dict[str, AttributeValue],
) -> Hop:
    links = () if link is None or confirm else (link,)
    kind = SpanKind.PRODUCER if name.startswith("send") else SpanKind.CONSUMER
    if scope is not None and scope.owned and send is not None:
        # What leaves names the hop whose ids the sender's span has; nothing else is on it.
        message = derived_channel(scope).outgoing(DerivedMessage(None, send), context=_NO_CONTEXT)
        ids = scope.hop_context(message.hop)
        span, _ = start_owned_span(
            tracer, name, ids.trace_id, ids.span_id, links=links, kind=kind, attributes=attributes
        )
    else:
        span = start_span(tracer, name, None, kind, attributes, links)
    return Hop(span, send, recv, link if confirm else None)
