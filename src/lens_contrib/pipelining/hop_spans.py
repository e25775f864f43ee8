"""Starts the spans of one run of a schedule, and says whom they link to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Tracer

from lens_contrib.pipelining.layout import Layout
from lens_contrib.pipelining.membership import Membership
from lens_core.carrier import Carrier, remote_context
from lens_core.channel import Channel
from lens_core.diagnostics import diagnostics
from lens_core.identity import (
    DerivedMessage,
    DerivedTransport,
    HopId,
    StepScope,
    current_identity,
)
from lens_core.identity.owned import start_owned_span
from lens_core.semconv import LENS_MICROBATCH, LENS_PEER_STAGE, LENS_STAGE
from lens_core.spans.start import start_span

__all__ = ["HopSpans", "Place"]

_SENDS: Final = {"forward": "send_forward", "backward": "send_backward"}
_RECVS: Final = {"forward": "recv_forward", "backward": "recv_backward"}
#: What a sender knows of its span before it starts; the message itself names the ids.
_NOTHING: Final = Carrier()
#: Direction (``forward`` or ``backward``), stage, microbatch.
Place = tuple[str, int, int]


class HopSpans:
    """The spans of one run of a schedule on this rank: their ids, parents and links.

    Args:
        tracer: Starts the spans.
        roll: Knows who derives no ids; ``None`` where links are not derived, and frames bring them.
        layout: The places of the pipeline's stages.
        scope: The step of the run, from which ids are derived; ``None`` where no schedule runs, and
            stages are driven by hand.
        group: What tells this run from others in the same step, alike on all ranks.

    Attributes:
        context: What was current when the run started: the step, parent of all spans here.
        scope: The step of the run.
    """

    def __init__(
        self,
        tracer: Tracer,
        roll: Membership | None,
        layout: Layout,
        scope: StepScope | None,
        group: str,
    ) -> None:
        self.context = otel_context.get_current()
        self.scope: Final = scope
        self._tracer = tracer
        self.roll: Final = roll
        self.layout: Final = layout
        self._group = group
        self._local = trace.get_current_span(self.context).get_span_context()
        self._in_trace = scope is not None and self._local.trace_id == scope.trace_id
        self._hops: set[tuple[str, HopId]] = set()
        self._channel: Channel[DerivedMessage[None]] | None = None
        if roll is not None and scope is not None and scope.identity.derives:
            rank_of = dict(enumerate(layout.rank_of))
            self._channel = Channel(DerivedTransport(scope, source_rank=rank_of))
        identity = current_identity() if scope is None else scope.identity
        self._has_hops = identity.emits(identity.rank, "communication")
        #: Whether computations of microbatches have spans on this rank.
        self.has_computations: Final = identity.emits(identity.rank, "microbatch")

    def link(self, context: SpanContext, source: int, microbatch: int, direction: str) -> Link:
        """A link to another stage's span, with what tells them apart."""
        identity = current_identity() if self.scope is None else self.scope.identity
        return Link(context, self.layout.link_attributes(identity, source, microbatch, direction))

    def _message(self, end: str, place: Place, peer: int) -> DerivedMessage[None] | None:
        """What this end of a hop sends or receives; ``None`` where its id is not derived.

        What comes once more in a run is not part of it: an id is for one span.
        """
        if self._channel is None:
            return None
        direction, stage, microbatch = place
        source, destination = (stage, peer) if end == "send" else (peer, stage)
        hop = HopId(direction, source, destination, microbatch, self._group)
        if (end, hop) in self._hops:
            return None
        self._hops.add((end, hop))
        return DerivedMessage(None, hop)

    def start_send(self, place: Place, destination: int) -> Span:
        """The span of a send, under the id that its receiver derives where ids are derived."""
        if not self._has_hops:
            return trace.INVALID_SPAN
        direction, stage, microbatch = place
        name, scope = _SENDS[direction], self.scope
        attributes = {
            LENS_STAGE: stage,
            LENS_MICROBATCH: microbatch,
            LENS_PEER_STAGE: destination,
        }
        message = self._message("send", place, destination)
        if message is None or scope is None or self._channel is None or not scope.owned:
            return self.start(name, SpanKind.PRODUCER, attributes, None)
        sent = self._channel.transport.inject(message, _NOTHING)
        span, _ = start_owned_span(
            self._tracer,
            name,
            scope.trace_id,
            scope.hop_span_id(sent.hop),
            context=self.context,
            kind=SpanKind.PRODUCER,
            attributes=attributes,
            ours=True,
            local=self._local,
        )
        return span

    def start_recv(self, place: Place, source: int) -> Span:
        """The span of a receive, linked to the send that it is of where that can be derived."""
        if not self._has_hops:
            return trace.INVALID_SPAN
        direction, stage, microbatch = place
        link = self._derived_link(place, source) if self.roll is not None else None
        attributes = {LENS_STAGE: stage, LENS_MICROBATCH: microbatch, LENS_PEER_STAGE: source}
        return self.start(_RECVS[direction], SpanKind.CONSUMER, attributes, link)

    def start_computation(self, name: str, place: Place, link: Link | None) -> Span:
        """The span of a computation, or what stands for it where there is to be none."""
        if not self.has_computations:
            return trace.NonRecordingSpan(trace.get_current_span(self.context).get_span_context())
        attributes = {LENS_STAGE: place[1], LENS_MICROBATCH: place[2]}
        return self.start(name, SpanKind.INTERNAL, attributes, link)

    def start(
        self, name: str, kind: SpanKind, attributes: Mapping[str, int], link: Link | None
    ) -> Span:
        """A span below the step, in its trace whatever is current."""
        links = () if link is None else (link,)
        scope = self.scope
        if self._in_trace or scope is None or not scope.owned or not scope.identity.derives:
            context = otel_context.get_current() if scope is None else self.context
            return start_span(self._tracer, name, context, kind, attributes, links, ours=True)
        # The span that is current is none of the step's: in the trace of the step all the same,
        # with a link to it.
        span, _ = start_owned_span(
            self._tracer,
            name,
            scope.trace_id,
            0,
            context=self.context,
            links=links,
            kind=kind,
            attributes=attributes,
            ours=True,
            local=self._local,
        )
        return span

    def _derived_link(self, place: Place, source: int) -> Link | None:
        direction, stage, microbatch = place
        ids, message = None, self._message("recv", place, source)
        rank, scope = self.layout.rank_of[source], self.scope
        if scope is not None and not scope.identity.emits(rank, "communication"):
            return None  # it has no such span: that is what its groups are set to
        is_absent = self.roll is not None and rank in self.roll.absent
        if message is not None and self._channel is not None and not is_absent:
            ids = self._channel.arrived(message).carrier.ids
        if ids is None:
            diagnostics.record(
                "link.missing",
                f"stage {stage} cannot derive the id of stage {source}'s send",
                todo="Call agree_run_key() and instrument_pipelining() on all ranks, after "
                "telemetry is set up there; a stage that no schedule drives needs hop_span().",
            )
            return None
        return self.link(remote_context(ids), source, microbatch, direction)
