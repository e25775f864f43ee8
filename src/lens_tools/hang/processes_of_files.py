"""What the spans in a run's files say that its processes were doing when they ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lens_core.otlp.span_records import SpanRecord
from lens_core.semconv import (
    LENS_OP,
    LENS_STACKS,
    NEMO_RUN_ATTEMPT,
    NEMO_SPAN_TRUNCATED,
    NEMO_SPAN_TRUNCATED_REASON,
    NV_DL_RANK,
)
from lens_core.shared_files import file_name
from lens_tools.hang.open_processes import FailedSpan, OpenProcess, OpenSpan
from lens_tools.hang.processes_of_journals import whole_or_none

__all__ = ["failed_spans", "last_end_ns", "truncated_processes"]

_ERROR = 2


def last_end_ns(spans: Iterable[SpanRecord]) -> int:
    """When a rank last ended a span: it went on, though nothing of it may be open any more.

    Of ranks only: a driver outlives those that it has killed.
    """
    ends = (span.end_ns for span in spans if span.rank is not None and not span.truncated)
    return max(ends, default=0)


def failed_spans(spans: Sequence[SpanRecord]) -> list[FailedSpan]:
    """Waits that ended with an error, after which their rank started no other span."""
    last_start_ns: dict[int, int] = {}
    for span in spans:
        if span.rank is not None:
            last_start_ns[span.rank] = max(last_start_ns.get(span.rank, 0), span.start_ns)
    return [
        FailedSpan(span.rank, _open_span(span), span.end_ns)
        for span in spans
        if span.rank is not None
        and span.status_code == _ERROR
        and not span.truncated
        and LENS_OP in span.attributes
        and span.end_ns >= last_start_ns[span.rank]
    ]


def truncated_processes(spans: Iterable[SpanRecord]) -> list[OpenProcess]:
    """The processes whose open spans were cut off when they ended."""
    groups: dict[tuple[object, ...], list[SpanRecord]] = {}
    for span in spans:
        if span.truncated:
            resource = span.resource
            key = (
                resource.get("host.name"),
                resource.get("process.pid"),
                resource.get(NEMO_RUN_ATTEMPT),
                resource.get(NV_DL_RANK),
            )
            groups.setdefault(key, []).append(span)
    return [_process(group) for group in groups.values()]


def _process(spans: Sequence[SpanRecord]) -> OpenProcess:
    resource = spans[0].resource
    stacks = ""
    for span in spans:
        for event in span.events:
            if event.name == NEMO_SPAN_TRUNCATED:
                stacks = str(event.attributes.get(LENS_STACKS, stacks))
    latest_ns = max(span.start_ns for span in spans)
    return OpenProcess(
        name="",
        rank=spans[0].rank,
        host=file_name(str(resource.get("host.name", "")), otherwise=""),
        pid=whole_or_none(resource.get("process.pid")) or 0,
        gone=False,
        reason=str(spans[0].attributes.get(NEMO_SPAN_TRUNCATED_REASON, "unknown")),
        created_ns=min(span.start_ns for span in spans),
        alive_ns=max(span.end_ns for span in spans),
        activity_ns=latest_ns,
        spans=[_open_span(span) for span in sorted(spans, key=lambda span: span.start_ns)],
        stacks=stacks,
        resource=resource,
        source=spans[0].source,
    )


def _open_span(span: SpanRecord) -> OpenSpan:
    return OpenSpan(
        span.trace_id,
        span.span_id,
        span.parent_span_id,
        span.name,
        span.start_ns,
        span.attributes,
    )
