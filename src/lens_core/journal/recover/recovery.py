"""Journals of dead processes as ordinary telemetry.

Each span is delivered once: recovery takes a lock on the journal, gives its output a name that
follows from the journal's, and deletes the journal only when the output is safe. Recovery that is
itself killed can be run again. Spans that the dead process had exported before it could note that
down are found in its files and left out; over OTLP they are sent again, with the same ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lens_core.diagnostics import describe
from lens_core.journal.read.death import death_reason
from lens_core.journal.read.liveness import Liveness
from lens_core.journal.read.process_files import (
    ProcessFiles,
    find_process_files,
    remove_unfinished,
)
from lens_core.journal.recover.sinks import DirectorySink, RecoverySink, written_by_itself
from lens_core.journal.recover.truncation import readable_spans

__all__ = ["DirectorySink", "RecoveryResult", "RecoverySink", "recover"]


@dataclass(slots=True)
class RecoveryResult:
    """What :func:`recover` did.

    Attributes:
        processes: Names of the processes whose spans were recovered, with the reason of each.
        ended: Spans recovered that had ended.
        truncated: Spans recovered that were open.
        alive: Processes that were left alone because they live, or may live.
        busy: Processes that somebody else is recovering.
        problems: One line per piece that could not be read or delivered.
    """

    processes: dict[str, str] = field(default_factory=dict)
    ended: int = 0
    truncated: int = 0
    alive: list[str] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def recover(
    directories: Iterable[Path],
    sink: Callable[[Mapping[str, object]], RecoverySink],
    *,
    exit_statuses: Mapping[int, int] | None = None,
    assume_dead: bool = False,
    remove_emptied: bool = False,
) -> RecoveryResult:
    """Deliver the spans of all dead processes that have a journal in these directories.

    Never raises for what it finds there: a file that is torn or is no journal is reported and left
    where it is, and the others are recovered.

    Args:
        directories: Where to look.
        sink: Where the spans of a process go, given the meta data of its journal.
        exit_statuses: How processes ended, by process id, where the caller knows: the exit status,
            or minus the number of the signal, as in ``subprocess.Popen.returncode``. Where it does
            not, what ``lens run`` noted beside the journal is used.
        assume_dead: Recover also the journals of processes that cannot be judged from here, such
            as those of another host. Only for a run that is known to be over.
        remove_emptied: Remove a directory of which nothing is left afterwards.
    """
    result = RecoveryResult()
    for directory in directories:
        try:
            processes = find_process_files(directory)
        except OSError as error:
            result.problems.append(f"{directory}: {error.strerror or error}")
            continue
        remove_unfinished(directory)
        for files in processes:
            try:
                _recover_one(files, sink, exit_statuses or {}, assume_dead, result)
            except (OSError, ValueError) as error:
                result.problems.append(f"{files.journal}: {error}")
            except Exception as error:  # noqa: BLE001 - of one process; the others are recovered
                result.problems.append(f"{files.journal}: {describe(error)}")
        if remove_emptied and processes:
            with contextlib.suppress(OSError):
                directory.rmdir()  # only if nothing is left in it
    return result


def _recover_one(
    files: ProcessFiles,
    sink: Callable[[Mapping[str, object]], RecoverySink],
    exit_statuses: Mapping[int, int],
    assume_dead: bool,
    result: RecoveryResult,
) -> None:
    name = files.stem.name
    liveness = files.liveness()
    if liveness is Liveness.ALIVE or (liveness is Liveness.UNKNOWN and not assume_dead):
        result.alive.append(name)
        return
    with files.locked() as mine:
        if not mine:
            result.busy.append(name)
            return
        content = files.read()
        result.problems.extend(content.problems)
        delivered = written_by_itself(content.meta, {span.span_id for span in content.spans})
        spans = [span for span in content.spans if span.span_id not in delivered]
        reason, stacks, alive_ns = "shutdown", "", 0
        if content.journal is not None:
            exit_status = exit_statuses.get(content.journal.process.pid, files.exit_status)
            reason = death_reason(
                content.journal, liveness, stacks=files.stacks, exit_status=exit_status
            )
            alive_ns, stacks = files.last_stacks(content.journal)
            alive_ns = max(alive_ns, content.journal.last_alive_ns)
        open_count = sum(span.end_ns is None for span in spans)
        if spans:
            readable = readable_spans(
                spans, content.meta, reason=reason, alive_ns=alive_ns, stacks=stacks
            )
            sink(content.meta).deliver(name, readable)
        result.processes[name] = reason
        result.truncated += open_count
        result.ended += len(spans) - open_count
        if content.problems:
            files.set_aside()
        else:
            files.delete()
