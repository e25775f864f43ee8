"""The callee's side: one traced execution, from the carrier to the ended span.

:class:`Entry` is made once per function and process, :class:`Scope` once per execution. Both are
called from the by-value wrapper (:mod:`lens_contrib.ray.wrapping`) on every remote call, so this
module is written for few steps rather than for few lines (``benchmarks/bench_ray.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import Token
from typing import Final, cast

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue
from ray.exceptions import AsyncioActorExit, RayTaskError

from lens_contrib.ray.transport import RayTransport
from lens_contrib.ray.w3c import Headers
from lens_contrib.ray.wire import LocalTracer, ProcessLocal, TracerScope
from lens_contrib.ray.worker import provider_is_set, this_process
from lens_contrib.ray.wrapping import CallSpec
from lens_core.boundary import CarrierStatus, Relation
from lens_core.incidents import incidents
from lens_core.outcome import error_type, is_ordinary_end, one_line, record_error
from lens_core.semconv import (
    ERROR_TYPE,
    LENS_CARRIER,
    LENS_TRANSPORT,
    RAY_TASK_CANCELLED,
    RPC_METHOD,
    RPC_SYSTEM_NAME,
)

__all__ = ["Entry", "Scope"]

_SCOPE: Final = "lens_contrib.ray"
_NO_CONTEXT: Final = Context()
_set_span = trace.set_span_in_context


class Entry(ProcessLocal):
    """Opens the spans of one traced function in this process."""

    __slots__ = ("_headers", "_hop", "_name", "_own", "_relation", "_tracer")

    def __init__(self, spec: CallSpec) -> None:
        this_process.ensure_telemetry()
        self._headers = Headers()
        self._name = str(spec["name"])
        self._relation = cast("Relation", spec["relation"])
        self._tracer = _tracer(spec.get("tracer"))
        own = cast("Mapping[str, AttributeValue]", spec.get("attributes") or {})
        self._own: dict[str, AttributeValue] = dict(own)
        #: Attributes of a hop whose carrier is all right: the common case, ready to be copied.
        self._hop: dict[str, AttributeValue] = {
            RPC_SYSTEM_NAME: "ray",
            RPC_METHOD: str(spec["method"]),
            LENS_TRANSPORT: RayTransport.name,
            LENS_CARRIER: CarrierStatus.OK.value,
            **own,
        }

    def open(self, carrier: object, ray_carrier: object) -> Scope | None:
        """A started span, current from now on; ``None`` where there is nothing to do.

        Never raises.

        Args:
            carrier: What came as ``_otel_carrier``.
            ray_carrier: What came as ``_ray_trace_ctx``: used where no carrier came.
        """
        scope = self.start(carrier, ray_carrier)
        if scope is not None:
            scope.attach()
        return scope

    def start(self, carrier: object, ray_carrier: object) -> Scope | None:
        """The same, with the span not made current yet."""
        try:
            return self._start(ray_carrier if carrier is None else carrier)
        except Exception as error:  # noqa: BLE001 - telemetry must not fail the user's call
            incidents.record("ray.span_failed", f"{type(error).__name__}: {error}")
            return None

    def _start(self, carrier: object) -> Scope | None:
        current = otel_context.get_current()
        if carrier is None:
            return self._start_without_carrier(current)
        context = self._headers.context(carrier)
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
        span = self._tracer.start_span(self._name, context, SpanKind.CONSUMER, attributes, links)
        return Scope(span, _set_span(span, context), True)

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
        self._token = otel_context.attach(self._context)

    def detach(self) -> None:
        """Make the context before :meth:`attach` current again."""
        token, self._token = self._token, None
        if token is not None:
            otel_context.detach(token)

    def fail(self, error: BaseException) -> None:
        """Say on the span what the user's code raised. Never raises."""
        try:
            if isinstance(error, AsyncioActorExit) or _is_actor_exit(error):
                return
            if isinstance(error, _CANCELLATIONS) and self._hop:
                self._span.set_attribute(RAY_TASK_CANCELLED, True)
            elif isinstance(error, RayTaskError):
                _record_remote(self._span, error)
            else:
                record_error(self._span, error)
        except Exception as failure:  # noqa: BLE001 - must not replace the user's exception
            incidents.record("span.record_failed", f"{type(failure).__name__}: {failure}")

    def close(self) -> None:
        """End the span and restore the context. Never raises."""
        self.detach()
        try:
            self._span.end()
        except Exception as error:  # noqa: BLE001 - a span processor may raise anything
            incidents.record("span.end_failed", f"{type(error).__name__}: {error}")


#: How Ray cancels: a sync task, an async one, a generator that streams.
_CANCELLATIONS: Final = (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit)


def _is_actor_exit(error: BaseException) -> bool:
    # exit_actor() raises a SystemExit that Ray marks with an attribute; its code is not 0.
    return isinstance(error, SystemExit) and (
        is_ordinary_end(error) or hasattr(error, "ray_terminate_msg")
    )


def _record_remote(span: Span, error: RayTaskError) -> None:
    """An error that another task raised: named here, recorded with its stack where it was born."""
    cause = error.cause
    if not isinstance(cause, BaseException):
        record_error(span, error)
        return
    while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
        cause = cause.cause
    kind, line = error_type(cause), one_line(cause)
    span.set_attribute(ERROR_TYPE, kind)
    span.set_status(trace.StatusCode.ERROR, f"{kind}: {line}" if line else kind)


def _tracer(given: object) -> Tracer:
    if isinstance(given, LocalTracer):
        return given.tracer
    if given is None:
        return trace.get_tracer(_SCOPE)
    name, version = cast("TracerScope", given)
    return trace.get_tracer(name, version)
