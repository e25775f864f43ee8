"""What a journal says that its process is doing, or was doing when it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.trace import StatusCode
from opentelemetry.util.types import AttributeValue

from lens_core.journal.decoding import JournalSpan
from lens_core.journal.read.death import death_reason
from lens_core.journal.read.liveness import Liveness
from lens_core.journal.read.process_files import ProcessFiles
from lens_core.journal.read.reader import read_journal
from lens_core.semconv import LENS_OP, NV_DL_RANK
from lens_tools.hang.open_processes import FailedSpan, OpenProcess, OpenSpan

__all__ = ["read_process", "whole_or_none"]


def read_process(files: ProcessFiles) -> tuple[OpenProcess, Liveness, list[FailedSpan]]:
    """The process of a journal, whether it lives, and waits of it that have failed.

    Raises:
        OSError: the journal cannot be read.
        JournalError: it is none.
    """
    journal = read_journal(files.journal)
    liveness = files.liveness(journal)
    reason = ""
    if liveness in (Liveness.DEAD, Liveness.REPLACED):
        reason = death_reason(journal, liveness, stacks=files.stacks, exit_status=files.exit_status)
    resource = _attributes(journal.attributes)
    rank = whole_or_none(resource.get(NV_DL_RANK))
    process = OpenProcess(
        name="",
        rank=rank,
        host=journal.process.host,
        pid=journal.process.pid,
        gone=False,
        reason=reason,
        created_ns=journal.process.created_ns,
        alive_ns=journal.last_alive_ns,
        activity_ns=journal.beat.activity_ns if journal.beat else journal.last_alive_ns,
        spans=[_open_span(span) for span in journal.open_spans],
        stacks=files.last_stacks(journal)[1],
        resource=resource,
        source=files.journal,
        main_thread=whole_or_none(journal.meta.get("main_thread")) or 0,
    )
    return process, liveness, [] if rank is None else _failed(rank, journal.spans)


def whole_or_none(value: object) -> int | None:
    """A value if it is an integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _failed(rank: int, spans: Sequence[JournalSpan]) -> list[FailedSpan]:
    """Waits that failed and that no exporter has delivered yet."""
    last_ns = max((span.start_ns for span in spans), default=0)
    return [
        FailedSpan(rank, _open_span(span), span.end_ns)
        for span in spans
        if span.end_ns is not None
        and span.end_ns >= last_ns
        and span.status[0] == StatusCode.ERROR.value
        and LENS_OP in span.attributes
    ]


def _open_span(span: JournalSpan) -> OpenSpan:
    return OpenSpan(
        format(span.trace_id, "032x"),
        format(span.span_id, "016x"),
        format(span.parent_span_id, "016x") if span.parent_span_id else "",
        span.name,
        span.start_ns,
        _attributes(span.attributes),
        span.thread,
    )


def _attributes(attributes: Mapping[str, object]) -> dict[str, AttributeValue]:
    return {
        name: value if isinstance(value, (str, bool, int, float, list)) else str(value)
        for name, value in attributes.items()
    }
