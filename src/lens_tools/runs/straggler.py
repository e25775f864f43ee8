"""Published pipeline traces with known stragglers, to the table of a run.

Their form is that of "Understanding Stragglers in Large Model Training Using What-if Analysis"
(OSDI 2025).
A row is an operation of one rank, with times in seconds from the start of its step by the rank's
own clock. Ends of a message are not named there: the k-th send of a stage is the k-th receive of
the following one (or the preceding one, backward) in the same replica and step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lens_tools.records.read import RunError
from lens_tools.runs.schema import spans_table

__all__ = ["read_straggler_trace"]

_NEEDED: Final = (
    "dp_rank",
    "stage",
    "rank",
    "step",
    "optype",
    "start_ts",
    "duration",
    "seq_id",
    "mb_id",
    "mc",
)
_WORKS: Final = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "optimizer": "optimizer",
    "gc": "gc",
}
#: Which ranks take part in a collective: those that agree in these columns (and step, and number).
_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "grads-reduce-scatter": ("stage",),
    "params-all-gather": ("stage",),
    "embedding-grads-all-reduce": ("dp_rank",),
    "optimizer-clip-main-grad": (),
}
#: Nanoseconds between the end of a step and the start of the next, which the trace does not tell.
_BETWEEN_NS: Final = 1_000_000

_Ints = npt.NDArray[np.int64]
_Texts = npt.NDArray[Any]


def read_straggler_trace(path: Path) -> pa.Table:
    """The trace as a table of spans (:data:`lens_tools.runs.SPANS`), sorted by start.

    Steps follow each other, each from 0 on; how long it was between them is not known.

    Raises:
        RunError: If the file is no such trace.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise RunError(path, f"no Parquet file that can be read: {error}") from error
    missing = [name for name in _NEEDED if name not in table.column_names]
    if missing:
        raise RunError(path, f"no trace of pipeline operations: no column {', '.join(missing)}")
    whole = table.filter(pc.and_(pc.is_finite(table["start_ts"]), pc.is_finite(table["duration"])))
    if not whole.num_rows:
        raise RunError(path, "no operation is in it")
    return _Trace(whole).table(path.stem)


