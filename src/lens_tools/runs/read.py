"""The spans of a run, read from its OTLP JSON Lines files.

Reads what :mod:`lens_core.telemetry` writes and what the OpenTelemetry Collector's file exporter
writes: one ``{"resourceSpans": [...]}`` object per line. A line that a killed process left
unfinished, or that is not OTLP, is reported and passed over; the rest is read.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

from opentelemetry.util.types import AttributeValue

from lens_core.errors import LensError
from lens_core.diagnostics import describe
from lens_core.semconv import NEMO_SPAN_TRUNCATED, NV_DL_RANK

__all__ = ["EventRecord", "LinkRecord", "Run", "RunError", "SpanRecord", "read_run", "run_files"]

_HEX_DIGITS: Final = frozenset("0123456789abcdef")
#: Largest line that is read: the Collector's file exporter writes a batch per line.
_MAX_LINE_BYTES: Final = 256 * 1024 * 1024


class RunError(LensError, ValueError):
    """A directory that holds no run."""

    def __init__(self, directory: Path, problem: str) -> None:
        super().__init__(f"{directory}: {problem}")
        self.directory = directory
        self.problem = problem


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """A link of a span: the ids of what it points at, in hex, and its attributes."""

    trace_id: str
    span_id: str
    attributes: Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event of a span; ``time_ns`` is nanoseconds since the epoch, by the process's clock."""

    name: str
    time_ns: int
    attributes: Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span of a run.

    Attributes:
        trace_id: 32 hex digits.
        span_id: 16 hex digits.
        parent_span_id: 16 hex digits; empty for a root.
        name: Name of the span.
        kind: OTLP number: 1 internal, 2 server, 3 client, 4 producer, 5 consumer.
        start_ns: Start, in nanoseconds since the epoch by the clock of its process.
        end_ns: End, likewise.
        status_code: OTLP number: 0 unset, 1 ok, 2 error.
        status_message: Description of an error; empty where there is none.
        attributes: Attributes of the span.
        links: Links, in order.
        events: Events, in order.
        resource: Attributes of the process.
        scope: Name of the instrumentation scope.
        source: File that it was read from.
    """

    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    status_code: int
    status_message: str
    attributes: Mapping[str, AttributeValue]
    links: Sequence[LinkRecord]
    events: Sequence[EventRecord]
    resource: Mapping[str, AttributeValue]
    scope: str
    source: Path

    @property
    def key(self) -> tuple[str, str]:
        """What identifies the span: its trace id and span id."""
        return self.trace_id, self.span_id

    @property
    def rank(self) -> int | None:
        """Global rank of the process, where it has one."""
        rank = self.resource.get(NV_DL_RANK)
        return rank if isinstance(rank, int) else None

    @property
    def truncated(self) -> bool:
        """Whether the span was ended by lens rather than by its code: its duration is not real."""
        return self.attributes.get(NEMO_SPAN_TRUNCATED) is True


@dataclass(frozen=True, slots=True)
class Run:
    """What the files of a run hold.

    Attributes:
        directory: Where they are.
        files: The files that were read, sorted.
        spans: Every span once, by start time. A span that stands in several files or lines (a
            batch that was sent again) is kept once.
        problems: One line per piece that could not be read: ``"file:line: what is wrong"``.
        repeated: How many further copies of spans were passed over.
    """

    directory: Path
    files: Sequence[Path]
    spans: Sequence[SpanRecord]
    problems: Sequence[str] = field(default_factory=tuple)
    repeated: int = 0


def run_files(directory: str | os.PathLike[str]) -> list[Path]:
    """The ``.jsonl`` files below a directory, sorted.

    Raises:
        RunError: If there is no such directory, or no such file below it.
    """
    root = Path(directory)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise RunError(root, "there is no such directory")
    files = sorted(path for path in root.rglob("*.jsonl") if path.is_file())
    if not files:
        raise RunError(root, "no .jsonl file is in it or below it; was anything exported there?")
    return files


def read_run(directory: str | os.PathLike[str]) -> Run:
    """The run in a directory, or in a single file.

    Raises:
        RunError: If nothing there can be a run.
    """
    files = run_files(directory)
    problems: list[str] = []
    spans: dict[tuple[str, str], SpanRecord] = {}
    repeated = 0
    for path in files:
        for span in _read_file(path, problems):
            known = spans.get(span.key)
            if known is None:
                spans[span.key] = span
            else:
                repeated += 1
                # The same span ended by its own code is truer than the one lens ended for it.
                if known.truncated and not span.truncated:
                    spans[span.key] = span
    ordered = sorted(spans.values(), key=lambda span: (span.start_ns, span.span_id))
    return Run(Path(directory), files, ordered, problems, repeated)


def _read_file(path: Path, problems: list[str]) -> Iterator[SpanRecord]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(_MAX_LINE_BYTES), b""), 1):
                if not line.strip():
                    continue
                try:
                    yield from _read_line(line, path)
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                    torn = "" if line.endswith(b"\n") else " (unfinished: the writer was killed)"
                    problems.append(f"{path}:{number}: {_describe(error)}{torn}")
    except OSError as error:
        problems.append(f"{path}: {error.strerror or error}")


def _describe(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos}"
    return f"not OTLP: {describe(error)}"


def _read_line(line: bytes, path: Path) -> list[SpanRecord]:
    # All spans of a line or none: a line that is wrong somewhere is wrong as a whole.
    message = json.loads(line)
    if not isinstance(message, dict):
        raise TypeError(f"expected an object, got {type(message).__name__}")
    spans = []
    for resource_spans in message.get("resourceSpans", ()):
        resource = _attributes(resource_spans.get("resource", {}).get("attributes", ()))
        for scope_spans in resource_spans.get("scopeSpans", ()):
            scope = str(scope_spans.get("scope", {}).get("name", ""))
            for span in scope_spans.get("spans", ()):
                spans.append(_span(span, resource, scope, path))
    return spans


def _span(
    span: Mapping[str, object],
    resource: Mapping[str, AttributeValue],
    scope: str,
    path: Path,
) -> SpanRecord:
    status = _mapping(span.get("status", {}))
    return SpanRecord(
        trace_id=_hex(span["traceId"], 32),
        span_id=_hex(span["spanId"], 16),
        parent_span_id=_hex(span["parentSpanId"], 16) if span.get("parentSpanId") else "",
        name=str(span.get("name", "")),
        kind=_integer(span.get("kind", 0)),
        start_ns=_integer(span.get("startTimeUnixNano", 0)),
        end_ns=_integer(span.get("endTimeUnixNano", 0)),
        status_code=_integer(status.get("code", 0)),
        status_message=str(status.get("message", "")),
        attributes=_attributes(span.get("attributes", ())),
        links=tuple(
            LinkRecord(
                _hex(link["traceId"], 32),
                _hex(link["spanId"], 16),
                _attributes(link.get("attributes", ())),
            )
            for link in map(_mapping, _items(span.get("links", ())))
        ),
        events=tuple(
            EventRecord(
                str(event.get("name", "")),
                _integer(event.get("timeUnixNano", 0)),
                _attributes(event.get("attributes", ())),
            )
            for event in map(_mapping, _items(span.get("events", ())))
        ),
        resource=resource,
        scope=scope,
        source=path,
    )


def _attributes(pairs: object) -> dict[str, AttributeValue]:
    return {
        str(pair["key"]): _value(_mapping(pair.get("value", {})))
        for pair in map(_mapping, _items(pairs))
    }


def _value(value: Mapping[str, object]) -> AttributeValue:
    if "stringValue" in value:
        return str(value["stringValue"])
    if "intValue" in value:
        return _integer(value["intValue"])
    if "boolValue" in value:
        return bool(value["boolValue"])
    if "doubleValue" in value:
        # Also "NaN", "Infinity" and "-Infinity", as the protobuf JSON mapping writes them.
        return float(str(value["doubleValue"]))
    if "bytesValue" in value:
        return base64.b64decode(str(value["bytesValue"])).decode("utf-8", "backslashreplace")
    if "arrayValue" in value:
        return _array(_items(_mapping(value["arrayValue"]).get("values", ())))
    if "kvlistValue" in value:
        return json.dumps(
            _attributes(_mapping(value["kvlistValue"]).get("values", ())), default=str
        )
    return ""


def _array(items: Iterable[object]) -> AttributeValue:
    values = [_value(_mapping(item)) for item in items]
    # An attribute is a sequence of one scalar type; anything else is shown as text.
    if all(isinstance(value, str) for value in values):
        return cast("list[str]", values)
    if all(isinstance(value, bool) for value in values):
        return cast("list[bool]", values)
    if all(isinstance(value, int) for value in values):
        return cast("list[int]", values)
    if all(isinstance(value, float) for value in values):
        return cast("list[float]", values)
    return [str(value) for value in values]


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {type(value).__name__}")
    return value


def _items(value: object) -> Iterable[object]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"expected an array, got {type(value).__name__}")
    return value


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"expected an integer, got {value!r}")
    return int(value)


def _hex(value: object, digits: int) -> str:
    text = str(value).lower()
    # By its digits: int() also takes "0x", signs, underscores and the digits of other scripts.
    if len(text) != digits or not _HEX_DIGITS.issuperset(text) or not text.strip("0"):
        raise ValueError(f"{text!r} is not an id of {digits} hex digits")
    return text
