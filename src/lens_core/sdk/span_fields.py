"""What is in a span of the SDK, read in one step.

Spans are read for each span, on the training thread and with cold caches, and their properties are
functions, of which some copy what they return (``python -m benchmarks journal ray``). So there are
getters, bound once, that enter no function. Of an SDK whose spans are built differently they ask
the properties, which is right and slower.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final, TypeVar

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk import trace as sdk_trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import INVALID_SPAN_CONTEXT

__all__ = [
    "PROBE",
    "attributes_of",
    "context_of",
    "end_time_of",
    "ended_fields",
    "events_of",
    "links_of",
    "lock_of",
    "resource_of",
    "scope_of",
    "started_fields",
    "values_of",
    "with_fields",
]

SpanT = TypeVar("SpanT", bound=ReadableSpan)


def _probe() -> ReadableSpan:
    resource = Resource.get_empty()
    try:
        span: ReadableSpan = sdk_trace._Span("", INVALID_SPAN_CONTEXT, resource=resource)
    except (AttributeError, TypeError):  # of an SDK whose open spans are made differently
        return ReadableSpan("", INVALID_SPAN_CONTEXT, resource=resource)
    return span


#: A span to see what is in one.
PROBE: Final = _probe()


def _getter(*names: str) -> Callable[[ReadableSpan], Any]:
    fields = attrgetter(*("_" + name.replace(".", "._") for name in names))
    try:
        fields(PROBE)
    except AttributeError:
        return attrgetter(*names)
    return fields


attributes_of: Final = _getter("attributes")
context_of: Final = _getter("context")
end_time_of: Final = _getter("end_time")
events_of: Final = _getter("events")
links_of: Final = _getter("links")
resource_of: Final = _getter("resource")
scope_of: Final = _getter("instrumentation_scope")
#: What a journal writes when a span starts.
started_fields: Final = _getter("parent", "attributes", "links", "name", "kind", "start_time")
#: What a line of a usual span is made of.
ended_fields: Final = _getter(
    *("context", "parent", "status.status_code", "attributes", "events", "links"),
    *("name", "kind", "start_time", "end_time"),
)
_one_lock: Final = threading.RLock()
#: The lock under which a span changes; one for all spans where theirs cannot be had.
lock_of: Final[Callable[[Any], Any]] = (
    attrgetter("_lock") if hasattr(PROBE, "_lock") else lambda span: _one_lock
)
#: The dictionary that the SDK's mapping guards: it locks and copies for every look.
values_of: Final[Callable[[Any], dict[str, Any]]] = (
    attrgetter("_dict") if hasattr(BoundedAttributes(), "_dict") else dict
)


def with_fields(span: SpanT, **fields: object) -> SpanT:
    """A copy of a span with other values; the constructor would lose the counts of what it dropped.

    Args:
        span: Stays as it is.
        fields: By the names of the properties.
    """
    copied = copy.copy(span)
    for name, value in fields.items():
        setattr(copied, f"_{name}", value)
    return copied