class _Trace:
    def __init__(self, table: pa.Table) -> None:
        numbers = ("dp_rank", "stage", "rank", "step", "seq_id", "mb_id", "mc")
        self.columns: dict[str, _Ints] = {
            name: np.asarray(pc.fill_null(table[name].cast(pa.int64()), -1)) for name in numbers
        }
        self.op: _Texts = np.asarray(table["optype"].cast(pa.string()).to_pylist(), dtype=object)
        start_s = np.asarray(table["start_ts"]).astype(float)
        end_s = start_s + np.asarray(table["duration"]).astype(float)
        steps, self.step_index = np.unique(self.columns["step"], return_inverse=True)
        first, last = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
        np.minimum.at(first, self.step_index, start_s)
        np.maximum.at(last, self.step_index, end_s)
        length_ns = np.rint((last - first) * 1e9).astype(np.int64) + _BETWEEN_NS
        began_ns = np.concatenate([[0], np.cumsum(length_ns)[:-1]])
        zero_ns = (began_ns - np.rint(first * 1e9).astype(np.int64))[self.step_index]
        self.start_ns = np.rint(start_s * 1e9).astype(np.int64) + zero_ns
        self.end_ns = np.rint(end_s * 1e9).astype(np.int64) + zero_ns

    def table(self, run: str) -> pa.Table:
        columns, rows = self.columns, len(self.op)
        hop, peer, links = self._messages()
        group, sequence = self._collectives()
        is_message = np.asarray([op.endswith(("-send", "-recv")) for op in self.op])
        kind = np.where(np.isin(self.op, list(_WORKS)), "compute", "collective").astype(object)
        kind[is_message] = [op[-4:] for op in self.op[is_message]]
        phase = [
            _WORKS.get(op, op[:-5] if m else op) for op, m in zip(self.op, is_message, strict=True)
        ]
        trace = {step: _digest(f"{run} {step}", 16) for step in np.unique(columns["step"]).tolist()}
        table = spans_table(
            {
                "run": [run] * rows,
                "attempt": np.zeros(rows, np.int32),
                "trace": [trace[step] for step in columns["step"].tolist()],
                "span": _span_ids(rows),
                "name": self.op,
                "phase": phase,
                "start_ns": self.start_ns,
                "end_ns": self.end_ns,
                "rank": columns["rank"],
                "dp": columns["dp_rank"],
                "stage": columns["stage"],
                "step": columns["step"],
                "microbatch": _known(columns["mb_id"]),
                "chunk": _known(columns["mc"]),
                "kind": kind,
                "group_id": group,
                "seq_in_group": _known(sequence),
                "hop_id": hop,
                "peer_rank": _known(peer),
                "links": [
                    [] if row < 0 else [trace[step] + int(row + 1).to_bytes(8, "big")]
                    for row, step in zip(links.tolist(), columns["step"].tolist(), strict=True)
                ],
                "batch_id": self._batches(is_message),
                "truncated": np.zeros(rows, bool),
            },
            rows,
        )
        return table.take(np.argsort(self.start_ns, kind="stable"))

    def _messages(self) -> tuple[_Texts, _Ints, _Ints]:
        """Of each row its hop and the rank at the other end; of a receive the row of its send."""
        columns, rows = self.columns, len(self.op)
        hop, peer = np.full(rows, None, object), np.full(rows, -1)
        links = np.full(rows, -1)
        last = columns["stage"].max()
        for way, towards in (("forward", 1), ("backward", -1)):
            places: dict[tuple[int, ...], int] = {}
            for end, offset in (("send", towards), ("recv", 0)):
                chosen = np.flatnonzero(self.op == f"{way}-{end}")
                # Those of the ends of the pipeline go nowhere.
                to = columns["stage"][chosen] + offset
                of = to - towards
                chosen = chosen[(to >= 0) & (to <= last) & (of >= 0) & (of <= last)]
                key = np.stack(
                    [
                        columns["step"][chosen],
                        columns["dp_rank"][chosen],
                        columns["stage"][chosen] + offset,
                    ]
                )
                order = np.lexsort((self.start_ns[chosen], key[2], key[1], key[0]))
                chosen, key = chosen[order], key[:, order]
                numbers = _count_within(key)
                for row, *place in zip(
                    chosen.tolist(), *key.tolist(), numbers.tolist(), strict=True
                ):
                    step, dp, to_stage, number = place
                    if end == "send":
                        places[step, dp, to_stage, number] = row
                        continue
                    sender = places.get((step, dp, to_stage, number))
                    if sender is None:
                        continue
                    a, b = int(columns["rank"][sender]), int(columns["rank"][row])
                    hop[sender] = hop[row] = f"{way}/{step}/{number}/{a}->{b}"
                    peer[sender], peer[row], links[row] = b, a, sender
        return hop, peer, links

    def _collectives(self) -> tuple[_Texts, _Ints]:
        group, sequence = np.full(len(self.op), None, object), np.full(len(self.op), -1)
        in_step = int(self.columns["seq_id"].max()) + 1
        for op, members in _GROUPS.items():
            chosen = np.flatnonzero(self.op == op)
            places = [self.columns[name][chosen].tolist() for name in members]
            named = [
                " ".join([op, *(f"{m} {v}" for m, v in zip(members, p, strict=True))])
                for p in zip(*places, strict=True)
            ]
            group[chosen] = named if members else op
            sequence[chosen] = self.step_index[chosen] * in_step + self.columns["seq_id"][chosen]
        return group, sequence

    def _batches(self, is_message: npt.NDArray[np.bool_]) -> _Texts:
        """Messages of a rank that start and end together are one batched exchange."""
        batch = np.full(len(self.op), None, object)
        chosen = np.flatnonzero(is_message)
        keys = np.stack([self.columns["rank"], self.start_ns, self.end_ns], 1)[chosen]
        _, which, count = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        which = which.ravel()
        several = count[which] > 1
        batch[chosen[several]] = [f"batch {number}" for number in which[several]]
        return batch


def _known(column: _Ints) -> pa.Array:
    return pa.array(column, mask=column < 0)


def _span_ids(rows: int) -> pa.Array:
    raw = np.arange(1, rows + 1, dtype=">u8").tobytes()
    return pa.Array.from_buffers(pa.binary(8), rows, [None, pa.py_buffer(raw)])


def _count_within(key: _Ints) -> _Ints:
    """How many columns before each are equal to it; equal ones stand together."""
    if not key.shape[1]:
        return np.zeros(0, np.int64)
    new = np.ones(key.shape[1], bool)
    new[1:] = (key[:, 1:] != key[:, :-1]).any(0)
    starts = np.flatnonzero(new)
    return np.arange(key.shape[1]) - np.repeat(starts, np.diff([*starts, key.shape[1]]))


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
