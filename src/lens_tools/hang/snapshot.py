"""Reads what the processes of a run are doing.

From two sources that say the same: journals (of live processes, and of dead ones that nobody has
recovered yet) and the truncated spans in a run's files. Only ever reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opentelemetry.util.types import AttributeValue

from lens_core.journal.read.death import death_reason
from lens_core.journal.read.liveness import Liveness
from lens_core.journal.read.process_files import ProcessFiles, find_process_files
from lens_core.journal.read.reader import JournalError, read_journal
from lens_core.otlp.span_records import SpanRecord
from lens_core.semconv import (
    LENS_STACKS,
    NEMO_RUN_ATTEMPT,
    NEMO_SPAN_TRUNCATED,
    NEMO_SPAN_TRUNCATED_REASON,
    NV_DL_RANK,
    NV_DL_WORLD_SIZE,
    RAY_ACTOR_ID,
)
from lens_tools.hang.open_processes import OpenProcess, OpenSpan, Snapshot
from lens_tools.runs.read import RunError, read_run

__all__ = ["take_snapshot"]

#: A process that cannot be judged from here counts as dead when it has been silent for this long.
_SILENT_NS: Final = 10_000_000_000
#: A process that died this long before the others did so while they went on.
_EARLIER_NS: Final = 1_500_000_000
#: Each rank is a node of a graph; a size beyond this is no size.
_MAX_RANKS: Final = 1 << 20


@dataclass(slots=True)
class _Judged:
    process: OpenProcess
    liveness: Liveness


def take_snapshot(directories: Iterable[Path]) -> Snapshot:
    """What can be read of the latest attempt of a run in these directories."""
    found: list[_Judged] = []
    problems: list[str] = []
    went_on_ns = 0
    for directory in directories:
        try:
            files_of_all = find_process_files(directory)
        except OSError as error:
            problems.append(f"{directory}: {error.strerror or error}")
            continue
        for files in files_of_all:
            if files.journal.exists():
                try:
                    found.append(_from_journal(files))
                except (OSError, JournalError) as error:
                    problems.append(f"{files.journal}: {error}")
        try:
            spans = read_run(directory).spans
        except RunError:
            continue  # it holds journals only
        found.extend(_from_spans(spans))
        went_on_ns = max(went_on_ns, _last_of_a_rank(spans))
    now_ns = _moment(found, went_on_ns)
    found = _latest(found, now_ns)
    for item in found:
        item.process.gone = _is_gone(item, now_ns, found)
    processes = [item.process for item in found]
    processes.sort(key=lambda process: (process.rank is None, process.rank or 0, process.name))
    _name_apart(processes)
    sizes = [_integer(process.resource.get(NV_DL_WORLD_SIZE)) for process in processes]
    return Snapshot(
        now_ns,
        processes,
        max((size for size in sizes if size is not None and size <= _MAX_RANKS), default=None),
        any(item.liveness is Liveness.ALIVE for item in found),
        problems,
    )


def _from_journal(files: ProcessFiles) -> _Judged:
    journal = read_journal(files.journal)
    liveness = files.liveness(journal)
    reason = ""
    if liveness in (Liveness.DEAD, Liveness.REPLACED):
        reason = death_reason(journal, liveness, stacks=files.stacks, exit_status=files.exit_status)
    spans = [
        OpenSpan(
            format(span.trace_id, "032x"),
            format(span.span_id, "016x"),
            format(span.parent_span_id, "016x") if span.parent_span_id else "",
            span.name,
            span.start_ns,
            _attributes(span.attributes),
        )
        for span in journal.open_spans
    ]
    resource = _attributes(journal.attributes)
    process = OpenProcess(
        name="",
        rank=_integer(resource.get(NV_DL_RANK)),
        host=journal.process.host,
        pid=journal.process.pid,
        gone=False,
        reason=reason,
        created_ns=journal.process.created_ns,
        alive_ns=journal.last_alive_ns,
        activity_ns=journal.beat.activity_ns if journal.beat else journal.last_alive_ns,
        spans=spans,
        stacks=files.last_stacks(journal)[1],
        resource=resource,
        source=files.journal,
    )
    return _Judged(process, liveness)


def _last_of_a_rank(spans: Iterable[SpanRecord]) -> int:
    """When a rank last ended a span: it went on, though nothing of it may be open any more.

    Of ranks only: a driver outlives those that it has killed.
    """
    ends = (span.end_ns for span in spans if span.rank is not None and not span.truncated)
    return max(ends, default=0)


def _from_spans(run: Iterable[SpanRecord]) -> list[_Judged]:
    groups: dict[tuple[object, ...], list[SpanRecord]] = {}
    for span in run:
        if span.truncated:
            resource = span.resource
            key = (
                resource.get("host.name"),
                resource.get("process.pid"),
                resource.get(NEMO_RUN_ATTEMPT),
                resource.get(NV_DL_RANK),
            )
            groups.setdefault(key, []).append(span)
    return [_Judged(_recovered(spans), Liveness.DEAD) for spans in groups.values()]


def _recovered(spans: Sequence[SpanRecord]) -> OpenProcess:
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
        host=str(resource.get("host.name", "")),
        pid=_integer(resource.get("process.pid")) or 0,
        gone=False,
        reason=str(spans[0].attributes.get(NEMO_SPAN_TRUNCATED_REASON, "unknown")),
        created_ns=min(span.start_ns for span in spans),
        alive_ns=max(span.end_ns for span in spans),
        activity_ns=latest_ns,
        spans=[
            OpenSpan(
                span.trace_id,
                span.span_id,
                span.parent_span_id,
                span.name,
                span.start_ns,
                span.attributes,
            )
            for span in sorted(spans, key=lambda span: span.start_ns)
        ],
        stacks=stacks,
        resource=resource,
        source=spans[0].source,
    )


def _moment(found: Sequence[_Judged], went_on_ns: int) -> int:
    if any(item.liveness is Liveness.ALIVE for item in found):
        return time.time_ns()
    last_ns = max((item.process.alive_ns for item in found), default=time.time_ns())
    return max(last_ns, went_on_ns)


def _latest(found: Sequence[_Judged], now_ns: int) -> list[_Judged]:
    """Without what ended before the latest attempt began."""
    attempts = [_integer(item.process.resource.get(NEMO_RUN_ATTEMPT)) or 0 for item in found]
    last = max(attempts, default=0)
    kept = [item for item, attempt in zip(found, attempts, strict=True) if attempt == last]
    present = [
        item
        for item in kept
        if item.liveness is Liveness.ALIVE or item.process.alive_ns >= now_ns - _EARLIER_NS
    ]
    begun_ns = min((item.process.created_ns for item in present), default=0)
    return [item for item in kept if item.process.alive_ns >= begun_ns]


def _is_gone(item: _Judged, now_ns: int, found: Sequence[_Judged]) -> bool:
    if item.liveness is Liveness.ALIVE:
        return False
    silent_ns = now_ns - item.process.alive_ns
    if item.liveness is Liveness.UNKNOWN:
        return silent_ns >= _SILENT_NS
    someone_lives = any(other.liveness is Liveness.ALIVE for other in found)
    return someone_lives or silent_ns >= _EARLIER_NS


def _name_apart(processes: Sequence[OpenProcess]) -> None:
    by_rank: dict[int, int] = {}
    for process in processes:
        if process.rank is not None:
            by_rank[process.rank] = by_rank.get(process.rank, 0) + 1
    for process in processes:
        process.name = f"rank {process.rank}"
        if process.rank is None:
            actor = str(process.resource.get(RAY_ACTOR_ID, "") or _span_actor(process))
            process.name = f"actor {actor[:12]}" if actor else f"process {process.pid}"
            process.name += f" on {process.host}" if not actor else ""
        elif by_rank[process.rank] > 1:
            process.name += f" (process {process.pid})"


def _span_actor(process: OpenProcess) -> str:
    for span in process.spans:
        if actor := span.attributes.get(RAY_ACTOR_ID):
            return str(actor)
    return ""


def _attributes(attributes: Mapping[str, object]) -> dict[str, AttributeValue]:
    return {
        name: value if isinstance(value, (str, bool, int, float, list)) else str(value)
        for name, value in attributes.items()
    }


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
