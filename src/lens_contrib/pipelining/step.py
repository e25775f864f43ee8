"""One call of a schedule on this rank: its step, its open spans, and whom they link to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, Tracer

from lens_contrib.pipelining.layout import Layout
from lens_contrib.pipelining.wire import Wire
from lens_core.errors import MissingExtraError
from lens_core.identity import HopId, StepScope, current_identity, current_step, step_span
from lens_core.identity.owned import is_sampled, start_owned_child, start_owned_span
from lens_core.incidents import incidents
from lens_core.semconv import LENS_CARRIER, LENS_MICROBATCH, LENS_PEER_STAGE, LENS_STAGE

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["PipelineTrace", "guarded"]

P = ParamSpec("P")
R = TypeVar("R")

_SENDS: Final = {"forward": "send_forward", "backward": "send_backward"}
_RECVS: Final = {"forward": "recv_forward", "backward": "recv_backward"}
#: Direction (``forward`` or ``backward``), stage, microbatch.
Place = tuple[str, int, int]


def guarded(action: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """The action's result; ``None`` where it raised, which is counted: training goes on."""
    try:
        return action(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - a foreign tracer or sampler may raise anything
        incidents.record("pipelining.failed", f"{type(error).__name__}: {error}")
        return None


@dataclass(slots=True)
class _Frame:
    """A frame that was posted, and which one it must be."""

    tensor: torch.Tensor
    pair: tuple[str, int, int]
    due: int
    source: int
    microbatch: int


@dataclass(slots=True)
class _Receiving:
    """A recv whose payload the stage has not used yet."""

    span: Span
    frame: _Frame | None
    ended_ns: int = 0


class PipelineTrace:
    """What the hooks of all stages of one schedule on this rank share.

    Args:
        name: Name of the pipeline, the same on all of its ranks.
        layout: Places of its stages.
        tracer: Starts the spans.
        wire: Sends and reads frames; ``None``: links are derived.
    """

    def __init__(self, name: str, layout: Layout, tracer: Tracer, wire: Wire | None) -> None:
        self.name: Final = name
        self.layout: Final = layout
        self.tracer: Final = tracer
        self._wire = wire
        self._calls = 0
        self._scope: StepScope | None = None
        self._has_step_span = True
        self._group = ""
        #: What was current when the schedule started: the step, parent of all spans here.
        self.context = otel_context.get_current()
        self._receiving: dict[Place, list[_Receiving]] = {}
        self._unread: list[_Receiving] = []
        self._computed: dict[Place, Span] = {}
        self._local: dict[Place, Link] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """A block in which the schedule runs once; opens a step where none is open."""
        kind = f"pipeline {self.name}"
        with (
            nullcontext()
            if current_step() is not None
            else step_span(self._calls, name="pipeline.step", kind=kind, tracer=self.tracer)
        ):
            guarded(self.new_step)
            try:
                yield
            finally:
                guarded(self.end_step)

    def new_step(self) -> None:
        """The schedule starts to run once more."""
        self.end_step()
        scope = current_step()
        self._has_step_span = scope is not None
        if scope is None:
            # A stage that was instrumented alone, in a program that opens no steps.
            who, kind = current_identity(), f"pipeline {self.name}"
            scope = StepScope(who, kind, self._calls, who.open_step(kind, self._calls))
            scope.sampled = is_sampled(self.tracer, scope.trace_id, kind)
            scope.owned = True
        self._calls += 1
        # The schedule may run several times in one step; all ranks count alike.
        call = scope.count(f"pipeline {self.name}")
        self._group = f"{self.name}/{call}@{self.layout.first_rank}"
        self.context = otel_context.get_current()
        self._scope = scope if scope.identity.derives else None

    def end_step(self) -> None:
        """The schedule has run: nothing of it stays open."""
        for record in self._unread:
            self._finish(record)
        for records in self._receiving.values():  # left over where the schedule raised
            for record in records:
                record.span.end()
        self._unread.clear()
        self._receiving.clear()
        self._computed.clear()
        self._local.clear()
        if self._wire is not None:
            self._wire.new_step()

    def begin(self, name: str, place: Place) -> Span:
        """A stage uses its input: what was received is done, and its computation's span starts.

        The span is linked to where the input came from, if that is on this rank.
        """
        if place in self._receiving:
            self._arrived(place)
        link = self._local.pop(place, None)
        attributes = {LENS_STAGE: place[1], LENS_MICROBATCH: place[2]}
        span = self._start(name, SpanKind.INTERNAL, attributes, link)
        self._computed[place] = span
        return span

    def handed_over(self, source: int, destination: Place) -> None:
        """A stage gave its output to another one on this rank, with no message."""
        direction, _, microbatch = destination
        computed = self._computed.get((direction, source, microbatch))
        context = trace.INVALID_SPAN_CONTEXT if computed is None else computed.get_span_context()
        if context.is_valid:
            identity = current_identity() if self._scope is None else self._scope.identity
            attributes = self.layout.link_attributes(identity, source, microbatch, direction)
            self._local[destination] = Link(context, attributes)

    def send(self, place: Place, destinations: list[int], ops: list[dist.P2POp]) -> None:
        """A stage is about to send: a span for each hop, and its frame where frames are sent.

        The frame is added whatever becomes of the span: the peer has posted a receive for it.
        """
        direction, stage, _ = place
        for destination in destinations:
            span = guarded(self._start_send, place, destination) or trace.INVALID_SPAN
            guarded(span.end)  # it marks the moment of sending; the recv shows the waiting
            if self._wire is not None:
                like = _to(ops, self.layout.rank_of[destination])
                if like is not None:
                    ops.append(self._wire.send_op(like, (direction, stage, destination), span))

    def receive(self, place: Place, sources: list[int], ops: list[dist.P2POp]) -> None:
        """A stage is about to receive: a span for each hop, open until the payload is used.

        The frame is received whatever becomes of the span: the peer sends one.
        """
        records = []
        for source in sources:
            frame = None
            if self._wire is not None:
                like = _to(ops, self.layout.rank_of[source])
                if like is not None:
                    pair = (place[0], source, place[1])
                    op = self._wire.recv_op(like)
                    ops.append(op)
                    frame = _Frame(op.tensor, pair, self._wire.due(pair), source, place[2])
            span = guarded(self._start_recv, place, source) or trace.INVALID_SPAN
            records.append(_Receiving(span, frame))
        self._receiving[place] = records

    def _arrived(self, place: Place) -> None:
        for record in self._receiving.pop(place):
            frame = record.frame
            if frame is None:
                record.span.end()
            elif frame.tensor.device.type == "cpu":
                self._finish(record)
            else:
                # Reading it would wait for the device in the middle of the schedule.
                record.ended_ns = time.time_ns()
                self._unread.append(record)

    def _finish(self, record: _Receiving) -> None:
        frame = record.frame
        if frame is not None and self._wire is not None:
            sender = self._wire.read(frame.tensor, frame.pair, frame.due)
            context = trace.get_current_span(sender).get_span_context()
            if context.is_valid:
                identity = current_identity() if self._scope is None else self._scope.identity
                attributes = self.layout.link_attributes(
                    identity, frame.source, frame.microbatch, frame.pair[0]
                )
                record.span.add_link(context, attributes)
            record.span.set_attribute(LENS_CARRIER, "ok" if context.is_valid else "absent")
        record.span.end(record.ended_ns or None)

    def _start_send(self, place: Place, destination: int) -> Span:
        direction, stage, microbatch = place
        name, scope = _SENDS[direction], self._scope
        attributes = {
            LENS_STAGE: stage,
            LENS_MICROBATCH: microbatch,
            LENS_PEER_STAGE: destination,
        }
        if self._wire is not None or scope is None or not scope.owned:
            return self._start(name, SpanKind.PRODUCER, attributes, None)
        hop = HopId(direction, stage, destination, microbatch, self._group)
        span_id = scope.hop_span_id(hop)
        if self._has_step_span:
            return start_owned_child(
                self.tracer, name, span_id, self.context, SpanKind.PRODUCER, attributes
            )
        span, _ = start_owned_span(
            self.tracer,
            name,
            scope.trace_id,
            span_id,
            context=self.context,
            kind=SpanKind.PRODUCER,
            attributes=attributes,
        )
        return span

    def _start_recv(self, place: Place, source: int) -> Span:
        direction, stage, microbatch = place
        link = None if self._wire is not None else self._derived_link(place, source)
        attributes = {LENS_STAGE: stage, LENS_MICROBATCH: microbatch, LENS_PEER_STAGE: source}
        return self._start(_RECVS[direction], SpanKind.CONSUMER, attributes, link)

    def _start(
        self, name: str, kind: SpanKind, attributes: Mapping[str, int], link: Link | None
    ) -> Span:
        links = () if link is None else (link,)
        if self._has_step_span or self._scope is None:
            return self.tracer.start_span(
                name, self.context, kind, attributes, links, None, False, False
            )
        # No span of the step to be a child of: a root, but in the trace of the step.
        span, _ = start_owned_span(
            self.tracer,
            name,
            self._scope.trace_id,
            0,
            context=self.context,
            links=links,
            kind=kind,
            attributes=attributes,
        )
        return span

    def _derived_link(self, place: Place, source: int) -> Link | None:
        direction, stage, microbatch = place
        scope = self._scope
        if scope is None or not scope.identity.includes(self.layout.rank_of[source]):
            incidents.record(
                "link.missing",
                f"stage {stage} cannot derive the id of stage {source}'s send",
                todo="Call agree_run_key() on all ranks, after telemetry is set up there.",
            )
            return None
        hop = HopId(direction, source, stage, microbatch, self._group)
        attributes = self.layout.link_attributes(scope.identity, source, microbatch, direction)
        return Link(scope.hop_context(hop), attributes)


def _to(ops: list[dist.P2POp], rank: int) -> dist.P2POp | None:
    return next((op for op in ops if op.peer == rank), None)
