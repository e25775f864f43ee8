"""The private names of opentelemetry-api that this package uses, behind one self-test."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import INVALID_SPAN_CONTEXT, NonRecordingSpan, Tracer

from lens_core.private_names import PrivateNames, missing_names

__all__ = [
    "TracerScope",
    "PRIVATE_NAMES",
    "SPAN_CONTEXT",
    "check_private_names",
    "global_textmap_of",
    "is_suppressed",
    "is_unset",
    "propagators_of",
    "real_tracer",
    "scope_of_tracer",
    "suppress_instrumentation",
]

#: Name and version of an instrumentation scope: all of a tracer that another process can use.
TracerScope = tuple[str, str | None]
#: Where a span of the API or the SDK keeps its context; its property is a function of Python.
SPAN_CONTEXT: Final = "_context"
_SUPPRESS: Final[str] = getattr(otel_context, "_SUPPRESS_INSTRUMENTATION_KEY", "")


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


def suppress_instrumentation() -> None:
    """From now on nothing that this context's code does becomes telemetry: it sends some."""
    otel_context.attach(otel_context.set_value(_SUPPRESS, True))


def is_suppressed() -> bool:
    """Whether what happens now must not become telemetry."""
    return bool(otel_context.get_value(_SUPPRESS))


def is_unset(provider: object) -> bool:
    """Whether it is the API's stand-in for a meter provider, which it is until one is set."""
    return type(provider).__name__ == "_ProxyMeterProvider"


def real_tracer(tracer: Tracer) -> object:
    """The tracer behind the API's stand-in, if it is one and a provider is set; else the same."""
    if type(tracer) is trace.ProxyTracer:
        return getattr(tracer, "_tracer", tracer)
    return tracer


def scope_of_tracer(tracer: Tracer) -> TracerScope | None:
    """What a tracer of the SDK, or the API's stand-in for one, is called; ``None`` of another."""
    scope = getattr(tracer, "_instrumentation_scope", None)
    name, version = getattr(scope, "name", None), getattr(scope, "version", None)
    if not isinstance(name, str):
        name = getattr(tracer, "_instrumenting_module_name", None)
        version = getattr(tracer, "_instrumenting_library_version", None)
    if not isinstance(name, str):
        return None
    return name, version if isinstance(version, str) else None


PRIVATE_NAMES: Final = (
    PrivateNames(
        "_propagators",
        lambda: CompositePropagator([]),
        "contexts are formatted and parsed for each message, which is right and several times "
        "slower",
    ),
    PrivateNames(
        "_HTTP_TEXT_FORMAT",
        lambda: sys.modules["opentelemetry.propagate"],
        "the global propagator is asked for in the public way, which is right and a little slower",
    ),
    PrivateNames(
        SPAN_CONTEXT,
        lambda: NonRecordingSpan(INVALID_SPAN_CONTEXT),
        "the compiled short way of a message's context is left to Python, which is right and a "
        "little slower",
    ),
    PrivateNames(
        "_SUPPRESS_INSTRUMENTATION_KEY",
        lambda: otel_context,
        "what HTTP clients and loggers do for an export becomes telemetry itself",
    ),
    PrivateNames(
        "_ProxyMeterProvider",
        lambda: import_module("opentelemetry.metrics._internal"),
        "no metrics are sent: the application is taken to have set a meter provider of its own",
    ),
    PrivateNames(
        "_tracer",
        lambda: trace.ProxyTracer,
        "a tracer got before a provider is set starts no spans under derived ids",
    ),
    PrivateNames(
        "_instrumenting_module_name _instrumenting_library_version",
        lambda: trace.ProxyTracer("lens_core"),
        "a tracer given to @traced before a provider is set has no name in Ray's workers",
    ),
)
check_private_names: Final = functools.partial(missing_names, PRIVATE_NAMES)
