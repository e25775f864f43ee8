"""The self-test of the private names of opentelemetry-sdk, all of which this package uses."""

from __future__ import annotations

import os
from typing import Any, Final

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk import trace as sdk_trace
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

from lens_core.private_names import PrivateNames, missing_names
from lens_core.sdk.remote_children import RemoteChildren
from lens_core.sdk.span_fields import PROBE

__all__ = ["PRIVATE_NAMES", "check_private_names", "is_registered"]


def is_registered(reader: MetricReader) -> bool:
    """Whether a reader belongs to a provider: others cannot collect."""
    return getattr(reader, "_collect", reader) is not None


def _tracer() -> Any:
    """A tracer of the SDK as it is by itself, whatever the environment makes of it."""
    hidden = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith("OTEL_")}
    try:
        provider = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False)
        return provider.get_tracer("lens_core")
    finally:
        os.environ.update(hidden)


_SLOWER: Final = "spans are read in the public way, which is right and slower"
_OWN_TRACER: Final = "spans of calls are started by the tracer, which is right and slower"
PRIVATE_NAMES: Final = (
    PrivateNames(
        "_attributes _context _end_time _events _instrumentation_scope _kind _links _name _parent "
        "_start_time _status",
        lambda: PROBE,
        _SLOWER,
    ),
    PrivateNames("_dict", BoundedAttributes, _SLOWER),
    PrivateNames(
        "_events _name _status",
        lambda: PROBE,
        "a text that OTLP has no form for loses the batch of its span",
    ),
    PrivateNames(
        "_resource",
        lambda: PROBE,
        "spans of the application's own provider do not say of which run they are",
    ),
    PrivateNames(
        "_lock", lambda: PROBE, "spans wait for each other where something is added to them"
    ),
    PrivateNames(
        "_collect", InMemoryMetricReader, "a process that forks logs that its reader cannot collect"
    ),
    PrivateNames("_Span", lambda: sdk_trace, _OWN_TRACER),
    PrivateNames("_add_event _add_link _limits _span_processor", lambda: PROBE, _OWN_TRACER),
    PrivateNames("_span_limits _tracer_config", _tracer, _OWN_TRACER),
    PrivateNames("_tracer_metrics", _tracer, "the SDK counts fewer spans than there are"),
    PrivateNames(
        "_instrumentation_scope", _tracer, "a tracer given to @traced has no name in Ray's workers"
    ),
    PrivateNames("_remote_parent_sampled", lambda: ParentBased(ALWAYS_ON), _OWN_TRACER),
)


def check_private_names() -> list[str]:
    """What is missing of the private names, and what stops working without it; empty if none."""
    problems = missing_names(PRIVATE_NAMES)
    tracer = _tracer()
    try:
        RemoteChildren(tracer, type(tracer.span_processor), None)
    except (AttributeError, TypeError) as error:
        problems.append(f"spans as they are known here ({error}): {_OWN_TRACER}")
    return problems
