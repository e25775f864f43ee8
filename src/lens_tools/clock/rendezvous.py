"""Where two ranks were at one moment, each by its own clock: both ends of a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["LAGS", "Collectives", "Rendezvous", "collective_ends", "rendezvous"]

#: Classes of rendezvous: how much later than the other the side that waited sees the end is a
#: constant of each.
LAGS: Final = ("batched exchange", "sender came late", "receiver came late")
_BATCHED, _SENDER_LATE, _RECEIVER_LATE = range(len(LAGS))

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Distinct rendezvous between ranks ``i < j``, a row each.

    Attributes:
        ranks: The ranks whose spans are there; ``i`` and ``j`` are places in it.
        steps: Training steps (with their attempts, in order); ``step`` is a place in it.
        i: One end.
        j: The other end.
        step: When.
        start_i: Start of the operation on ``i``, by its clock, in nanoseconds; so the others.
        start_j: Start on ``j``.
        end_i: End on ``i``.
        end_j: End on ``j``.
        lag: The class, a place in :data:`LAGS`.
        sign: +1 where the lag makes ``j`` see the end later, -1 where it makes ``i``.
    """

    ranks: Ints
    steps: Ints
    i: Ints
    j: Ints
    step: Ints
    start_i: Ints
    start_j: Ints
    end_i: Ints
    end_j: Ints
    lag: Ints
    sign: Floats

    def __len__(self) -> int:
        return len(self.i)

    @property
    def ends_us(self) -> Floats:
        """End on ``j`` minus end on ``i``, in microseconds."""
        return (self.end_j - self.end_i) / 1e3

    def part(self, rows: npt.NDArray[np.bool_]) -> Rendezvous:
        """Some of them."""
        rest = (getattr(self, name)[rows] for name in self.__slots__[2:])
        return Rendezvous(self.ranks, self.steps, *rest)


@dataclass(frozen=True, slots=True)
class Collectives:
    """Ends of collectives, a row each member; ``call`` tells one collective from the next."""

    call: Ints
    rank: Ints
    step: Ints
    end_ns: Ints


def places_of(spans: pa.Table) -> tuple[Ints, Ints, Ints, Ints]:
    """The ranks, the steps, and of each span its place in both; -1 where it has none.

    A step of a later attempt is another step: its processes have been started anew.
    """
    rank = _ints(spans["rank"])
    step = _ints(spans["step"])
    attempt = np.maximum(_ints(spans["attempt"]), 0)
    valid = (rank >= 0) & (step >= 0)
    whole = np.where(valid, attempt * (step.max(initial=0) + 1) + step, -1)
    ranks, steps = np.unique(rank[valid]), np.unique(whole[valid])
    return (
        ranks,
        steps,
        np.where(valid, np.searchsorted(ranks, rank), -1),
        np.where(valid, np.searchsorted(steps, whole), -1),
    )


def rendezvous(spans: pa.Table) -> Rendezvous:
    """The distinct rendezvous of a run's messages.

    A batched exchange that is recorded as several messages with the same times is one: counted
    twice, the halves of a held-out test would leak into each other. Where a send is not a span of
    its own (the work before it is, or the moment alone), only a message for which the receiver
    waited tells the time.
    """
    ranks, steps, rank, step = places_of(spans)
    start_ns, end_ns = _ints(spans["start_ns"]), _ints(spans["end_ns"])
    kind = np.asarray(spans["kind"].cast(pa.string()).to_pylist(), dtype=object)
    usable = (rank >= 0) & ~np.asarray(spans["truncated"])
    hop = spans["hop_id"].combine_chunks().dictionary_encode()
    code = np.asarray(pc.fill_null(hop.indices, -1)).astype(np.int64)
    usable &= code >= 0
    # A retry after a restart bears the same names.
    code = np.where(usable, code * (len(steps) + 1) + step, -1)
    receives = usable & (kind == "recv")
    sender, receiver = _matched(code, usable & (kind != "recv"), receives)
    other = rank[sender] != rank[receiver]
    sender, receiver = sender[other], receiver[other]
    recorded = (kind[sender] == "send") & (end_ns[sender] > start_ns[sender])
    waited = start_ns[receiver] < end_ns[sender]
    sender, receiver = sender[recorded | waited], receiver[recorded | waited]
    recorded = (kind[sender] == "send") & (end_ns[sender] > start_ns[sender])

    swap = rank[sender] > rank[receiver]
    first, second = np.where(swap, receiver, sender), np.where(swap, sender, receiver)
    keys = np.stack(
        [
            rank[first],
            rank[second],
            start_ns[first],
            end_ns[first],
            start_ns[second],
            end_ns[second],
        ]
    )
    _, rows, times = np.unique(keys, axis=1, return_index=True, return_counts=True)
    first, second, sends_first = first[rows], second[rows], ~swap[rows]
    batched = times > 1
    first_late = start_ns[first] > start_ns[second]
    # Where sends are not recorded, the start of the work before is not that of the send.
    sender_late = (first_late == sends_first) | ~recorded[rows]
    lag = np.where(batched, _BATCHED, np.where(sender_late, _SENDER_LATE, _RECEIVER_LATE))
    sign = np.where(batched, np.where(first_late, 1.0, -1.0), np.where(sends_first, 1.0, -1.0))
    return Rendezvous(
        ranks,
        steps,
        rank[first],
        rank[second],
        step[first],
        start_ns[first],
        start_ns[second],
        end_ns[first],
        end_ns[second],
        lag,
        sign,
    )


def collective_ends(spans: pa.Table) -> Collectives:
    """The ends of the collectives that name their group and their number in it."""
    _, _, rank, step = places_of(spans)
    kind = np.asarray(spans["kind"].cast(pa.string()).to_pylist(), dtype=object)
    group = spans["group_id"].combine_chunks()
    sequence = _ints(spans["seq_in_group"])
    code = np.asarray(pc.fill_null(group.indices, -1)).astype(np.int64)
    rows = np.flatnonzero(
        (rank >= 0)
        & (kind == "collective")
        & (code >= 0)
        & (sequence >= 0)
        & ~np.asarray(spans["truncated"])
    )
    keys = np.stack([code[rows], sequence[rows], step[rows]])
    _, call = np.unique(keys, axis=1, return_inverse=True)
    return Collectives(call.ravel(), rank[rows], step[rows], _ints(spans["end_ns"])[rows])


def _matched(
    code: Ints, sends: npt.NDArray[np.bool_], receives: npt.NDArray[np.bool_]
) -> tuple[Ints, Ints]:
    """Rows of the two ends of each hop that has exactly one of both."""
    send_rows, recv_rows = np.flatnonzero(sends), np.flatnonzero(receives)
    send_codes, send_at, sent = np.unique(code[send_rows], return_index=True, return_counts=True)
    recv_codes, recv_at, received = np.unique(
        code[recv_rows], return_index=True, return_counts=True
    )
    _, a, b = np.intersect1d(send_codes, recv_codes, assume_unique=True, return_indices=True)
    once = (sent[a] == 1) & (received[b] == 1)
    return send_rows[send_at[a[once]]], recv_rows[recv_at[b[once]]]


def _ints(column: pa.ChunkedArray) -> Ints:
    return np.asarray(pc.fill_null(column, -1)).astype(np.int64)
