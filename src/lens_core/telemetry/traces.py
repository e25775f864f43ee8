"""The tracing half of a set-up: our own provider, or our place on the application's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor
from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Tracer, TracerProvider

from lens_core.diagnostics import diagnostics
from lens_core.semconv import NEMO_RUN_ATTEMPT, NEMO_RUN_ID
from lens_core.telemetry.global_providers import (
    attachment_of,
    foreign_tracer_provider,
    tracer_switch,
)
from lens_core.telemetry.pipeline.delivery import Delivery
from lens_core.telemetry.pipeline.span_pipeline import SpanPipeline
from lens_core.telemetry.sampling import id_generator_from_env, sampler_from_env

__all__ = ["Traces", "build_traces"]

_SCOPE: Final = "lens_core"
_DEFAULT_LIMIT: Final = 128


@dataclass(frozen=True, slots=True)
class Traces:
    """The tracing half of a set-up.

    Attributes:
        pipeline: Knows the open spans and delivers ended ones.
        deliveries: Where they go.
        provider: Starts spans.
        is_ours: Whether the provider is ours; otherwise it is the application's.
        tracer: Starts this library's spans.
    """

    pipeline: SpanPipeline
    deliveries: Sequence[Delivery[ReadableSpan]]
    provider: TracerProvider
    is_ours: bool
    tracer: Tracer

    def put_in_place(self) -> None:
        """Let spans come."""
        if self.is_ours:
            tracer_switch.switch_to(self.provider)
        elif isinstance(self.provider, SdkTracerProvider):
            attachment_of(self.provider).target = self.pipeline

    def remove(self) -> None:
        """Take no new spans; those that are open still come when they end."""
        self.pipeline.is_taking = False
        if self.is_ours:
            tracer_switch.switch_to(None)


def build_traces(
    deliveries: Sequence[Delivery[ReadableSpan]],
    processors: Sequence[SpanProcessor],
    resource: Resource,
    id_generator: IdGenerator | None,
) -> Traces:
    """Everything for spans; nothing global is touched yet."""
    foreign = foreign_tracer_provider()
    if foreign is not None and not isinstance(foreign, SdkTracerProvider):
        diagnostics.record(
            "provider.foreign",
            f"the application installed a {type(foreign).__name__}, which takes no span processors",
            todo="Spans go where it sends them; they are not exported by this library.",
        )
        pipeline = SpanPipeline((), processors)
        return Traces(pipeline, (), foreign, False, foreign.get_tracer(_SCOPE))
    if foreign is not None:
        run = {name: resource.attributes[name] for name in (NEMO_RUN_ID, NEMO_RUN_ATTEMPT)}
        pipeline = SpanPipeline(deliveries, processors, overlay=resource, attributes=run)
        return Traces(pipeline, deliveries, foreign, False, foreign.get_tracer(_SCOPE))
    pipeline = SpanPipeline(deliveries, processors)
    provider = SdkTracerProvider(
        sampler=sampler_from_env(),
        resource=resource,
        shutdown_on_exit=False,
        id_generator=id_generator_from_env() if id_generator is None else id_generator,
        span_limits=_span_limits(),
        # It is a list of processors itself: the SDK's own list around it would only cost time.
        active_span_processor=cast("Any", pipeline),
    )
    return Traces(pipeline, deliveries, provider, True, provider.get_tracer(_SCOPE))


def _span_limits() -> SpanLimits:
    try:
        return SpanLimits()
    except ValueError as error:
        # The SDK raises for a bad OTEL_*_LIMIT; a wrong variable must not stop a training job.
        diagnostics.record(
            "config.invalid", str(error), todo="Correct it; the limits are the defaults."
        )
        return SpanLimits(
            max_attributes=_DEFAULT_LIMIT,
            max_events=_DEFAULT_LIMIT,
            max_links=_DEFAULT_LIMIT,
            max_span_attributes=_DEFAULT_LIMIT,
            max_event_attributes=_DEFAULT_LIMIT,
            max_link_attributes=_DEFAULT_LIMIT,
            max_attribute_length=SpanLimits.UNSET,
            max_span_attribute_length=SpanLimits.UNSET,
        )
