"""Sends the files of a run to a receiver, each span once.

A process that could not reach the collector leaves its spans in the directory of the run. Which of
them were sent to a receiver is written beside the files, by span id, so that a second time sends
nothing, and one that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import BinaryIO, Final

from lens_core.otlp.json_spans import JsonObject, to_line
from lens_core.otlp.lines import read_lines, span_groups
from lens_core.telemetry.export.endpoints import shown_endpoint
from lens_core.telemetry.export.http_sink import HttpSink
from lens_core.telemetry.export.otlp_settings import read_otlp_settings
from lens_core.telemetry.pipeline.export_result import Outcome, send_in_parts
from lens_tools.records.read import run_files

__all__ = ["SendResult", "send_files"]

_SPANS_PER_REQUEST: Final = 512
_TIMEOUT_S: Final = 30.0


@dataclass(slots=True)
class SendResult:
    """What :func:`send_files` did.

    Attributes:
        sent: Spans that were sent now.
        known: Spans that had been sent before.
        problems: One line per piece that could not be read or sent.
    """

    sent: int = 0
    known: int = 0
    problems: list[str] = field(default_factory=list)


def send_files(directory: Path, endpoint: str, result: SendResult) -> None:
    """Send all spans of a run's files that this receiver has not got yet.

    If this is killed between a request and the note of it, the spans of that request, 512 at most,
    are sent again by the next; their ids are the same.

    Args:
        directory: The directory of the run.
        endpoint: Base URL of an OTLP/HTTP receiver that takes JSON.
        result: Is added to.

    Raises:
        RunError: there is no telemetry in the directory.
    """
    files = run_files(directory)
    settings = read_otlp_settings("traces", endpoint=endpoint)
    shown = shown_endpoint(settings.endpoint)
    sink: HttpSink[_OneSpan] = HttpSink(
        dataclasses.replace(settings, protocol="http/json"),
        _request,
    )
    with _ledger(directory, endpoint) as ledger, closing(sink):
        known = {line.decode() for line in ledger.read().splitlines()}
        batch: list[_OneSpan] = []

        def send() -> bool:
            """Send what was read; whether it is worth while to go on."""
            for part, answer in send_in_parts(batch, lambda part: sink.send(part, _TIMEOUT_S)):
                if answer.outcome is not Outcome.SENT:
                    problem = f"{shown} did not take {len(part)} spans: {answer.outcome.value}"
                    named = ", ".join(one.id for one in part[:3])
                    result.problems.append(f"{problem} ({named}{', ...' if part[3:] else ''})")
                    if answer.outcome is Outcome.RETRY:
                        return False
                    continue  # what is refused stays in its file, and does not hold up the rest
                ledger.write("".join(f"{one.id}\n" for one in part).encode())
                ledger.flush()
                os.fsync(ledger.fileno())
                result.sent += len(part) - answer.rejected
                if answer.rejected:
                    result.problems.append(f"{shown} rejected {answer.rejected} spans")
            batch.clear()
            return True

        for scopes in chain.from_iterable(
            # A line without an end may still be written to.
            read_lines(path, _scopes, result.problems, unfinished=False)
            for path in files
        ):
            for group, scope, spans in scopes:
                fresh = {one: span for one, span in spans.items() if one not in known}
                result.known += len(spans) - len(fresh)
                known.update(fresh)
                batch.extend(_OneSpan(one, group, scope, span) for one, span in fresh.items())
                if len(batch) >= _SPANS_PER_REQUEST and not send():
                    return
        send()


@dataclass(frozen=True, slots=True)
class _OneSpan:
    id: str
    group: JsonObject
    scope: JsonObject
    span: JsonObject


def _request(spans: Sequence[_OneSpan]) -> bytes:
    """The spans as one request; what stands side by side in one scope stays so."""
    groups: list[JsonObject] = []
    for _, run in groupby(spans, key=lambda one: (id(one.group), id(one.scope))):
        same = list(run)
        scope = {**same[0].scope, "spans": [one.span for one in same]}
        groups.append({**same[0].group, "scopeSpans": [scope]})
    return to_line({"resourceSpans": groups})


@contextmanager
def _ledger(directory: Path, endpoint: str) -> Iterator[BinaryIO]:
    """The file with the ids of the spans that a receiver has, held by one process at a time."""
    # The same receiver, with or without a slash at the end.
    name = hashlib.blake2b(endpoint.rstrip("/").encode(), digest_size=6).hexdigest()
    with (directory / f".shipped-{name}.ids").open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


def _scopes(message: JsonObject) -> list[tuple[JsonObject, JsonObject, dict[str, JsonObject]]]:
    """Resource group, scope group, and spans by trace and span id."""
    return [
        (group, scope, {_id(span, "traceId") + _id(span, "spanId"): span for span in spans})
        for group, scope, spans in span_groups(message)
    ]


def _id(span: JsonObject, name: str) -> str:
    value = span.get(name)
    if not isinstance(value, str):
        raise TypeError(f"a span has no {name}")
    return value
