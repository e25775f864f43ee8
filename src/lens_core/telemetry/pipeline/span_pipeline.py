"""What happens to each span of this process: known while open, delivered when ended.

One processor does all of it. It knows the open spans, so that they can be ended when the process
ends (:meth:`SpanPipeline.truncate`), and so that spans which were not started here are not
delivered: a forked child inherits its parent's open spans and ends copies of them when it unwinds.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.trace import TraceFlags
from opentelemetry.util.types import AttributeValue

from lens_core.diagnostics import describe, diagnostics
from lens_core.sdk.span_fields import context_of, with_fields
from lens_core.semconv import NEMO_SPAN_TRUNCATED
from lens_core.telemetry.pipeline.delivery import Delivery
from lens_core.telemetry.pipeline.truncated import ENDS_OF_PROCESS, cut_short, truncation
from lens_core.telemetry.resources import child_resource

__all__ = ["SpanAttachment", "SpanPipeline"]

#: How long the application's own shutdown waits for us: as long as ours would.
_SHUTDOWN_MS: Final = 5000


class SpanPipeline(SpanProcessor):
    """Tracks open spans and hands ended ones to the deliveries.

    Args:
        deliveries: Where ended, sampled spans go.
        processors: Further processors. They see each span that starts and each that ends here
            (not those inherited in a fork), before the deliveries.
        overlay: Resource attributes for spans of a provider that is not ours, merged over the
            span's own resource.
        attributes: Set on every span that starts.

    Attributes:
        is_taking: Whether spans that start are taken.
        on_child_start: Called once in a forked child, when its first span starts.
        exit_reason: Why the process ends, where a block is left by ``SystemExit``.
    """

    def __init__(
        self,
        deliveries: Sequence[Delivery[ReadableSpan]],
        processors: Sequence[SpanProcessor] = (),
        *,
        overlay: Resource | None = None,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        self.is_taking = True
        self.on_child_start: Callable[[], None] | None = None
        self.exit_reason: Callable[[], str] = lambda: "exit"
        self._deliveries = tuple(deliveries)
        self._processors = tuple(processors)
        self._overlay = overlay
        self._attributes = dict(attributes or {})
        self._merged = (Resource.get_empty(), Resource.get_empty())
        self._open: dict[int, Span] = {}
        # Open spans with the id of another one: the application's provider may draw ids from the
        # random stream that training code seeds again and again.
        self._twins: list[Span] = []
        # Spans that began while the process was ending already, such as a last checkpoint's.
        self._last_works: set[int] = set()
        self._is_new_child = False
        fork = weakref.WeakMethod(self._after_fork)
        os.register_at_fork(after_in_child=lambda: (method := fork()) and method())

    def _after_fork(self) -> None:
        self._open = {}
        self._twins = []
        self._last_works = set()
        self._is_new_child = True
        child = child_resource()
        self._overlay = child if self._overlay is None else self._overlay.merge(child)

    def add_span_processor(self, processor: SpanProcessor) -> None:
        """Add a processor after those that are there."""
        self._processors = (*self._processors, processor)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Remember the span as open."""
        if not self.is_taking:
            return
        if self._is_new_child:
            self._is_new_child = False
            if self.on_child_start is not None:
                self.on_child_start()
        context = context_of(span)
        if context is not None and self._open.setdefault(context.span_id, span) is not span:
            self._twins.append(span)
        if context is not None and isinstance(sys.exc_info()[1], ENDS_OF_PROCESS):
            self._last_works.add(context.span_id)
        if self._attributes:
            span.set_attributes(self._attributes)
        for processor in self._processors:
            try:
                processor.on_start(span, parent_context)
            except Exception as error:  # noqa: BLE001 - the user's code must not see it
                diagnostics.record("processor.failed", describe(error))

    def on_end(self, span: ReadableSpan) -> None:
        """Deliver the span, if it was started here and is sampled."""
        context = context_of(span)
        known = None if context is None else self._open.pop(context.span_id, None)
        if context is None or known is None:
            return
        if self._twins:
            self._put_back(context.span_id, known)
        if isinstance(sys.exc_info()[1], ENDS_OF_PROCESS) or self._last_works:
            span = self._cut_short(span, known, context.span_id)
        for processor in self._processors:
            try:
                processor.on_end(span)
            except Exception as error:  # noqa: BLE001 - the span is delivered all the same
                diagnostics.record("processor.failed", describe(error))
        if not self._deliveries or not context.trace_flags & TraceFlags.SAMPLED:
            return
        if self._overlay is not None:
            span = self._with_overlay(span, self._overlay)
        for delivery in self._deliveries:
            delivery.put(span)

    def _cut_short(self, span: ReadableSpan, known: Span, span_id: int) -> ReadableSpan:
        error = sys.exc_info()[1]
        if span_id in self._last_works:
            self._last_works.discard(span_id)
            return span
        if not isinstance(error, ENDS_OF_PROCESS) or hasattr(error, "_lens_ordinary_end"):
            return span
        reason = "SIGINT" if isinstance(error, KeyboardInterrupt) else self.exit_reason()
        return cut_short(span, reason, known, self._processors)

    def _put_back(self, span_id: int, known: Span) -> None:
        """Keep as open what shares the id of the span that has just ended."""
        same = [known, *(twin for twin in self._twins if twin.context.span_id == span_id)]
        self._twins = [twin for twin in self._twins if twin.context.span_id != span_id]
        still_open = [span for span in same if span.is_recording()]
        if still_open:
            self._open[span_id] = still_open[0]
            self._twins += still_open[1:]

    def _with_overlay(self, span: ReadableSpan, overlay: Resource) -> ReadableSpan:
        resource, merged = self._merged
        if span.resource is not resource:
            merged = span.resource.merge(overlay)
            self._merged = (span.resource, merged)
        return with_fields(span, resource=merged)

    def truncate(self, reason: str) -> int:
        """End all open spans, innermost first; returns how many there were.

        They carry ``nemo.span.truncated`` and an event of the same name with the reason. Their end
        says when the process ended, not when the work did: leave them out of duration statistics.
        """
        marks, event = truncation(reason)
        now_ns = time.time_ns()
        count = 0
        for span in reversed([*self._open.values(), *self._twins]):
            try:
                if not span.is_recording():
                    continue
                span.set_attributes(marks)
                span.add_event(NEMO_SPAN_TRUNCATED, event, timestamp=now_ns)
                span.end(max(now_ns, span.start_time or 0))
                # Its owner may yet end it: that is not the mistake that the SDK would warn of.
                setattr(span, "end", _end_again)  # noqa: B010 - assigning a method, on purpose
                count += 1
            except Exception as error:  # noqa: BLE001 - one span must not keep the others open
                diagnostics.record("span.truncate_failed", describe(error))
        return count

    def shutdown(self) -> None:
        """Shut the further processors down; the deliveries belong to the set-up."""
        for processor in self._processors:
            try:
                processor.shutdown()
            except Exception as error:  # noqa: BLE001 - one processor must not stop the others
                diagnostics.record("processor.shutdown_failed", describe(error))

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send all that has ended so far; whether that was done in time."""
        deadline = time.monotonic() + timeout_millis / 1e3
        done = True
        for processor in self._processors:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                # A processor that forgets to answer is taken as done, as the SDK takes it.
                done = processor.force_flush(int(left_s * 1e3)) is not False and done
            except Exception as error:  # noqa: BLE001 - the deliveries come after it
                diagnostics.record("processor.failed", describe(error))
                done = False
        for delivery in self._deliveries:
            done = delivery.flush(max(0.0, deadline - time.monotonic())) and done
        return done


class SpanAttachment(SpanProcessor):
    """Our place on a provider that the application installed.

    A processor cannot be removed from the SDK's provider, so this one stays, and its target is the
    pipeline of the latest set-up.
    """

    def __init__(self) -> None:
        self.target: SpanPipeline | None = None

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Pass on to the pipeline of the current set-up."""
        if self.target is not None:
            self.target.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Pass on to the pipeline of the current set-up."""
        if self.target is not None:
            self.target.on_end(span)

    def shutdown(self) -> None:
        """The application shuts its provider down: deliver what has ended so far."""
        self.force_flush(_SHUTDOWN_MS)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Pass on to the pipeline of the current set-up."""
        return self.target is None or self.target.force_flush(timeout_millis)


def _end_again(end_time: int | None = None) -> None:
    """Stands in for ``Span.end`` of a span that was truncated."""
