"""Reads what the processes of a run are doing.

From two sources that say the same: journals (of live processes, and of dead ones that nobody has
recovered yet) and the truncated spans in a run's files. Only ever reads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lens_core.journal.read.liveness import Liveness
from lens_core.journal.read.process_files import find_process_files
from lens_core.journal.read.reader import JournalError
from lens_core.otlp.span_records import SpanRecord
from lens_core.semconv import NEMO_RUN_ATTEMPT, NV_DL_WORLD_SIZE, RAY_ACTOR_ID
from lens_tools.hang.open_processes import FailedSpan, OpenProcess, Snapshot
from lens_tools.hang.processes_of_files import failed_spans, last_end_ns, truncated_processes
from lens_tools.hang.processes_of_journals import read_process, whole_or_none
from lens_tools.records.read import RunError, read_records

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
    failed: list[FailedSpan] = []
    records: list[SpanRecord] = []
    # A run's directory leads to its journals, which may have been named as well.
    for directory in dict.fromkeys(Path(path).resolve() for path in directories):
        try:
            files_of_all = find_process_files(directory)
        except OSError as error:
            problems.append(f"{directory}: {error.strerror or error}")
            continue
        for files in files_of_all:
            if files.journal.exists():
                try:
                    process, liveness, ended = read_process(files)
                except (OSError, JournalError) as error:
                    problems.append(f"{files.journal}: {error}")
                    continue
                found.append(_Judged(process, liveness))
                failed += ended
        with contextlib.suppress(RunError):  # it holds journals only
            records += read_records(directory).spans
    found = _merged(found, truncated_processes(records))
    now_ns = _moment(found, last_end_ns(records))
    found = _latest(found, now_ns)
    for item in found:
        item.process.gone = _is_gone(item, now_ns, found)
    processes = [item.process for item in found]
    processes.sort(key=lambda process: (process.rank is None, process.rank or 0, process.name))
    _name_apart(processes)
    sizes = [whole_or_none(process.resource.get(NV_DL_WORLD_SIZE)) for process in processes]
    sizes += [whole_or_none(span.resource.get(NV_DL_WORLD_SIZE)) for span in records[-1:]]
    return Snapshot(
        now_ns,
        processes,
        max((size for size in sizes if size is not None and size <= _MAX_RANKS), default=None),
        any(item.liveness is Liveness.ALIVE for item in found),
        problems,
        _of_this_attempt([*failed, *failed_spans(records)], processes),
        frozenset(span.rank for span in records if span.rank is not None),
        len(records),
    )


def _merged(found: list[_Judged], truncated: Iterable[OpenProcess]) -> list[_Judged]:
    """Journals, with the processes that only the files know of.

    A process that a signal ended has written its open spans into its files, and left its journal.
    """
    by_process = {(item.process.host, item.process.pid): item for item in found}
    for process in truncated:
        known = by_process.get((process.host, process.pid))
        if known is None or known.liveness is Liveness.ALIVE:
            # Its pid is used again, or it handled the signal and lives on.
            found += [] if known is not None else [_Judged(process, Liveness.DEAD)]
            continue
        spans = {span.span_id: span for span in [*process.spans, *known.process.spans]}
        known.process.spans = sorted(spans.values(), key=lambda span: span.start_ns)
        known.process.alive_ns = max(known.process.alive_ns, process.alive_ns)
        known.process.stacks = known.process.stacks or process.stacks
        if known.process.reason in ("", "unknown", "hang"):
            known.process.reason = process.reason
    return found


def _of_this_attempt(
    failed: Iterable[FailedSpan], processes: Sequence[OpenProcess]
) -> list[FailedSpan]:
    """Each once, without what failed before the processes that are looked at began."""
    begun_ns = min((process.created_ns for process in processes), default=0)
    unique = {one.span.span_id: one for one in failed if one.end_ns >= begun_ns}
    return list(unique.values())


def _moment(found: Sequence[_Judged], went_on_ns: int) -> int:
    if any(item.liveness is Liveness.ALIVE for item in found):
        return time.time_ns()
    last_ns = max((item.process.alive_ns for item in found), default=time.time_ns())
    return max(last_ns, went_on_ns)


def _latest(found: Sequence[_Judged], now_ns: int) -> list[_Judged]:
    """Without what ended before the latest attempt began."""
    attempts = [whole_or_none(item.process.resource.get(NEMO_RUN_ATTEMPT)) or 0 for item in found]
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
            process.name = _actor(process) or f"process {process.pid} on {process.host}"
        elif by_rank[process.rank] > 1:
            process.name += f" (process {process.pid})"


def _actor(process: OpenProcess) -> str:
    """The Ray actor that a process is, with its class where a span of it tells."""
    actor, kind = str(process.resource.get(RAY_ACTOR_ID, "")), ""
    for span in process.spans:
        if of_span := span.attributes.get(RAY_ACTOR_ID):
            actor, kind = actor or str(of_span), span.name.rpartition(".")[0]
            break
    return f"actor {actor[:12]}" + (f" ({kind})" if kind else "") if actor else ""
