"""The private names of opentelemetry-api that the small core uses, behind one self-test."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final

from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import INVALID_SPAN_CONTEXT, NonRecordingSpan
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

__all__ = ["SPAN_CONTEXT", "check_private_names", "global_textmap_of", "propagators_of"]


def global_textmap_of(propagate: ModuleType) -> Callable[[], TextMapPropagator]:
    """``get_global_textmap`` of the API, in one step: it is asked for each message."""
    if isinstance(getattr(propagate, "_HTTP_TEXT_FORMAT", None), TextMapPropagator):
        return functools.partial(getattr, propagate, "_HTTP_TEXT_FORMAT")
    public: Callable[[], TextMapPropagator] = propagate.get_global_textmap
    return public


def propagators_of(textmap: TextMapPropagator) -> Sequence[object]:
    """The propagators that a composite one asks in turn; any other one alone.

    Of a composite one whose parts cannot be seen there are none, so that nothing is taken for plain
    W3C Trace Context that may be more.
    """
    if type(textmap) is CompositePropagator:
        return tuple(getattr(textmap, "_propagators", ()))
    return (textmap,)


#: Where a span of the API or the SDK keeps its context; its property is a function of Python.
SPAN_CONTEXT: Final = "_context"


def check_private_names() -> list[str]:
    """What is missing of the private names, and what stops working without it; empty if none."""
    parts = [TraceContextTextMapPropagator(), W3CBaggagePropagator()]
    problems = []
    if list(propagators_of(CompositePropagator(parts))) != parts:
        problems.append(
            "CompositePropagator._propagators: contexts are formatted and parsed for each message, "
            "which is right and several times slower"
        )
    if not hasattr(sys.modules.get("opentelemetry.propagate"), "_HTTP_TEXT_FORMAT"):
        problems.append(
            "opentelemetry.propagate._HTTP_TEXT_FORMAT: the global propagator is asked for in the "
            "public way, which is right and a little slower"
        )
    if not hasattr(NonRecordingSpan(INVALID_SPAN_CONTEXT), SPAN_CONTEXT):
        problems.append(
            f"NonRecordingSpan.{SPAN_CONTEXT}: the compiled short way of a message's context is "
            "left to Python, which is right and a little slower"
        )
    return problems
