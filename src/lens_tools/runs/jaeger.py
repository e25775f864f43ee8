"""A run in a Jaeger, brought back as OTLP JSON Lines.

Its search names the traces, a page at a time; each is then fetched as OTLP, which keeps every
attribute and link as it was sent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import quote, urlencode
from urllib.request import urlopen

from lens_core.errors import LensError
from lens_core.otlp.json_spans import to_line
from lens_core.semconv import NEMO_RUN_ID
from lens_core.shared_files import file_name, write_atomically
from lens_core.telemetry.export.endpoints import shown_endpoint

__all__ = ["JaegerError", "import_from_jaeger"]

_PAGE_TRACES: Final = 20
_TIMEOUT_S: Final = 60.0
#: Traces that start closer together than this are not told apart by time.
_SHORTEST_US: Final = 1_000
_DAY_US: Final = 86_400_000_000


class JaegerError(LensError, RuntimeError):
    """A Jaeger that does not answer as one, or does not know the run."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{shown_endpoint(url)}: {problem}")
        self.url = url
        self.problem = problem


def import_from_jaeger(url: str, run_id: str, directory: Path) -> tuple[Path, int]:
    """Write the traces of a run to a file of OTLP JSON Lines.

    Args:
        url: Base URL of Jaeger's query service, such as ``http://127.0.0.1:16686``.
        run_id: The run's id, as its processes have it in ``nemo.run.id``.
        directory: The run's directory; made where it is not there.

    Returns:
        The file, and how many traces it holds.

    Raises:
        JaegerError: If nothing answers there, or no trace of the run is there.
        OSError: The file cannot be written.
    """
    base = url.rstrip("/")
    ids = sorted(set(_trace_ids(base, run_id)))
    if not ids:
        raise JaegerError(url, f"no trace with {NEMO_RUN_ID}={run_id!r} is there")
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"jaeger-{file_name(run_id)}.jsonl"
    write_atomically(target, (line for trace in ids for line in _trace(base, trace)))
    return target, len(ids)


def _trace_ids(base: str, run_id: str) -> Iterator[str]:
    until_us = time.time_ns() // 1000 + _DAY_US
    for service in _fetch(base, "/api/services").get("data") or ():
        yield from _between(base, str(service), run_id, 0, until_us)


def _between(base: str, service: str, run_id: str, from_us: int, to_us: int) -> Iterator[str]:
    """Ids of the traces with a span in a time; where they fill a page, of its halves.

    Each half of a page again: a trace that is long is found in both.
    """
    limit = _PAGE_TRACES
    while True:
        query = {
            "service": service,
            "tags": json.dumps({NEMO_RUN_ID: run_id}),
            "start": from_us,
            "end": to_us,
            "limit": limit,
        }
        found = _fetch(base, f"/api/traces?{urlencode(query)}").get("data") or ()
        yield from (str(trace["traceID"]) for trace in found)
        if len(found) < limit:
            return
        if to_us - from_us > _SHORTEST_US:
            break
        limit *= 4
    # Where those that were found are, not in the middle of fifty years.
    starts = sorted(int(span["startTime"]) for trace in found for span in trace["spans"][:1])
    middle = starts[len(starts) // 2]
    if not from_us < middle < to_us:
        middle = (from_us + to_us) // 2
    yield from _between(base, service, run_id, from_us, middle)
    yield from _between(base, service, run_id, middle, to_us)


def _trace(base: str, trace_id: str) -> Iterator[bytes]:
    """A trace as lines: the service answers in one message, or in several one after the other."""
    path = f"/api/v3/traces/{quote(trace_id)}"
    text, decoder, at = _read(base, path).strip(), json.JSONDecoder(), 0
    while at < len(text):
        try:
            found, at = decoder.raw_decode(text, at)
            yield to_line(found["result"])
        except (ValueError, KeyError, TypeError) as error:
            raise JaegerError(base + path, f"the answer is no trace: {error}") from error
        while text[at : at + 1].isspace():
            at += 1


def _fetch(base: str, path: str) -> dict[str, Any]:
    try:
        found = json.loads(_read(base, path))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise JaegerError(base, "the answer is not that of Jaeger's query service")
    return found


def _read(base: str, path: str) -> str:
    try:
        with urlopen(base + path, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except HTTPError as error:
        raise JaegerError(base, f"{error.code} for {path.partition('?')[0]}") from error
    except (OSError, ValueError) as error:
        raise JaegerError(base, f"{error}; is that the URL of the query service?") from error
