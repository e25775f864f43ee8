"""The common carrier, without the general machinery: a ``traceparent`` and nothing else.

Between Ray's caller and a traced callee such a carrier travels as the bytes of that header, which
Ray moves without its serializer, and is written and read here in a few steps: a worker runs its
telemetry code once per call, with cold caches, so steps are what it costs. Every other carrier
(another propagator, baggage, tracestate, one that the user passed) is a mapping of headers and is
left to :mod:`lens_core.carrier`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, cast

from opentelemetry import baggage, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lens_contrib.ray.transports import CARRIER_ARGUMENT, RayTransport
from lens_core.current_context import get_current_context
from lens_core.global_textmap import get_global_textmap
from lens_core.propagation import current_carrier, extract_context

__all__ = ["Headers"]

_transport: Final = RayTransport()
_EMPTY: Final = Context()
_TRACEPARENT: Final = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_DEFAULT: Final = frozenset({TraceContextTextMapPropagator, W3CBaggagePropagator})


class Headers:
    """Writes and reads carriers as the global propagator would."""

    __slots__ = ("_last", "_last_read", "_plain", "propagator")

    def __init__(self) -> None:
        #: The global propagator when a carrier was last written.
        self.propagator: TextMapPropagator | None = None
        self._plain = False
        #: The last context, which never changes, and its carrier: calls come in bursts.
        self._last: tuple[Context, Mapping[str, str] | bytes] = (_EMPTY, {})
        self._last_read: tuple[bytes, Context, SpanContext | None] = (b"", _EMPTY, None)

    def current(self) -> Mapping[str, str] | bytes:
        """The carrier of the current context, as it travels; empty where there is nothing."""
        if get_global_textmap() is not self.propagator:
            self._look()
        context = get_current_context()
        last, carrier = self._last
        if last is context:
            return carrier
        carrier = self._write(context)
        if self._plain:  # another propagator may write something else the next time
            self._last = (context, carrier)
        return carrier

    def _write(self, context: Context) -> Mapping[str, str] | bytes:
        span = trace.get_current_span(context).get_span_context()
        if not self._plain or span.trace_state or baggage.get_all(context):
            arguments = _transport.inject({}, current_carrier(context))
            return cast("Mapping[str, str]", arguments.get(CARRIER_ARGUMENT, {}))
        if not span.is_valid:
            return {}
        return b"00-%032x-%016x-%02x" % (span.trace_id, span.span_id, span.trace_flags)

    def read(self, carrier: object) -> tuple[Context, SpanContext | None]:
        """The context that a carrier holds; empty where it holds none. Never raises.

        Second comes the remote span, where the carrier is the bytes of a ``traceparent``: there
        nothing else is in the context.
        """
        if type(carrier) is not bytes:
            return extract_context(carrier), None  # type: ignore[arg-type]  # it refuses what is none
        known, context, parent = self._last_read
        if carrier == known:
            return context, parent
        match = _TRACEPARENT.fullmatch(carrier)
        if match is not None:
            trace_id, span_id, flags = match.groups()
            span = SpanContext(
                int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16))
            )
            if span.is_valid:
                context = trace.set_span_in_context(NonRecordingSpan(span), _EMPTY)
                self._last_read = (carrier, context, span)
                return context, span
        return extract_context(carrier), None  # type: ignore[arg-type]  # it refuses what is none

    def _look(self) -> None:
        propagator = get_global_textmap()
        parts = propagator._propagators if type(propagator) is CompositePropagator else ()
        self._plain = len(parts) == 2 and {type(part) for part in parts} == _DEFAULT
        self._last = (_EMPTY, {})
        self.propagator = propagator
