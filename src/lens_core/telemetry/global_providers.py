"""The providers that are made global: one of each for the life of the process.

OpenTelemetry lets a global provider be set once. Telemetry may be shut down and set up again (a
notebook, a test, a worker that is used for the next job), so what is installed are these thin
providers, whose target can change; between two set-ups they start no spans and record nothing.

A provider that the application installed is used instead, never replaced and never shut down.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import Meter, MeterProvider, NoOpMeterProvider
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
from opentelemetry.trace import (
    Link,
    NoOpTracerProvider,
    Span,
    SpanKind,
    Tracer,
    TracerProvider,
)
from opentelemetry.util.types import Attributes

from lens_core.compat import is_unset
from lens_core.sdk.remote_children import RemoteChildren
from lens_core.telemetry.ids import PrivateIdGenerator
from lens_core.telemetry.pipeline.span_pipeline import SpanAttachment, SpanPipeline

__all__ = [
    "SwitchMeterProvider",
    "SwitchTracerProvider",
    "attachment_of",
    "foreign_meter_provider",
    "foreign_tracer_provider",
    "make_global",
    "meter_switch",
    "tracer_switch",
]

_OFF: Final = NoOpTracerProvider()
_NO_METERS: Final = NoOpMeterProvider()


class SwitchTracerProvider(TracerProvider):
    """Hands out tracers that follow the provider that is current when they start a span."""

    def __init__(self) -> None:
        self.target: TracerProvider = _OFF

    def switch_to(self, target: TracerProvider | None) -> None:
        """Send new spans to this provider; to none with ``None``."""
        self.target = _OFF if target is None else target

    def add_span_processor(self, processor: SpanProcessor) -> None:
        """Add a processor to the provider of the current set-up, as the SDK's provider has it."""
        if isinstance(self.target, SdkTracerProvider):
            self.target.add_span_processor(processor)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what has ended so far; whether that was done in time."""
        if isinstance(self.target, SdkTracerProvider):
            return self.target.force_flush(timeout_millis)
        return True

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,
    ) -> Tracer:
        """A tracer that follows the switch."""
        return _SwitchTracer(
            self,
            instrumenting_module_name,
            instrumenting_library_version,
            schema_url,
            attributes,
        )


class SwitchMeterProvider(MeterProvider):
    """Hands out the meters of the provider that is current when they are asked for.

    Instruments belong to the set-up in which they were made; after the next one, make new ones.
    """

    def __init__(self) -> None:
        self.target: MeterProvider = _NO_METERS

    def switch_to(self, target: MeterProvider | None) -> None:
        """Make meters of this provider; of none with ``None``."""
        self.target = _NO_METERS if target is None else target

    def get_meter(
        self,
        name: str,
        version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes | None = None,
    ) -> Meter:
        """A meter of the current provider."""
        return self.target.get_meter(name, version, schema_url, attributes)


#: What is made global, where the application installed nothing.
tracer_switch: Final = SwitchTracerProvider()
meter_switch: Final = SwitchMeterProvider()
_attachments: Final[weakref.WeakKeyDictionary[SdkTracerProvider, SpanAttachment]] = (
    weakref.WeakKeyDictionary()
)


def foreign_tracer_provider() -> TracerProvider | None:
    """The tracer provider that the application installed, or ``None``."""
    current = trace.get_tracer_provider()
    ours = isinstance(current, (trace.ProxyTracerProvider, SwitchTracerProvider))
    return None if ours else current


def foreign_meter_provider() -> MeterProvider | None:
    """The meter provider that the application installed, or ``None``."""
    current = metrics.get_meter_provider()
    ours = is_unset(current) or isinstance(current, SwitchMeterProvider)
    return None if ours else current


def attachment_of(provider: SdkTracerProvider) -> SpanAttachment:
    """Our place on a provider of the application; added once and then kept."""
    attachment = _attachments.get(provider)
    if attachment is None:
        attachment = _attachments[provider] = SpanAttachment()
        provider.add_span_processor(attachment)
    return attachment


def make_global(*, tracers: bool, meters: bool) -> None:
    """Install the switches where nothing is installed."""
    if tracers and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        trace.set_tracer_provider(tracer_switch)
    if meters and not isinstance(metrics.get_meter_provider(), SwitchMeterProvider):
        metrics.set_meter_provider(meter_switch)


class _SwitchTracer(Tracer):
    def __init__(
        self,
        provider: SwitchTracerProvider,
        name: str,
        version: str | None,
        schema_url: str | None,
        attributes: Attributes,
    ) -> None:
        self._provider = provider
        self._scope = (name, version, schema_url, attributes)
        self._bound: tuple[TracerProvider, Tracer] = (_OFF, _OFF.get_tracer(name))
        self._children: tuple[Tracer | None, RemoteChildren | None] = (None, None)

    def _tracer(self) -> Tracer:
        target, tracer = self._bound
        if target is not self._provider.target:
            target = self._provider.target
            tracer = target.get_tracer(*self._scope)
            self._bound = (target, tracer)
        return tracer

    def remote_children(self) -> RemoteChildren | None:
        """The short way to start a child of a remote span; ``None`` where there is none.

        It belongs to the set-up that is current: ask again when it does not start a span.
        """
        known, children = self._children
        tracer = self._tracer()
        if tracer is not known:
            try:
                children = RemoteChildren(tracer, SpanPipeline, PrivateIdGenerator)
            except (AttributeError, TypeError):
                children = None
            self._children = (tracer, children)
        return children

    @property
    def sampler(self) -> object:
        """The sampler of the tracer that is current, as the SDK's tracers show theirs."""
        return getattr(self._tracer(), "sampler", None)

    @property
    def id_generator(self) -> object:
        """The id generator of the tracer that is current, as the SDK's tracers show theirs."""
        return getattr(self._tracer(), "id_generator", None)

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        return self._tracer().start_span(
            name,
            context,
            kind,
            attributes,
            links,
            start_time,
            record_exception,
            set_status_on_exception,
        )

    # Without annotations: the API's context manager, which is also a decorator for async functions,
    # is private to it.
    def start_as_current_span(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return self._tracer().start_as_current_span(*args, **kwargs)
