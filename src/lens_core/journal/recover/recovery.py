"""Journals of dead processes as ordinary telemetry.

Each span is delivered once: recovery takes a lock on the journal, gives its output a name that
follows from the journal's, and deletes the journal only when the output is safe. Recovery that is
itself killed can be run again. Spans that the dead process had exported before it could note that
down are found in its files and left out; over OTLP they are sent again, with the same ids.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, cast

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from lens_core.diagnostics import describe
from lens_core.journal.decoding import JournalSpan, to_readable_span
from lens_core.journal.exit_note import exit_note_path
from lens_core.journal.opening import open_regular, read_regular_text
from lens_core.journal.process_identity import boot_id
from lens_core.journal.read.death import death_reason
from lens_core.journal.read.liveness import Liveness
from lens_core.journal.read.process_files import (
    Left,
    ProcessFiles,
    find_process_files,
    remove_unfinished,
)
from lens_core.journal.read.reader import JournalContent
from lens_core.otlp.json_spans import encode_spans, to_line
from lens_core.semconv import (
    LENS_STACKS,
    NEMO_SPAN_TRUNCATED,
    NEMO_SPAN_TRUNCATED_REASON,
)

__all__ = ["DirectorySink", "Recovered", "RecoveredSink", "readable_spans", "recover"]

_SPANS_PER_LINE: Final = 512
_MAX_STACKS: Final = 16_384


class RecoveredSink(Protocol):
    """Where recovered spans go."""

    def deliver(self, name: str, spans: Sequence[ReadableSpan]) -> None:
        """Deliver all spans of one process; they are safe when this returns.

        Called again with the same name and the same spans if recovery is killed right afterwards.

        Raises:
            OSError: they could not be delivered.
        """


class DirectorySink:
    """Writes one OTLP JSON Lines file per process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def deliver(self, name: str, spans: Sequence[ReadableSpan]) -> None:
        """Write the file of one process; it appears when it is complete."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"recovered-{name}.jsonl"
        part = path.with_suffix(".part")
        # A recovery that was killed while it deleted the journal and the files beside it has
        # written all of this process, of which only a part is still there to be read.
        there = _ids_in(path, {format(_span_id(span), "016x") for span in spans})
        spans = [span for span in spans if _span_id(span) not in there]
        before = path.read_bytes() if path.is_file() else b""
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(before)
            for at in range(0, len(spans), _SPANS_PER_LINE):
                file.write(to_line(encode_spans(spans[at : at + _SPANS_PER_LINE])))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


@dataclass(slots=True)
class Recovered:
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
    sink: Callable[[Mapping[str, object]], RecoveredSink],
    *,
    exit_statuses: Mapping[int, int] | None = None,
    assume_dead: bool = False,
    remove_emptied: bool = False,
) -> Recovered:
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
    result = Recovered()
    for directory in directories:
        try:
            families = find_process_files(directory)
        except OSError as error:
            result.problems.append(f"{directory}: {error.strerror or error}")
            continue
        remove_unfinished(directory)
        for family in families:
            try:
                _recover_one(family, sink, exit_statuses or {}, assume_dead, result)
            except (OSError, ValueError) as error:
                result.problems.append(f"{family.journal}: {error}")
            except Exception as error:  # noqa: BLE001 - of one process; the others are recovered
                result.problems.append(f"{family.journal}: {describe(error)}")
        if remove_emptied and families:
            with contextlib.suppress(OSError):
                directory.rmdir()  # only if nothing is left in it
    return result


def readable_spans(
    left: Left, *, reason: str, alive_ns: int = 0, stacks: str = ""
) -> list[ReadableSpan]:
    """What a process left behind as spans of the SDK, the open ones marked as truncated.

    Args:
        left: What it left behind.
        reason: Why its open spans were cut off.
        alive_ns: When it is known to have lived, from elsewhere than its journal.
        stacks: Stacks of its threads, for the events of the innermost open spans.
    """
    attributes = left.meta.get("attributes")
    resource = Resource(
        cast("dict[str, str]", attributes) if isinstance(attributes, dict) else {},
        str(left.meta.get("schema_url", "")),
    )
    last_ns = max(alive_ns, left.journal.last_alive_ns if left.journal is not None else 0)
    parents = {span.parent_span_id for span in left.spans if span.end_ns is None}
    for span in left.spans:
        if span.end_ns is None:
            innermost = span.span_id not in parents
            _truncate(span, reason, max(last_ns, span.last_ns), stacks if innermost else "")
    return [to_readable_span(span, resource) for span in left.spans]


def _recover_one(
    family: ProcessFiles,
    sink: Callable[[Mapping[str, object]], RecoveredSink],
    exit_statuses: Mapping[int, int],
    assume_dead: bool,
    result: Recovered,
) -> None:
    name = family.stem.name
    liveness = family.liveness()
    if liveness is Liveness.ALIVE or (liveness is Liveness.UNKNOWN and not assume_dead):
        result.alive.append(name)
        return
    with family.locked() as mine:
        if not mine:
            result.busy.append(name)
            return
        left = family.read()
        result.problems.extend(left.problems)
        delivered = _delivered(left)
        left.spans = [span for span in left.spans if span.span_id not in delivered]
        reason, stacks, alive_ns = "shutdown", "", 0
        if left.journal is not None:
            exit_status = exit_statuses.get(left.journal.process.pid, family.exit_status)
            reason = death_reason(
                left.journal, liveness, stacks=family.stacks, exit_status=exit_status
            )
            stacks = _stacks(family, left)
            alive_ns = _stacks_ns(family, left.journal)
        open_count = sum(span.end_ns is None for span in left.spans)
        if left.spans:
            spans = readable_spans(left, reason=reason, alive_ns=alive_ns, stacks=stacks)
            sink(left.meta).deliver(name, spans)
        result.processes[name] = reason
        result.truncated += open_count
        result.ended += len(left.spans) - open_count
        if not left.problems:
            family.delete()
        else:
            _set_aside(family)


def _truncate(span: JournalSpan, reason: str, end_ns: int, stacks: str) -> None:
    about: dict[str, object] = {NEMO_SPAN_TRUNCATED_REASON: reason}
    span.attributes.update({NEMO_SPAN_TRUNCATED: True, **about})
    if stacks:
        about[LENS_STACKS] = stacks
    span.events.append((NEMO_SPAN_TRUNCATED, end_ns, about))
    span.end_ns = end_ns


def _stacks(family: ProcessFiles, left: Left) -> str:
    """The latest stacks of the process: of its fatal signal, or else of when nothing moved."""
    try:
        written = read_regular_text(family.stacks)
    except OSError:
        written = ""
    if not written and left.journal is not None:
        written = left.journal.stacks
    return written[-_MAX_STACKS:]


def _stacks_ns(family: ProcessFiles, journal: JournalContent) -> int:
    """When faulthandler last wrote the stacks of this process; 0 if it did not.

    After a fatal signal this is the moment of its death, nearer than the last sign of life.
    """
    if journal.process.boot_id != boot_id():
        return 0  # a copy: its time is that of the copying
    try:
        found = family.stacks.stat()
    except OSError:
        return 0
    return found.st_mtime_ns if found.st_size else 0


def _set_aside(family: ProcessFiles) -> None:
    # What could be read is delivered; what could not is kept, under a name that is not read again.
    for path in (*family.spills, family.journal):
        if path.exists():
            path.replace(path.with_name(path.name + ".damaged"))
    family.stacks.unlink(missing_ok=True)
    exit_note_path(family.stem).unlink(missing_ok=True)


def _span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    return context.span_id if context is not None else 0


def _delivered(left: Left) -> set[int]:
    """Which of these spans stand in a file that the process itself wrote, by id."""
    directory = left.meta.get("output_dir")
    wanted = {format(span.span_id, "016x") for span in left.spans}
    host, pid = left.meta.get("host"), left.meta.get("pid")
    if not isinstance(directory, str) or not directory or not wanted:
        return set()
    found: set[int] = set()
    for path in sorted(Path(directory).glob(f"*-{host}-{pid}-*.jsonl")):
        if not path.name.startswith("recovered-"):
            found |= _ids_in(path, wanted)
    return found


def _ids_in(path: Path, wanted: set[str]) -> set[int]:
    found: set[int] = set()
    try:
        with open_regular(path) as lines:
            for line in lines:
                # The last line may be one that the process was killed in the middle of.
                if line.endswith(b"\n"):
                    found |= _ids_of(line, wanted)
    except OSError:
        pass
    return found


def _ids_of(line: bytes, wanted: set[str]) -> set[int]:
    try:
        message = json.loads(line)
        return {
            int(span["spanId"], 16)
            for resource in message.get("resourceSpans", ())
            for scope in resource.get("scopeSpans", ())
            for span in scope.get("spans", ())
            if span.get("spanId") in wanted
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return set()
