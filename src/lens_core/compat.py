"""The private names of opentelemetry-api that the small core uses, behind one self-test."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

__all__ = ["check_private_names", "propagators_of"]


def propagators_of(textmap: TextMapPropagator) -> Sequence[object]:
    """The propagators that a composite one asks in turn; any other one alone.

    Of a composite one whose parts cannot be seen there are none, so that nothing is taken for plain
    W3C Trace Context that may be more.
    """
    if type(textmap) is CompositePropagator:
        return tuple(getattr(textmap, "_propagators", ()))
    return (textmap,)


def check_private_names() -> list[str]:
    """What is missing of the private names, and what stops working without it; empty if none."""
    parts = [TraceContextTextMapPropagator(), W3CBaggagePropagator()]
    if list(propagators_of(CompositePropagator(parts))) == parts:
        return []
    return [
        "CompositePropagator._propagators: contexts are formatted and parsed for each message, "
        "which is right and several times slower"
    ]
