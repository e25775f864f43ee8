"""The callee's side: one traced execution, from the carrier to the ended span.

:class:`Callee` is made once per function and process, :class:`Execution` once per call. The
by-value wrapper (:mod:`lens_contrib.ray.wrapping`) goes through both on every remote call, so this
module is written for few steps rather than for few lines (``benchmarks/bench_ray.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind
from opentelemetry.util.types import AttributeValue

from lens_contrib.ray.call_spec import CallSpec, tracer_of
from lens_contrib.ray.compat import in_worker
from lens_contrib.ray.failure import record_failure
from lens_contrib.ray.transports import CARRIER_ARGUMENT, RayTransport
from lens_contrib.ray.worker import provider_is_set, this_process
from lens_core.carrier import CarrierStatus
from lens_core.channel import Channel
from lens_core.current_context import attach_context, detach, get_current_context
from lens_core.diagnostics import describe, diagnostics
from lens_core.semconv import LENS_CARRIER, LENS_TRANSPORT, RPC_METHOD, RPC_SYSTEM_NAME
from lens_core.spans.attributes import clean_attributes
from lens_core.spans.start import start_span

if TYPE_CHECKING:  # it needs the SDK, which a worker without telemetry does not load
    from lens_core.sdk.remote_children import RemoteChildren

__all__ = ["Callee", "Execution"]
_channel: Final = Channel(RayTransport())
_set_span = trace.set_span_in_context
#: Under which the API keeps a context's span.
_SPAN_KEY: Final = next(iter(_set_span(trace.INVALID_SPAN, Context())))


#: A carrier as it came, its status, its context, and its span where that is all.
_Arrival = tuple[object, CarrierStatus, Context, SpanContext | None]
_EMPTY: Final = Context()


class Callee:
    """Opens the spans of one traced function in this process; arrives elsewhere as ``None``."""

    __slots__ = ("_attributes", "_children", "_last", "_name", "_of_hop", "_relation", "_tracer")

    def __init__(self, spec: CallSpec) -> None:
        this_process.ensure_telemetry()
        #: The last carrier of ids alone, and what came of it: calls come in bursts.
        self._last: _Arrival = (b"", CarrierStatus.ABSENT, _EMPTY, None)
        self._name = spec["name"]
        self._relation = spec["relation"]
        self._tracer = tracer_of(spec)
        #: This package's own tracers have a short way (``lens_core.sdk.remote_children``).
        self._children = self._ask_children()
        # As the SDK would keep them: what is checked here is not checked for each span.
        self._attributes: dict[str, AttributeValue] = dict(
            BoundedAttributes(attributes=clean_attributes(spec["attributes"]))
        )
        #: Attributes of a hop whose carrier is all right: the common case, ready to be copied.
        self._of_hop: dict[str, AttributeValue] = {
            RPC_SYSTEM_NAME: "ray",
            RPC_METHOD: spec["method"],
            LENS_TRANSPORT: RayTransport.name,
            LENS_CARRIER: CarrierStatus.OK.value,
            **self._attributes,
        }

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()

    def start(self, carrier: object) -> Execution | None:
        """One execution with a started span; ``None`` where there is nothing to do. Never raises.

        Args:
            carrier: What came as ``_otel_carrier``, or else as ``_ray_trace_ctx``.
        """
        try:
            current = get_current_context()
            if carrier is None:
                return self._start_without_carrier(current)
            arrival = self._last
            if type(carrier) is not bytes or carrier != arrival[0]:
                arrival = self._arrived(carrier)
            _, status, context, parent = arrival
            attributes = self._of_hop.copy()
            if status is not CarrierStatus.OK:
                attributes[LENS_CARRIER] = status.value
            this_process.add_ids(attributes)
            links = None
            if self._relation == "link":
                remote = trace.get_current_span(context).get_span_context()
                if remote.is_valid:
                    links = (Link(remote),)
                    # Without the remote span, so that ours is a root; the baggage stays.
                    context = _set_span(trace.INVALID_SPAN, context)
            elif current and (nested := _in_same_trace(current, context)) is not None:
                # Ray's own tracing has opened a span of the same trace for this call: nest in it.
                context = _set_span(nested, context)
            elif parent is not None and self._children is not None:
                child = self._children.start(
                    self._name, parent, context, SpanKind.CONSUMER, attributes
                )
                if child is not None:
                    # Nothing but the remote span is in that context.
                    return Execution(child, Context({_SPAN_KEY: child}), True)
                self._children = self._ask_children()
            span = start_span(
                self._tracer, self._name, context, SpanKind.CONSUMER, attributes, links, ours=True
            )
            return Execution(span, _set_span(span, context), True)
        except Exception as error:  # noqa: BLE001 - telemetry must not fail the user's call
            diagnostics.record("ray.span_failed", describe(error))
            return None

    def _arrived(self, value: object) -> _Arrival:
        carrier = _channel.arrived({CARRIER_ARGUMENT: value}).carrier
        status, context = carrier.status, carrier.context()
        alone = carrier.ids is not None  # nothing but the remote span is in the context
        arrival = (value, status, context, carrier.span_context if alone else None)
        if alone:
            self._last = arrival
        return arrival

    def _ask_children(self) -> RemoteChildren | None:
        ask = getattr(self._tracer, "remote_children", None)
        return None if ask is None else ask()

    def _start_without_carrier(self, current: Context) -> Execution | None:
        if not provider_is_set():
            return None
        hop = in_worker() and not (trace.get_current_span(current).get_span_context().is_valid)
        attributes = self._of_hop.copy() if hop else self._attributes.copy()
        if hop:
            attributes[LENS_CARRIER] = CarrierStatus.ABSENT.value
        this_process.add_ids(attributes)
        kind = SpanKind.CONSUMER if hop else SpanKind.INTERNAL
        span = start_span(self._tracer, self._name, current, kind, attributes, ours=True)
        return Execution(span, _set_span(span, current), hop)


def _in_same_trace(current: Context, remote: Context) -> Span | None:
    """The local span that is current, if it belongs to the trace of the remote one."""
    span = trace.get_current_span(current)
    local, there = (trace.get_current_span(each).get_span_context() for each in (current, remote))
    same = local.is_valid and not local.is_remote and local.trace_id == there.trace_id
    return span if same else None


class Execution:
    """One execution: its span, and the context in which the user's code runs.

    As a context manager it is current in the block, and ends with it. Nothing of it raises.
    """

    __slots__ = ("_context", "_hop", "_span", "_token")

    def __init__(self, span: Span, context: Context, hop: bool) -> None:
        self._span = span
        self._context = context
        self._hop = hop
        self._token: Token[Context] | None = None

    def attach(self) -> None:
        """Make the context current."""
        self._token = attach_context(self._context)

    __enter__ = attach

    def detach(self) -> None:
        """Make the context before :meth:`attach` current again."""
        token, self._token = self._token, None
        if token is not None:
            detach(token)

    def fail(self, error: BaseException) -> None:
        """Say on the span what the user's code raised."""
        record_failure(self._span, error, cancels=self._hop)

    def close(
        self,
        _kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        _traceback: TracebackType | None = None,
    ) -> None:
        """End the span, with what the user's code raised, and restore the context."""
        if error is not None:
            self.fail(error)
        token, self._token = self._token, None
        if token is not None:
            detach(token)
        try:
            self._span.end()
        except Exception as failure:  # noqa: BLE001 - a span processor may raise anything
            diagnostics.record("span.end_failed", describe(failure))

    __exit__ = close

    def generate(
        self,
        function: Callable[..., Generator[Any, Any, Any]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Generator[Any, Any, Any]:
        """What ``yield from function(*args, **kwargs)`` does, under the span.

        The span is current while the user's code runs, and not while the consumer's does: each
        step attaches and detaches.
        """
        steps: Any = None
        advance: Any
        value: Any
        try:
            steps = function(*args, **kwargs)
            advance, value = steps.send, None
            while True:
                self.attach()
                try:
                    item = advance(value)
                except StopIteration as stop:
                    return stop.value
                finally:
                    self.detach()
                try:
                    value = yield item
                    advance = steps.send
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 - passed on, as "yield from" does
                    advance, value = steps.throw, error
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            if steps is not None:
                self.attach()
                try:
                    steps.close()
                finally:
                    self.detach()
            self.close()
