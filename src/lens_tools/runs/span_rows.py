"""From the spans of OTLP messages to rows of the table."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from lens_core.otlp.json_spans import JsonObject
from lens_core.semconv import (
    DL_DATA_PARALLEL_RANK,
    DL_ITERATION,
    DL_MICROBATCH_ID,
    DL_PIPELINE_PARALLEL_RANK,
    DL_TENSOR_PARALLEL_RANK,
    HOST_NAME,
    LENS_BATCH_ID,
    LENS_CHUNK,
    LENS_GROUP,
    LENS_HOP_DIRECTION,
    LENS_HOP_ID,
    LENS_MICROBATCH,
    LENS_OP,
    LENS_PEER_RANK,
    LENS_SEQUENCE,
    LENS_STAGE,
    LENS_STEP_OWN,
    LENS_STEP_QUEUED,
    NEMO_RUN_ATTEMPT,
    NEMO_RUN_ID,
    NEMO_SPAN_TRUNCATED,
    NV_DL_RANK,
    PROCESS_PID,
)
from lens_tools.runs.kinds import kind_and_phase
from lens_tools.runs.schema import SPANS, STEP_TIMES, spans_table

__all__ = ["SpanRows"]

_INT64: Final = range(-(2**63), 2**63)
_INT32: Final = range(-(2**31), 2**31)

#: Attribute to column, of numbers; a span's own attribute goes before that of its process.
_NUMBERS: Final[Mapping[str, str]] = {
    NEMO_RUN_ATTEMPT: "attempt",
    NV_DL_RANK: "rank",
    PROCESS_PID: "pid",
    DL_DATA_PARALLEL_RANK: "dp",
    DL_PIPELINE_PARALLEL_RANK: "stage",
    LENS_STAGE: "stage",
    DL_TENSOR_PARALLEL_RANK: "tp",
    DL_ITERATION: "step",
    DL_MICROBATCH_ID: "microbatch",
    LENS_MICROBATCH: "microbatch",
    LENS_CHUNK: "chunk",
    LENS_SEQUENCE: "seq_in_group",
    LENS_PEER_RANK: "peer_rank",
}
_TEXTS: Final[Mapping[str, str]] = {
    NEMO_RUN_ID: "run",
    HOST_NAME: "host",
    LENS_GROUP: "group_id",
    LENS_HOP_ID: "hop_id",
    LENS_BATCH_ID: "batch_id",
}
_COLUMNS: Final = {**_NUMBERS, **_TEXTS}
_FILLED: Final = tuple(dict.fromkeys(_COLUMNS.values()))
_DAMAGED: Final = (ValueError, TypeError, KeyError, AttributeError, OverflowError, StopIteration)
_OTHERS: Final = frozenset({LENS_OP, LENS_HOP_DIRECTION, NEMO_SPAN_TRUNCATED})
_WIDE: Final = frozenset({"pid", "step", "seq_in_group"})


class SpanRows:
    """Rows of the table, column by column, until they are taken away as one.

    Attributes:
        counts: What was damaged, by kind.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._kinds: dict[tuple[str, object, object], tuple[str, str]] = {}
        self._clear()

    def _clear(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in SPANS.names}
        self._times: dict[str, list[Any]] = {name: [] for name in STEP_TIMES.names}

    def __len__(self) -> int:
        return len(self._columns["span"])

    def take(self) -> tuple[pa.Table, pa.Table]:
        """The spans and the step times since the last call."""
        spans = spans_table(self._columns, len(self))
        times = pa.table(
            [
                pa.array(self._times[f.name], pa.string()).dictionary_encode()
                if pa.types.is_dictionary(f.type)
                else pa.array(self._times[f.name], f.type)
                for f in STEP_TIMES
            ],
            schema=STEP_TIMES,
        )
        self._clear()
        return spans, times

    def add(self, message: JsonObject) -> None:
        """Add the spans of a message; what is damaged in it is counted, and the rest kept."""
        groups = message.get("resourceSpans")
        if groups is None:
            if not {"resourceMetrics", "resourceLogs"} & message.keys():
                self.counts["messages that are no OTLP"] += bool(message)
            return
        for group in _list(groups):
            if not isinstance(group, dict):
                self.counts["damaged resource groups"] += 1
                continue
            resource = group.get("resource")
            process = self._values(resource.get("attributes") if isinstance(resource, dict) else ())
            for scope in _list(group.get("scopeSpans")):
                if not isinstance(scope, dict):
                    self.counts["damaged scope groups"] += 1
                    continue
                for span in _list(scope.get("spans")):
                    try:
                        self._add(span, process)
                    except _DAMAGED:
                        self.counts["damaged spans"] += 1

    def _values(self, attributes: object) -> dict[str, Any]:
        """The attributes that the table knows, by column, and the others it needs by name."""
        found: dict[str, Any] = {}
        if not attributes:
            return found
        for pair in _list(attributes):
            try:
                key = pair["key"]
                column = _COLUMNS.get(key)
                if column is None:
                    if key in _OTHERS or key.startswith((LENS_STEP_OWN, LENS_STEP_QUEUED)):
                        found[key] = next(iter(pair["value"].values()))
                    continue
                value = next(iter(pair["value"].values()))
                if key in _NUMBERS:
                    value = int(value)
                    if value not in (_INT64 if column in _WIDE else _INT32):
                        raise ValueError(value)
                else:
                    value = _encodable(value)
                found[column] = value
            except _DAMAGED:
                self.counts["damaged attributes"] += 1
        return found

    def _add(self, span: Any, process: Mapping[str, Any]) -> None:
        trace, span_id = _id(span["traceId"], 16), _id(span["spanId"], 8)
        parent = span.get("parentSpanId")
        parent = _id(parent, 8) if parent else None
        start_ns, end_ns = int(span["startTimeUnixNano"]), int(span.get("endTimeUnixNano") or 0)
        if start_ns not in _INT64 or end_ns not in _INT64:
            raise ValueError("a time outside of 64 bits")
        links = [
            _id(link["traceId"], 16) + _id(link["spanId"], 8) for link in span.get("links") or ()
        ]
        own = self._values(span.get("attributes"))
        name = _encodable(span.get("name", ""))
        truncated = own.get(NEMO_SPAN_TRUNCATED) is True
        if end_ns < start_ns:
            self.counts["spans that end before they start" if end_ns else "spans without end"] += 1
            end_ns, truncated = max(end_ns, start_ns), True
        told = own.get(LENS_OP), own.get(LENS_HOP_DIRECTION)
        op, direction = (item if type(item) is str else None for item in told)
        kind = self._kinds.get((name, op, direction))
        if kind is None:
            kind = self._kinds[name, op, direction] = kind_and_phase(name, op, direction)
        columns = self._columns
        row = {**process, **own}
        for column in _FILLED:
            columns[column].append(row.get(column))
        columns["trace"].append(trace)
        columns["span"].append(span_id)
        columns["parent"].append(parent)
        columns["name"].append(name)
        columns["phase"].append(kind[1])
        columns["kind"].append(kind[0])
        columns["start_ns"].append(start_ns)
        columns["end_ns"].append(end_ns)
        columns["links"].append(links)
        columns["truncated"].append(truncated)
        if kind[1] == "step":
            self._add_times(row)

    def _add_times(self, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            if not key.startswith(LENS_STEP_OWN):
                continue
            phase = key[len(LENS_STEP_OWN) :]
            try:
                own_ns, queued_ns = int(value), int(row.get(LENS_STEP_QUEUED + phase, 0))
            except _DAMAGED:
                self.counts["damaged attributes"] += 1
                continue
            values = {**row, "phase": phase, "own_ns": own_ns, "queued_ns": queued_ns}
            for name, column in self._times.items():
                column.append(values.get(name))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _encodable(text: object) -> str:
    text = str(text)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _id(text: Any, size: int) -> bytes:
    """An id in hex, or in base64 as the Protobuf JSON mapping would have it."""
    if len(text) == 2 * size:
        found = bytes.fromhex(text)
    else:
        try:
            found = b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(text) from error
    if len(found) != size or not any(found):
        raise ValueError(text)
    return found
