"""``lens ship``: sends a run's files, and what its dead processes left, to a collector, once.

A process that could not reach the collector, or was killed before it did, leaves its spans in the
directory of the run or in its journal. This sends them later. Which spans were sent to a receiver
is written beside the files, by span id, so that a second run sends nothing, and one that was
interrupted goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, cast

import click

from lens_core.journal.location import search
from lens_core.journal.recover.recovery import DirectorySink, recover
from lens_core.otlp.json_spans import JsonObject, to_line
from lens_core.telemetry.export.http_sink import HttpSink
from lens_core.telemetry.export.otlp_settings import read_otlp_settings
from lens_core.telemetry.pipeline.delivery import Outcome
from lens_tools.options import otlp_option
from lens_tools.runs.read import RunError, run_files

__all__ = ["Shipped", "ship", "ship_run"]

_SPANS_PER_REQUEST: Final = 512
_TIMEOUT_S: Final = 30.0


@dataclass(slots=True)
class Shipped:
    """What :func:`ship_run` did.

    Attributes:
        sent: Spans that were sent now.
        known: Spans that had been sent before.
        recovered: Spans of dead processes that were turned into files first.
        problems: One line per piece that could not be read or sent.
        notes: One line per directory of journals that could not be looked into from here.
    """

    sent: int = 0
    known: int = 0
    recovered: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def ship_run(directory: Path, endpoint: str) -> Shipped:
    """Send all spans of a run's directory that this receiver has not got yet.

    Journals of processes of the run that have died are recovered into the directory first. If this
    is killed between a request and the note of it, the spans of that request, 512 at most, are
    sent again by the next; their ids are the same.

    Args:
        directory: The directory of the run.
        endpoint: Base URL of an OTLP/HTTP receiver that takes JSON.

    Raises:
        RunError: If there is no such directory, or no telemetry in it.
    """
    result = Shipped()
    searched = search(str(directory))
    recovered = recover(
        searched.directories, lambda meta: DirectorySink(directory), remove_emptied=True
    )
    result.notes += searched.notes
    result.recovered = recovered.ended + recovered.truncated
    result.problems += recovered.problems
    settings = read_otlp_settings("traces", endpoint=endpoint)
    sink: HttpSink[JsonObject] = HttpSink(
        dataclasses.replace(settings, protocol="http/json"),
        lambda groups: to_line({"resourceSpans": list(groups)}),
    )
    files = run_files(directory)
    with _ledger(directory, endpoint) as ledger:
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

        try:
            for group in _groups(files, result.problems):
                kept, fresh = _without(group, known, result)
                groups.extend(kept)
                ids.extend(fresh)
                if len(ids) >= _SPANS_PER_REQUEST and not send():
                    return result
            send()
        finally:
            sink.close()
    return result


@contextmanager
def _ledger(directory: Path, endpoint: str) -> Iterator[BinaryIO]:
    """The file with the ids of the spans that a receiver has, held by one process at a time."""
    name = hashlib.blake2b(endpoint.encode(), digest_size=6).hexdigest()
    with (directory / f".shipped-{name}.ids").open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


def _groups(files: list[Path], problems: list[str]) -> Iterator[JsonObject]:
    """The elements of ``resourceSpans`` of all whole lines."""
    for path in files:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    continue  # still being written, or torn when its process was killed
                try:
                    groups = _checked(json.loads(line))
                except (ValueError, RecursionError) as error:
                    problems.append(f"{path}:{number}: {error}")
                    continue
                yield from groups


def _checked(message: object) -> list[JsonObject]:
    """The groups of a line of OTLP JSON; a line of another form must not stop the others.

    Raises:
        ValueError: it is not of that form.
    """
    groups = _objects(_object(message), "resourceSpans")
    for group in groups:
        for scope in _objects(group, "scopeSpans"):
            for span in _objects(scope, "spans"):
                if not isinstance(span.get("traceId"), str) or not isinstance(
                    span.get("spanId"), str
                ):
                    raise ValueError("a span has no id")
    return groups


def _objects(parent: JsonObject, name: str) -> list[JsonObject]:
    items = parent.get(name, [])
    if not isinstance(items, list):
        raise ValueError(f"{name} is no list")
    return [_object(item) for item in items]


def _object(value: object) -> JsonObject:
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} is no object of OTLP")
    return cast("JsonObject", value)


def _without(
    group: JsonObject, known: set[str], result: Shipped
) -> tuple[list[JsonObject], list[str]]:
    """What of a group is not known yet, and the ids of that; they are known from now on."""
    fresh: list[str] = []
    scopes = []
    for scope in cast("list[JsonObject]", group.get("scopeSpans", ())):
        spans = []
        for span in cast("list[JsonObject]", scope.get("spans", ())):
            one = f"{span.get('traceId')}{span.get('spanId')}"
            if one in known:
                result.known += 1
                continue
            known.add(one)
            fresh.append(one)
            spans.append(span)
        if spans:
            scopes.append({**scope, "spans": spans})
    return ([{**group, "scopeSpans": scopes}] if scopes else []), fresh


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
@otlp_option("OTLP/HTTP receiver, if not the configured one.")
def ship(directory: Path, otlp: str | None) -> None:
    """Send the spans of a run's directory to a collector, each once.

    DIR is the directory of a run. Journals of its processes that were killed are recovered first.
    Running it again sends what has come since.

    Exit status: 1 if something could not be read or sent, 2 if DIR holds no run.
    """
    endpoint = otlp or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    try:
        result = ship_run(directory, endpoint)
    except RunError as error:
        click.echo(f"lens: {error}", err=True)
        sys.exit(2)
    click.echo(
        f"sent {result.sent} spans to {endpoint}; {result.known} had been sent before, "
        f"{result.recovered} came from journals of processes that were killed"
    )
    for problem in [*result.notes, *result.problems]:
        click.echo(problem, err=True)
    sys.exit(1 if result.problems else 0)
