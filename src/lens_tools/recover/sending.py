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
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final

from lens_core.otlp.json_spans import JsonObject, to_line
from lens_core.otlp.lines import read_lines, span_groups
from lens_core.telemetry.export.http_sink import HttpSink
from lens_core.telemetry.export.otlp_settings import read_otlp_settings
from lens_core.telemetry.pipeline.delivery import Outcome
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
    sink: HttpSink[JsonObject] = HttpSink(
        dataclasses.replace(settings, protocol="http/json"),
        lambda groups: to_line({"resourceSpans": list(groups)}),
    )
    with _ledger(directory, endpoint) as ledger, closing(sink):
        known = {line.decode() for line in ledger.read().splitlines()}
        groups: list[JsonObject] = []
        ids: list[str] = []

        def send() -> bool:
            if not groups:
                return True
            outcome = sink.send(groups, _TIMEOUT_S)
            if outcome is not Outcome.SENT:
                result.problems.append(f"{endpoint} did not take {len(ids)} spans: {outcome.value}")
                return False
            ledger.write("".join(f"{one}\n" for one in ids).encode())
            ledger.flush()
            os.fsync(ledger.fileno())
            result.sent += len(ids)
            groups.clear()
            ids.clear()
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
                ids.extend(fresh)
                if fresh:
                    scope = {**scope, "spans": list(fresh.values())}
                    groups.append({**group, "scopeSpans": [scope]})
                if len(ids) >= _SPANS_PER_REQUEST and not send():
                    return
        send()


@contextmanager
def _ledger(directory: Path, endpoint: str) -> Iterator[BinaryIO]:
    """The file with the ids of the spans that a receiver has, held by one process at a time."""
    name = hashlib.blake2b(endpoint.encode(), digest_size=6).hexdigest()
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
