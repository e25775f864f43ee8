"""The tracer provider that is made global: one for the life of the process.

OpenTelemetry lets the global provider be set once. Telemetry may be shut down and set up again
(a notebook, a test, a worker that is used for the next job), so what is installed is this thin
provider, whose target can change; between two set-ups its tracers start no spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NoOpTracerProvider,
    Span,
    SpanKind,
    Tracer,
    TracerProvider,
)
from opentelemetry.util.types import Attributes

__all__ = ["SwitchTracerProvider"]

_OFF: Final = NoOpTracerProvider()


class SwitchTracerProvider(TracerProvider):
    """Hands out tracers that follow the provider that is current when they start a span."""

    def __init__(self) -> None:
        self.target: TracerProvider = _OFF

    def switch_to(self, target: TracerProvider | None) -> None:
        """Send new spans to this provider; to none with ``None``."""
        self.target = _OFF if target is None else target

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

    def _tracer(self) -> Tracer:
        target, tracer = self._bound
        if target is not self._provider.target:
            target = self._provider.target
            tracer = target.get_tracer(*self._scope)
            self._bound = (target, tracer)
        return tracer

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
    def start_as_current_span(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001
        return self._tracer().start_as_current_span(*args, **kwargs)
