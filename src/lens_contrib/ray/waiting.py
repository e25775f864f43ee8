"""``ray.get`` under a span that says what was waited for.

A driver that waits shows up in a trace as a gap. :func:`traced_get` fills it with a span that names
the tasks it waited for, and links to the PRODUCER spans that submitted them
(``@traced(producer=True)``).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, TypeVar, overload

import ray
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Link, SpanContext

from lens_contrib.ray.failure import record_failure
from lens_core.current_context import detach
from lens_core.semconv import RAY_WAIT_TASK_IDS, RPC_SYSTEM_NAME
from lens_core.spans.start import start_span
from lens_core.spans.status import end_span

__all__ = ["Producers", "producers", "traced_get"]

_T = TypeVar("_T")
_MAX_REMEMBERED: Final = 10_000
#: What the SDK keeps by default of links and of the elements of a span.
_MAX_NAMED: Final = 128


class Producers:
    """Which span submitted the call behind an object reference.

    Holds the last 10,000 references: Ray's references cannot be watched for their end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: OrderedDict[bytes, SpanContext] = OrderedDict()

    def remember(self, refs: object, span: SpanContext) -> None:
        """Note that the call submitted under this span gave these references."""
        with self._lock:
            for ref in _references(refs):
                self._spans[ref.binary()] = span
            while len(self._spans) > _MAX_REMEMBERED:
                self._spans.popitem(last=False)

    def of(self, refs: object) -> list[SpanContext]:
        """The spans that submitted the calls behind these references, each once."""
        with self._lock:
            found = [self._spans.get(ref.binary()) for ref in _references(refs)]
        return list({span.span_id: span for span in found if span is not None}.values())


#: The calls that this process submitted.
producers: Final = Producers()


@overload
def traced_get(refs: ray.ObjectRef[_T], *, timeout: float | None = None, name: str = ...) -> _T: ...
@overload
def traced_get(
    refs: Sequence[ray.ObjectRef[_T]], *, timeout: float | None = None, name: str = ...
) -> list[_T]: ...
def traced_get(
    refs: ray.ObjectRef[_T] | Sequence[ray.ObjectRef[_T]],
    *,
    timeout: float | None = None,
    name: str = "ray.get",
) -> _T | list[_T]:
    """``ray.get(refs, timeout=timeout)``, under a span that covers the wait.

    The span has the ids of the tasks that were waited for (``ray.wait.task_ids``, as on their own
    spans), and a Link to each PRODUCER span that submitted one of them from this process.

    Args:
        refs: One reference or several.
        timeout: Most seconds to wait.
        name: Name of the span.

    Raises:
        Exception: What ``ray.get`` raises; it is named on the span.
    """
    links = [Link(span) for span in producers.of(refs)[:_MAX_NAMED]]
    tasks = [ref.task_id().hex() for ref in _references(refs)[:_MAX_NAMED]]
    tracer = trace.get_tracer("lens_contrib.ray")
    attributes = {RPC_SYSTEM_NAME: "ray", RAY_WAIT_TASK_IDS: tasks}
    span = start_span(tracer, name, attributes=attributes, links=links)
    token = otel_context.attach(trace.set_span_in_context(span))
    try:
        return ray.get(refs, timeout=timeout)
    except BaseException as error:
        record_failure(span, error)
        raise
    finally:
        detach(token)
        end_span(span)


def _references(refs: object) -> list[ray.ObjectRef[object]]:
    several = refs if isinstance(refs, list | tuple) else (refs,)
    return [ref for ref in several if isinstance(ref, ray.ObjectRef)]
