"""The spans of many files put together: each once, by start time, with the step of its parent."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lens_tools.runs.run_table import ReadingReport
from lens_tools.runs.schema import SPANS

__all__ = ["assemble"]

_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
#: Below a step, spans are nested a few deep.
_DEEPEST: Final = 16

_Keys = npt.NDArray[np.uint64]


def assemble(tables: list[pa.Table], reading: ReadingReport, run_id: str | None) -> pa.Table:
    """The spans of one run in one table; what is odd about them is counted.

    Args:
        tables: Spans of each file; emptied, so that no two copies of a run are in memory.
        reading: Gets what was found.
        run_id: The run; ``None`` for that with most spans.
    """
    whole = pa.concat_tables(tables) if tables else SPANS.empty_table()
    tables.clear()
    whole = whole.unify_dictionaries()
    counts = pc.value_counts(whole["run"].cast(pa.string())).to_pylist()
    reading.runs = {str(c["values"] or ""): c["counts"] for c in counts}
    if run_id is not None or len(reading.runs) > 1:
        chosen = run_id if run_id is not None else max(reading.runs, key=reading.runs.__getitem__)
        mask = pc.equal(pc.fill_null(whole["run"].cast(pa.string()), ""), chosen)
        reading.found("spans of other runs", whole.num_rows - (pc.sum(mask).as_py() or 0))
        whole = whole.filter(mask)
    if not whole.num_rows:
        return whole
    keys = _keys(whole, "span")
    order = _each_once(whole, keys, reading)
    columns = []
    for name in whole.column_names:
        columns.append(whole[name].combine_chunks().take(order))
        whole = whole.drop_columns(name)  # one column twice in memory, not all
        pa.default_memory_pool().release_unused()
    table = pa.table(columns, schema=SPANS)
    index = _Index(keys[order])
    table = _with_steps(table, index)
    table = _with_hops(table, index)
    _count(table, index, reading)
    return table


def _bytes(
    column: pa.ChunkedArray, size: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """The bytes of a column of fixed size, a row each, and which rows are not null."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0)
    raw = np.frombuffer(array.buffers()[1], np.uint8)
    rows = raw[array.offset * size : (array.offset + len(array)) * size].reshape(-1, size)
    return rows, np.asarray(array.is_valid())


def _keys(table: pa.Table, column: str) -> _Keys:
    """A number for each span's (or parent's) trace and span id; 0 where there is none."""
    trace, _ = _bytes(table["trace"], 16)
    span, valid = _bytes(table[column], 8)
    return np.where(valid, _mixed(trace, span), np.uint64(0))


def _mixed(trace: npt.NDArray[np.uint8], span: npt.NDArray[np.uint8]) -> _Keys:
    halves = np.ascontiguousarray(trace).view(np.uint64)
    mixed = (halves[:, 0] * _ODD) ^ (halves[:, 1] + (halves[:, 0] >> np.uint64(29)))
    return np.asarray(mixed * _ODD ^ np.ascontiguousarray(span).view(np.uint64)[:, 0])


def _each_once(table: pa.Table, keys: _Keys, reading: ReadingReport) -> npt.NDArray[np.int64]:
    """Rows by start time, each span once: ended by its own code rather than by lens."""
    truncated = np.asarray(table["truncated"])
    order = np.lexsort((truncated, keys))
    first = np.ones(len(order), bool)
    first[1:] = keys[order[1:]] != keys[order[:-1]]
    reading.found("repeated spans", int(len(order) - first.sum()))
    rows = order[first]
    start_ns = np.asarray(table["start_ns"])[rows]
    return np.asarray(rows[np.argsort(start_ns, kind="stable")])


class _Index:
    """Finds spans by their keys."""

    def __init__(self, keys: _Keys) -> None:
        self._order = np.argsort(keys)
        self._sorted = keys[self._order]

    def rows(self, wanted: _Keys) -> npt.NDArray[np.int64]:
        """The row of each wanted key, or -1."""
        # Sorted look-ups stay in the processor's cache: five times as quick as those of random ids.
        distinct, which = np.unique(wanted, return_inverse=True)
        at = np.minimum(np.searchsorted(self._sorted, distinct), len(self._sorted) - 1)
        found = (self._sorted[at] == distinct) & (distinct != 0)
        return np.where(found, self._order[at], -1)[which]


def _with_steps(table: pa.Table, index: _Index) -> pa.Table:
    """A span that names no step is in that of its parent."""
    parent = index.rows(_keys(table, "parent"))
    step = np.asarray(pc.fill_null(table["step"], -1))
    has_parent = parent >= 0
    for _ in range(_DEEPEST):
        inherited = np.where((step < 0) & has_parent, step[parent], step)
        if (inherited == step).all():
            break
        step = inherited
    column = pa.array(step, mask=step < 0)
    return table.set_column(table.schema.get_field_index("step"), SPANS.field("step"), column)


def _with_hops(table: pa.Table, index: _Index) -> pa.Table:
    """A receive and the one send that it links to, where neither names its hop, are one hop.

    Its name is made of the sender's ids; each end learns the rank of the other.
    """
    nameless = np.asarray(table["hop_id"].is_null())
    kind = table["kind"].cast(pa.string())
    links = table["links"].combine_chunks()
    linked_once = np.asarray(pc.equal(pc.list_value_length(links), 1))
    receivers = np.flatnonzero(np.asarray(pc.equal(kind, "recv")) & nameless & linked_once)
    if not len(receivers):
        return table
    raw, _ = _bytes(
        pa.chunked_array([pc.list_flatten(links.take(receivers)).cast(pa.binary(24))]), 24
    )
    senders = index.rows(_mixed(raw[:, :16], raw[:, 16:]))
    sends = np.asarray(pc.equal(kind, "send")) & nameless
    _, first, times = np.unique(senders, return_inverse=True, return_counts=True)
    one = (senders >= 0) & sends[senders] & (times[first] == 1)
    receivers, senders = receivers[one], senders[one]
    names = [f"{ids[:16].tobytes().hex()}/{ids[16:].tobytes().hex()}" for ids in raw[one]]
    rows = np.concatenate([receivers, senders])
    order = np.argsort(rows)
    mask = np.zeros(table.num_rows, bool)
    mask[rows] = True
    hops = pa.array(names + names, pa.string()).take(order)
    peers = table["rank"].take(np.concatenate([senders, receivers])[order]).combine_chunks()
    for name, replacement in (("hop_id", hops), ("peer_rank", peers)):
        column = pc.replace_with_mask(table[name].combine_chunks(), mask, replacement)
        table = table.set_column(table.schema.get_field_index(name), SPANS.field(name), column)
    return table


def _count(table: pa.Table, index: _Index, reading: ReadingReport) -> None:
    links = table["links"].combine_chunks()
    flat = pc.list_flatten(links)
    if len(flat):
        raw, _ = _bytes(pa.chunked_array([flat.cast(pa.binary(24))]), 24)
        missing = index.rows(_mixed(raw[:, :16], raw[:, 16:])) < 0
        reading.found("links to spans that are not there", int(missing.sum()))
    reading.found("spans without rank", table["rank"].null_count)
    reading.found("spans without step", table["step"].null_count)
    reading.found("truncated spans", pc.sum(table["truncated"]).as_py() or 0)
