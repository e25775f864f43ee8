"""The global propagator: which one it is, and whether it writes the W3C's headers and no others."""

from __future__ import annotations

from typing import Final

from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lens_core.compat import propagators_of
from lens_core.diagnostics import diagnostics

try:
    from opentelemetry.propagate import get_global_textmap
except ValueError as error:
    # opentelemetry.propagate raises at import when OTEL_PROPAGATORS names one that is not
    # installed. A wrong variable must not stop a training job, so fall back to the defaults.
    diagnostics.record(
        "propagators.invalid",
        str(error),
        todo="Correct OTEL_PROPAGATORS; tracecontext and baggage are used until then.",
    )
    _DEFAULTS: Final = CompositePropagator(
        [TraceContextTextMapPropagator(), W3CBaggagePropagator()]
    )

    def get_global_textmap() -> TextMapPropagator:
        """The W3C defaults, used because the configured propagators cannot be loaded."""
        return _DEFAULTS


__all__ = ["get_global_textmap", "is_plain_w3c"]


class _PlainW3C:
    """Whether the global propagator makes ``traceparent`` from the ids of the span alone."""

    __slots__ = ("_asked", "_plain")

    def __init__(self) -> None:
        self._asked: TextMapPropagator | None = None
        self._plain = False

    def is_plain(self) -> bool:
        """Whether it does; remembered for as long as it is the global one."""
        textmap = get_global_textmap()
        if textmap is not self._asked:
            kinds = {type(part) for part in propagators_of(textmap)}
            self._plain = TraceContextTextMapPropagator in kinds and kinds <= _W3C_KINDS
            self._asked = textmap
        return self._plain


_W3C_KINDS: Final = frozenset((TraceContextTextMapPropagator, W3CBaggagePropagator))

#: Whether the global propagator makes ``traceparent`` from the ids of a span, and where there is
#: nothing but a span writes nothing else.
is_plain_w3c: Final = _PlainW3C().is_plain
