"""The spans of one run of a schedule on this rank, and whom they link to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Link, Span

from lens_contrib.pipelining.hook import guarded
from lens_contrib.pipelining.hop_spans import HopSpans, Place
from lens_contrib.pipelining.wire_links import Wire
from lens_core.errors import MissingExtraError
from lens_core.semconv import LENS_CARRIER

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["RunSpans"]

#: The stages that a stage's operations go to or come from, as far as it says so.
Stages = Callable[[], Sequence[int]]
#: Stage number of a peer that no stage is known to be on.
_UNKNOWN: Final = -1


@dataclass(slots=True)
class _Frame:
    """A frame that was posted, and which one it must be."""

    tensor: torch.Tensor
    pair: tuple[str, int, int]
    due: int


@dataclass(slots=True)
class _Receiving:
    """A recv whose payload the stage has not used yet."""

    span: Span
    source: int
    place: Place
    frames: list[_Frame] = field(default_factory=list)
    ended_ns: int = 0


class RunSpans:
    """What one run of a schedule has open on this rank.

    Args:
        hops: Starts its spans.
        wire: Sends and reads frames; ``None``: links are derived.
    """

    def __init__(self, hops: HopSpans, wire: Wire | None) -> None:
        self.hops: Final = hops
        self._wire = wire
        self._receiving: dict[Place, list[_Receiving]] = {}
        self._unread: list[_Receiving] = []
        self._computed: dict[Place, Span] = {}
        self._local: dict[Place, Link] = {}

    def close(self) -> None:
        """The run is over: so is all that it has open. Never raises."""
        for record in self._unread:
            guarded(self._finish, record)
        for records in self._receiving.values():  # left over where the schedule raised
            for record in records:
                guarded(record.span.end)
        for kept in (self._unread, self._receiving):
            kept.clear()

    def begin(self, name: str, place: Place) -> Span:
        """A stage uses its input: what was received is done, and its computation's span starts.

        The span is linked to where the input came from, if that is on this rank.
        """
        if self.hops.scope is None:  # driven by hand
            self.hops.context = otel_context.get_current()
        for record in self._receiving.pop(place, ()):
            guarded(self._arrived, record)
        link = self._local.pop(place, None)
        span = self.hops.start_computation(name, place, link)
        if self.hops.has_computations:
            self._computed[place] = span
        return span

    def handed_over(self, source: int, destination: Place) -> None:
        """A stage gave its output to another one on this rank, with no message."""
        direction, _, microbatch = destination
        computed = self._computed.get((direction, source, microbatch))
        context = trace.INVALID_SPAN_CONTEXT if computed is None else computed.get_span_context()
        if context.is_valid:
            self._local[destination] = self.hops.link(context, source, microbatch, direction)

    def send(
        self, place: Place | None, stages: Stages, neighbour: int, ops: Sequence[dist.P2POp]
    ) -> Sequence[dist.P2POp]:
        """What a stage must send: the same, or with a frame after each payload.

        A span for each hop. Frames are added whatever becomes of spans: the peer expects them.

        Args:
            place: Where the stage is; ``None`` where its microbatch is not known.
            stages: Whom the operations go to, in their order.
            neighbour: The stage that they go to where ``stages`` does not say.
            ops: The operations, at least one.
        """
        spans: Mapping[int, Span] = {}
        peers: Sequence[int] = ()
        if place is not None:
            peers = guarded(self._peers, stages, neighbour, ops) or ()
            spans = {
                peer: guarded(self._sent, place, peer) or trace.INVALID_SPAN
                for peer in dict.fromkeys(peers)
                if peer != _UNKNOWN
            }
        return ops if self._wire is None else self._framed(place, ops, peers, spans, {})

    def receive(
        self, place: Place | None, stages: Stages, neighbour: int, ops: Sequence[dist.P2POp]
    ) -> Sequence[dist.P2POp]:
        """What a stage must receive: the same, or with a frame after each payload.

        A span for each hop, open until the payload is used; for the rest see :meth:`send`.
        """
        records: dict[int, _Receiving] = {}
        peers: Sequence[int] = ()
        if place is not None:
            peers = guarded(self._peers, stages, neighbour, ops) or ()
            for peer in dict.fromkeys(peers):
                if peer != _UNKNOWN:
                    span = guarded(self.hops.start_recv, place, peer) or trace.INVALID_SPAN
                    records[peer] = _Receiving(span, peer, place)
            for record in self._receiving.pop(place, ()):  # posted before, and never used
                guarded(record.span.end)
            self._receiving[place] = list(records.values())
        return ops if self._wire is None else self._framed(place, ops, peers, {}, records)

    def _framed(
        self,
        place: Place | None,
        ops: Sequence[dist.P2POp],
        peers: Sequence[int],
        spans: Mapping[int, Span],
        records: Mapping[int, _Receiving],
    ) -> list[dist.P2POp]:
        """The operations, each with its frame: in a new list, for theirs may be kept."""
        wire = self._wire
        framed: list[dist.P2POp] = []
        for index, op in enumerate(ops):
            framed.append(op)
            if wire is None or not isinstance(op, dist.P2POp):
                continue
            peer = peers[index] if index < len(peers) else _UNKNOWN
            direction, stage = ("", _UNKNOWN) if place is None else place[:2]
            if op.op is dist.isend:
                span = spans.get(peer, trace.INVALID_SPAN)
                framed.append(wire.send_op(op, (direction, stage, peer), span))
            else:
                pair = (direction, peer, stage)
                receiving = wire.recv_op(op)
                framed.append(receiving)
                record, due = records.get(peer), wire.due(pair)
                if record is not None:
                    record.frames.append(_Frame(receiving.tensor, pair, due))
        return framed

    def _peers(self, stages: Stages, neighbour: int, ops: Sequence[dist.P2POp]) -> list[int]:
        """The stage at the other end of each operation."""
        try:
            named = list(stages())
        except (LookupError, TypeError, AttributeError):
            named = []  # a stage with buffers of its own keeps no record of whom they are for
        is_on = self.hops.layout.is_on
        if len(named) == len(ops) and all(map(is_on, named, (op.peer for op in ops))):
            return named
        named.append(neighbour)
        return [next((s for s in named if is_on(s, op.peer)), _UNKNOWN) for op in ops]

    def _arrived(self, record: _Receiving) -> None:
        if self.hops.roll is not None:
            self.hops.roll.heard(self.hops.layout.rank_of[record.source])
        if not record.frames:
            record.span.end()
        elif record.frames[0].tensor.device.type == "cpu":
            self._finish(record)
        else:
            # Reading it would wait for the device in the middle of the schedule.
            record.ended_ns = time.time_ns()
            self._unread.append(record)

    def _finish(self, record: _Receiving) -> None:
        if self._wire is not None and record.frames:
            sender = trace.INVALID_SPAN_CONTEXT
            for frame in record.frames:
                read = trace.get_current_span(self._wire.read(frame.tensor, frame.pair, frame.due))
                sender = sender if sender.is_valid else read.get_span_context()
            if sender.is_valid:
                direction, _, microbatch = record.place
                link = self.hops.link(sender, record.source, microbatch, direction)
                record.span.add_link(link.context, link.attributes)
            record.span.set_attribute(LENS_CARRIER, "ok" if sender.is_valid else "absent")
        record.span.end(record.ended_ns or None)

    def _sent(self, place: Place, destination: int) -> Span:
        span = self.hops.start_send(place, destination)
        guarded(span.end)  # it marks the moment of sending; the recv shows the waiting
        return span
