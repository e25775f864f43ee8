"""The callee's side: one traced execution, from the carrier to the ended span.

:class:`Entry` is made once per function and process, :class:`Scope` once per execution. Both are
called from the by-value wrapper (:mod:`lens_contrib.ray.wrapping`) on every remote call, so this
module is written for few steps rather than for few lines (``benchmarks/bench_ray.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Token
from typing import TYPE_CHECKING, Final, cast

from opentelemetry import trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind
from opentelemetry.util.types import AttributeValue

from lens_contrib.ray.failure import record_failure
from lens_contrib.ray.process_local import CallSpec, ProcessLocal, tracer_of
from lens_contrib.ray.transports import RayTransport
from lens_contrib.ray.w3c import Headers
from lens_contrib.ray.worker import provider_is_set, this_process
from lens_core.carrier import CarrierStatus
from lens_core.channel import Relation
from lens_core.current_context import attach_context, get_current_context
from lens_core.detach import detach
from lens_core.diagnostics import describe, diagnostics
from lens_core.semconv import (
    LENS_CARRIER,
    LENS_TRANSPORT,
    RPC_METHOD,
    RPC_SYSTEM_NAME,
)

if TYPE_CHECKING:  # it needs the SDK, which a worker without telemetry does not load
    from lens_core.telemetry.pipeline.remote_children import RemoteChildren

__all__ = ["Entry", "Scope"]

_NO_CONTEXT: Final = Context()
_set_span = trace.set_span_in_context
#: Under which the API keeps a context's span.
_SPAN_KEY: Final = next(iter(_set_span(trace.INVALID_SPAN, Context())))


class Entry(ProcessLocal):
    """Opens the spans of one traced function in this process."""

    __slots__ = ("_children", "_headers", "_hop", "_name", "_own", "_relation", "_tracer")

    def __init__(self, spec: CallSpec) -> None:
        this_process.ensure_telemetry()
        self._headers = Headers()
        self._name = str(spec["name"])
        self._relation = cast("Relation", spec["relation"])
        self._tracer = tracer_of(spec.get("tracer"))
        #: This package's own tracers have a short way
        #: (``lens_core.telemetry.pipeline.remote_children``).
        self._children = self._ask_children()
        own = cast("Mapping[str, AttributeValue]", spec.get("attributes") or {})
        # As the SDK would keep them: what is checked here is not checked for each span.
        self._own: dict[str, AttributeValue] = dict(BoundedAttributes(attributes=own))
        #: Attributes of a hop whose carrier is all right: the common case, ready to be copied.
        self._hop: dict[str, AttributeValue] = {
            RPC_SYSTEM_NAME: "ray",
            RPC_METHOD: str(spec["method"]),
            LENS_TRANSPORT: RayTransport.name,
            LENS_CARRIER: CarrierStatus.OK.value,
            **self._own,
        }

    def open(self, carrier: object, ray_carrier: object) -> Scope | None:
        """A started span, current from now on; ``None`` where there is nothing to do.

        Never raises.

        Args:
            carrier: What came as ``_otel_carrier``.
            ray_carrier: What came as ``_ray_trace_ctx``: used where no carrier came.
        """
        try:
            scope = self._start(ray_carrier if carrier is None else carrier)
            if scope is not None:
                scope.attach()
            return scope
        except Exception as error:  # noqa: BLE001 - telemetry must not fail the user's call
            diagnostics.record("ray.span_failed", describe(error))
            return None

    def start(self, carrier: object, ray_carrier: object) -> Scope | None:
        """The same, with the span not made current yet."""
        try:
            return self._start(ray_carrier if carrier is None else carrier)
        except Exception as error:  # noqa: BLE001 - telemetry must not fail the user's call
            diagnostics.record("ray.span_failed", describe(error))
            return None

    def _start(self, carrier: object) -> Scope | None:
        current = get_current_context()
        if carrier is None:
            return self._start_without_carrier(current)
        context, parent = self._headers.read(carrier)
        attributes = self._hop.copy()
        if not context:
            status = CarrierStatus.REJECTED if carrier else CarrierStatus.ABSENT
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
            child = self._children.start(self._name, parent, context, SpanKind.CONSUMER, attributes)
            if child is not None:
                # Nothing but the remote span is in that context.
                return Scope(child, Context({_SPAN_KEY: child}), True)
            self._children = self._ask_children()
        span = self._tracer.start_span(self._name, context, SpanKind.CONSUMER, attributes, links)
        return Scope(span, _set_span(span, context), True)

    def _ask_children(self) -> RemoteChildren | None:
        ask = getattr(self._tracer, "remote_children", None)
        return None if ask is None else ask()

    def _start_without_carrier(self, current: Context) -> Scope | None:
        if not provider_is_set():
            return None
        hop = this_process.in_worker() and not (
            trace.get_current_span(current).get_span_context().is_valid
        )
        attributes = self._hop.copy() if hop else self._own.copy()
        if hop:
            attributes[LENS_CARRIER] = CarrierStatus.ABSENT.value
        this_process.add_ids(attributes)
        kind = SpanKind.CONSUMER if hop else SpanKind.INTERNAL
        span = self._tracer.start_span(self._name, current, kind, attributes)
        return Scope(span, _set_span(span, current), hop)


def _in_same_trace(current: Context, remote: Context) -> Span | None:
    """The local span that is current, if it belongs to the trace of the remote one."""
    span = trace.get_current_span(current)
    local = span.get_span_context()
    there = trace.get_current_span(remote).get_span_context()
    same = local.is_valid and not local.is_remote and local.trace_id == there.trace_id
    return span if same else None


class Scope:
    """One execution: its span and the context in which the user's code runs."""

    __slots__ = ("_context", "_hop", "_span", "_token")

    def __init__(self, span: Span, context: Context, hop: bool) -> None:
        self._span = span
        self._context = context
        self._hop = hop
        self._token: Token[Context] | None = None

    def attach(self) -> None:
        """Make the context current."""
        self._token = attach_context(self._context)

    def detach(self) -> None:
        """Make the context before :meth:`attach` current again."""
        token, self._token = self._token, None
        if token is not None:
            detach(token)

    def fail(self, error: BaseException) -> None:
        """Say on the span what the user's code raised. Never raises."""
        record_failure(self._span, error, cancels=self._hop)

    def close(self) -> None:
        """End the span and restore the context. Never raises."""
        token, self._token = self._token, None
        if token is not None:
            detach(token)
        try:
            self._span.end()
        except Exception as error:  # noqa: BLE001 - a span processor may raise anything
            diagnostics.record("span.end_failed", describe(error))
