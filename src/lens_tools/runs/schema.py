"""The table of a run's spans: its columns, their units, and the version of both.

What a file or a cache says of its version is held against :data:`SCHEMA_VERSION`: a table of
another version is made again from the files, never guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

__all__ = ["KINDS", "PHASES", "SCHEMA_VERSION", "SPANS", "STEP_TIMES", "empty_spans", "spans_table"]

#: Grows by one with every change of a column's name, type or meaning.
SCHEMA_VERSION: Final = 1

#: What ``kind`` may say.
KINDS: Final = ("compute", "send", "recv", "collective", "other")
#: What ``phase`` says of a compute span; of a collective it is the name of the operation.
PHASES: Final = ("data", "forward", "backward", "optimizer", "checkpoint", "step", "gc", "other")

_TEXT: Final = pa.dictionary(pa.int32(), pa.string())

#: One row a span. A cell is null where nothing was recorded, never 0 in its place.
#:
#: ``run``, ``attempt``: the run's id and how often it was restarted before. ``trace`` (16 bytes),
#: ``span`` (8), ``parent`` (8; null for a root). ``start_ns``, ``end_ns``: nanoseconds since the
#: epoch by the clock of the span's own host, as recorded. ``rank``: global. ``dp``, ``stage``,
#: ``tp``: its place in the mesh. ``step``: the training iteration, a child's that of its parent.
#: ``chunk``: which of a rank's model chunks. ``group_id``, ``seq_in_group``: which operation of
#: which process group; members of one collective agree on both. ``hop_id``: alike on both ends of
#: one message. ``links``: each trace and span id, 24 bytes. ``batch_id``: alike on this rank's
#: messages of one batched exchange. ``truncated``: the end is not that of the work.
SPANS: Final = pa.schema(
    [
        ("run", _TEXT),
        ("attempt", pa.int32()),
        ("trace", pa.binary(16)),
        ("span", pa.binary(8)),
        ("parent", pa.binary(8)),
        ("name", _TEXT),
        ("phase", _TEXT),
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("rank", pa.int32()),
        ("host", _TEXT),
        ("pid", pa.int64()),
        ("dp", pa.int32()),
        ("stage", pa.int32()),
        ("tp", pa.int32()),
        ("step", pa.int64()),
        ("microbatch", pa.int32()),
        ("chunk", pa.int32()),
        ("kind", _TEXT),
        ("group_id", _TEXT),
        ("seq_in_group", pa.int64()),
        ("hop_id", pa.string()),
        ("peer_rank", pa.int32()),
        # Of no fixed size: pandas takes no lists of such.
        ("links", pa.list_(pa.binary())),
        ("batch_id", pa.string()),
        ("truncated", pa.bool_()),
    ],
    metadata={"lens.runs.schema": str(SCHEMA_VERSION)},
)

#: One row a rank, step and phase, where a step's span recorded them: nanoseconds of its own work
#: (without what it waited for others), and of those in the run queue of the CPU. The row of the
#: phase ``waiting`` holds the time waited for others.
STEP_TIMES: Final = pa.schema(
    [
        ("run", _TEXT),
        ("attempt", pa.int32()),
        ("rank", pa.int32()),
        ("step", pa.int64()),
        ("phase", _TEXT),
        ("own_ns", pa.int64()),
        ("queued_ns", pa.int64()),
    ],
    metadata={"lens.runs.schema": str(SCHEMA_VERSION)},
)


def empty_spans() -> pa.Table:
    """A table of spans without a row."""
    return SPANS.empty_table()


def spans_table(columns: Mapping[str, object], rows: int) -> pa.Table:
    """A table of spans from some of its columns; what is not there is null.

    Args:
        columns: Arrays (Arrow or NumPy) or lists, by name, all equally long.
        rows: How long.
    """
    arrays = []
    for field in SPANS:
        column = columns.get(field.name)
        if column is None:
            arrays.append(pa.nulls(rows, field.type))
        elif pa.types.is_dictionary(field.type):
            arrays.append(pa.array(column, pa.string()).dictionary_encode())
        else:
            arrays.append(pa.array(column, field.type))
    return pa.table(arrays, schema=SPANS)
