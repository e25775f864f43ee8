"""The child of a sampled remote parent, started in few steps.

It is the one span of a process that serves calls. What the SDK's tracer does for it comes out the
same each time: every sampler that follows a sampled remote parent says yes, and attributes that
were checked once need no check. A worker runs its telemetry code once per call, with cold caches,
so each Python function that is not entered counts (``benchmarks/bench_ray.py``). Where anything is
not as expected (another sampler, limits on attributes, the SDK's own metrics, another version of
the SDK) nothing is started here, and the tracer does it.
"""

from __future__ import annotations

from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span, Tracer, _Span
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.util.types import AttributeValue

__all__ = ["RemoteChildren"]

# Known to opentelemetry-api from 1.40 on; older ones write flags without it.
_RANDOM: Final = int(getattr(TraceFlags, "RANDOM_TRACE_ID", 0))
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_SAMPLED_RANDOM: Final = TraceFlags(TraceFlags.SAMPLED | _RANDOM)


class RemoteChildren:
    """Starts such spans as one tracer of the SDK would.

    Args:
        tracer: The tracer.

    Raises:
        AttributeError: If the tracer does not have what the SDK's tracers have.
        TypeError: If it is none of the SDK's, or its provider has unusual settings.
    """

    __slots__ = ("_max_attributes", "_sampler", "_tracer")

    def __init__(self, tracer: object) -> None:
        if type(tracer) is not Tracer:
            raise TypeError(f"{type(tracer).__name__} is not the tracer of the SDK")
        limits = tracer._span_limits
        if limits.max_span_attribute_length is not None:
            raise TypeError("values of attributes have to be cut")
        metrics = type(getattr(tracer, "_tracer_metrics", None)).__name__
        if metrics not in ("NoneType", "NoOpTracerMetrics"):
            raise TypeError("the SDK counts its spans")
        self._max_attributes = limits.max_span_attributes
        self._tracer = tracer
        self._sampler: Sampler | None = tracer.sampler if _follows(tracer.sampler) else None

    def start(
        self,
        name: str,
        parent: SpanContext,
        context: Context,
        kind: SpanKind,
        attributes: dict[str, AttributeValue],
    ) -> Span | None:
        """A started span; ``None`` where that is for the tracer to decide.

        Args:
            name: Its name.
            parent: The span that is current in ``context``.
            context: The extracted context.
            kind: Its kind.
            attributes: Its attributes, which become the span's own: strings, numbers and booleans,
                or what the SDK made of something else.
        """
        tracer = self._tracer
        flags = parent.trace_flags
        if (
            not flags & TraceFlags.SAMPLED
            or not parent.is_remote
            or tracer.sampler is not self._sampler
            or not tracer._is_enabled()
            or (self._max_attributes is not None and len(attributes) > self._max_attributes)
        ):
            return None
        span = _Span(
            name=name,
            context=SpanContext(
                parent.trace_id,
                tracer.id_generator.generate_span_id(),
                False,
                _SAMPLED_RANDOM if flags & _RANDOM else _SAMPLED,
                parent.trace_state,
            ),
            parent=parent,
            sampler=self._sampler,
            resource=tracer.resource,
            span_processor=tracer.span_processor,
            kind=kind,
            instrumentation_info=tracer.instrumentation_info,
            limits=tracer._span_limits,
            instrumentation_scope=tracer._instrumentation_scope,
        )
        kept = span._attributes
        kept._dict = attributes  # type: ignore[union-attr]
        span.start(parent_context=context)
        return span


def _follows(sampler: Sampler) -> bool:
    """Whether it takes each child of a sampled remote parent, and says nothing else of it."""
    if type(sampler) is ParentBased:
        sampler = sampler._remote_parent_sampled
    return sampler is ALWAYS_ON
