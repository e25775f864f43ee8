"""The child of a sampled remote parent, started in few steps.

It is the one span of a process that serves calls. What the SDK's tracer does for it comes out the
same each time: every sampler that follows a sampled remote parent says yes, and attributes that
were checked once need no check. A worker runs its telemetry code once per call, with cold caches,
so each Python function that is not entered counts (``benchmarks/bench_ray.py``). So a span is made
as a copy of one that the SDK made, with all of its own that differs from span to span, and ends
without a copy. Where anything is not as expected (another sampler, limits on attributes, the SDK's
own metrics, another version of the SDK) nothing is started here, and the tracer does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from time import time_ns
from typing import Any, Final, Protocol, cast

from opentelemetry import trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk import trace as sdk_trace
from opentelemetry.sdk.trace import EventBase, Span, Tracer
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler
from opentelemetry.sdk.util import BoundedList
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

__all__ = ["RemoteChildren"]

# Known to opentelemetry-api from 1.40 on; older ones write flags without it.
_RANDOM: Final = int(getattr(TraceFlags, "RANDOM_TRACE_ID", 0))
_Span: Any = getattr(sdk_trace, "_Span", Span)
_new: Final = object.__new__
_tuple: Final = tuple.__new__
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_SAMPLED_RANDOM: Final = TraceFlags(TraceFlags.SAMPLED | _RANDOM)

#: What a span of the SDK holds that is its own; all else is its tracer's.
_OWN: Final = frozenset(
    {"_attributes", "_context", "_end_time", "_kind", "_lock", "_name"}
    | {"_parent", "_start_time", "_status"}
)
_LISTS: Final = frozenset({"_events", "_links"})
_OF_TRACER: Final = frozenset(
    {"_instrumentation_info", "_instrumentation_scope", "_limits", "_record_end_metrics"}
    | {"_record_exception", "_resource", "_sampler", "_set_status_on_exception"}
    | {"_span_processor", "_trace_config"}
)
_OF_ATTRIBUTES: Final = frozenset(
    {"_dict", "_immutable", "_lock", "dropped", "max_value_len", "maxlen"}
)


class _RemoteChild(_Span):  # type: ignore[misc]
    """A span of the SDK, without lists of events and links until there are any."""

    # Any, as all that the SDK keeps to itself.
    _events: Any = BoundedList(0)
    _links: Any = BoundedList(0)
    _attributes: Any
    _end_time: int | None

    def _add_event(self, event: EventBase) -> None:
        with self._lock:
            if "_events" not in self.__dict__:
                self._events = BoundedList(self._limits.max_events)
        super()._add_event(event)

    def _add_link(self, link: Link) -> None:
        with self._lock:
            if "_links" not in self.__dict__:
                self._links = BoundedList(self._limits.max_links)
        super()._add_link(link)

    def end(self, end_time: int | None = None) -> None:
        """End the span; processors get the span itself, in which nothing changes any more."""
        with self._lock:
            is_open = self._end_time is None
            if is_open:
                self._end_time = time_ns() if end_time is None else end_time
                self._attributes._immutable = True
        if is_open:
            self._span_processor.on_end(self)
        else:
            super().end()  # which warns


class _Pipeline(Protocol):
    is_taking: bool

    def on_start(self, span: Span, parent_context: Context | None = None) -> None: ...


class _Generator(Protocol):
    @property
    def draw(self) -> Callable[[int], int]: ...


class RemoteChildren:
    """Starts such spans as one tracer of the SDK would.

    Args:
        tracer: The tracer.
        pipeline_type: Of the only processor that its spans may go to: it gets the spans themselves.
        generator_type: Of the id generator that is asked for bits alone, since a span started here
            has no derived id; any other is asked for an id.

    Raises:
        AttributeError: If the tracer does not have what the SDK's tracers have.
        TypeError: If it is none of the SDK's, its provider has unusual settings, or its spans go
            elsewhere.
    """

    __slots__ = (
        "_attributes",
        "_draw",
        "_generator",
        "_last",
        "_max_attributes",
        "_processor",
        "_sampler",
        "_span",
        "_tracer",
    )

    def __init__(
        self,
        tracer: object,
        pipeline_type: type[_Pipeline],
        generator_type: type[_Generator] | None,
    ) -> None:
        if type(tracer) is not Tracer:
            raise TypeError(f"{type(tracer).__name__} is not the tracer of the SDK")
        limits = tracer._span_limits
        if limits.max_span_attribute_length is not None:
            raise TypeError("values of attributes have to be cut")
        metrics = type(getattr(tracer, "_tracer_metrics", None)).__name__
        if metrics not in ("NoneType", "NoOpTracerMetrics"):
            raise TypeError("the SDK counts its spans")
        if not _follows(tracer.sampler):
            raise TypeError("its sampler may say no, or something of the span")
        self._tracer = tracer
        self._sampler: Sampler = tracer.sampler
        processor: object = tracer.span_processor
        if type(processor) is not pipeline_type:
            raise TypeError(f"its spans go to a {type(processor).__name__}")
        self._processor: Final = processor
        self._max_attributes = limits.max_span_attributes
        self._generator = tracer.id_generator
        own: Any = self._generator
        self._draw: Callable[[int], int] = own.draw if type(own) is generator_type else _draws_zero
        self._span, self._attributes = _prototype(tracer)
        #: The last parent and what a child takes from it: calls come in bursts.
        self._last: tuple[Any, int, TraceFlags, TraceState] = (None, 0, _SAMPLED, TraceState())

    def start(
        self,
        name: str,
        parent: SpanContext,
        context: Context,
        kind: SpanKind,
        attributes: dict[str, AttributeValue],
    ) -> trace.Span | None:
        """A started span; ``None`` where that is for the tracer to decide.

        Args:
            name: Its name.
            parent: The span that is current in ``context``.
            context: The extracted context.
            kind: Its kind.
            attributes: Its attributes, which become the span's own: strings, numbers and booleans,
                or what the SDK made of something else.
        """
        tracer: Any = self._tracer
        last, trace_id, flags, state = self._last
        if parent is not last:
            sampled = parent.trace_flags & TraceFlags.SAMPLED
            if not sampled or not parent.is_remote or not parent.is_valid:
                return None
            trace_id, state = parent.trace_id, parent.trace_state
            flags = _SAMPLED_RANDOM if parent.trace_flags & _RANDOM else _SAMPLED
            self._last = (parent, trace_id, flags, state)
        if (
            tracer.sampler is not self._sampler
            or tracer.id_generator is not self._generator
            or tracer.span_processor is not self._processor
            or not self._processor.is_taking
            or not tracer._tracer_config.is_enabled
            or (self._max_attributes is not None and len(attributes) > self._max_attributes)
        ):
            return None
        kept: Any = _new(BoundedAttributes)
        kept.__dict__.update(self._attributes)
        kept._lock = Lock()
        kept._dict = attributes
        span: Any = _new(_RemoteChild)
        span.__dict__.update(self._span)
        span._lock = Lock()
        span._name = name
        span._kind = kind
        span._parent = parent
        span._attributes = kept
        span._resource = tracer.resource
        span_id = self._draw(64) or self._generator.generate_span_id()
        # Checked by the parent's: valid, and not remote.
        span._context = _tuple(SpanContext, (trace_id, span_id, False, flags, state, True))
        span._start_time = time_ns()
        self._processor.on_start(span, context)
        return cast("trace.Span", span)


def _draws_zero(bits: int) -> int:
    """No id: the generator is to be asked."""
    return 0


def _prototype(tracer: Tracer) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """What every span of a tracer holds, and what its attributes hold beside themselves.

    Raises:
        TypeError: If spans are not made up as they are known here.
    """
    state = TraceState()
    context = SpanContext(1, 2, False, _SAMPLED, state)
    if tuple(context) != (1, 2, False, _SAMPLED, state, True):
        raise TypeError("span contexts are built differently")
    span = _Span(
        name="",
        context=context,
        sampler=tracer.sampler,
        resource=tracer.resource,
        span_processor=tracer.span_processor,
        instrumentation_info=tracer.instrumentation_info,
        limits=tracer._span_limits,
        instrumentation_scope=tracer._instrumentation_scope,
    )
    attributes = vars(span._attributes)
    if vars(span).keys() != _OWN | _LISTS | _OF_TRACER or attributes.keys() != _OF_ATTRIBUTES:
        raise TypeError("spans are built differently")
    shared = {name: value for name, value in vars(span).items() if name not in _LISTS}
    return shared, dict(attributes)


def _follows(sampler: Sampler) -> bool:
    """Whether it takes each child of a sampled remote parent, and says nothing else of it."""
    if type(sampler) is ParentBased:
        sampler = sampler._remote_parent_sampled
    return sampler is ALWAYS_ON
