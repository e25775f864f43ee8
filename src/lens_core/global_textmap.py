"""The global propagator: which one it is, and whether it writes the W3C's headers and no others."""

from __future__ import annotations

from typing import Final

from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lens_core.compat import global_textmap_of, propagators_of
from lens_core.diagnostics import diagnostics

try:
    from opentelemetry import propagate

    get_global_textmap: Final = global_textmap_of(propagate)
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


__all__ = ["get_global_textmap", "plain_w3c"]


class _PlainW3C:
    """The global propagator, where it makes ``traceparent`` from the ids of a span alone."""

    __slots__ = ("_asked", "textmap")

    def __init__(self) -> None:
        #: It, if the one that was asked last is such a one.
        self.textmap: TextMapPropagator | None = None
        self._asked: TextMapPropagator | None = None

    def is_global(self) -> bool:
        """Whether the global propagator is such a one."""
        textmap = get_global_textmap()
        if textmap is not self._asked:
            kinds = {type(part) for part in propagators_of(textmap)}
            plain = TraceContextTextMapPropagator in kinds and kinds <= _W3C_KINDS
            self.textmap = textmap if plain else None
            self._asked = textmap
        return self.textmap is textmap


_W3C_KINDS: Final = frozenset((TraceContextTextMapPropagator, W3CBaggagePropagator))
#: Compared with the global propagator for each message, in one step while that is the same.
plain_w3c: Final = _PlainW3C()
