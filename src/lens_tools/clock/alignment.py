"""A run's clocks aligned: an offset for each rank and window, with what it is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from lens_tools.clock.chains import join_chains
from lens_tools.clock.fitting import components, fit
from lens_tools.clock.rendezvous import (
    LAGS,
    Floats,
    Ints,
    Rendezvous,
    collective_ends,
    places_of,
    rendezvous,
)
from lens_tools.clock.windows import choose_windows, rows_of
from lens_tools.runs.run_table import Run

__all__ = ["CLOCK", "Clock", "align"]

#: One row a rank and window. ``t_from_ns`` (included), ``t_to_ns``: by the rank's own clock.
#: ``offset_ns``: how far it is ahead of the mean of its group; ``sigma_ns``: one standard error;
#: both null where no message tells. ``lo_ns``, ``hi_ns``: outside of these a message would have
#: arrived before it was sent. ``group``: offsets of one group can be compared, those of two cannot.
CLOCK: Final = pa.schema(
    [
        ("rank", pa.int32()),
        ("window", pa.int32()),
        ("t_from_ns", pa.int64()),
        ("t_to_ns", pa.int64()),
        ("offset_ns", pa.int64()),
        ("sigma_ns", pa.int64()),
        ("lo_ns", pa.int64()),
        ("hi_ns", pa.int64()),
        ("group", pa.int32()),
    ],
    metadata={"lens.clock.schema": "1"},
)
_LAGS: Final = pa.schema([("class", pa.string()), ("lag_ns", pa.int64())])
#: The standard error of the fit is that of independent noise, which it is not quite.
_WIDER: Final = 1.5
#: What two hosts' clocks differ by from message to message, however many there are.
_BETWEEN_HOSTS_US: Final = 15.0
_FOR_EVER: Final = 2**62


@dataclass(frozen=True, slots=True)
class Clock:
    """The clocks of a run's ranks.

    Attributes:
        table: Offsets by rank and window: :data:`CLOCK`.
        lags: How much later the side that waited sees the end, by class.
        rendezvous: Distinct meetings of two ranks that it rests on.
        window_steps: Mean length of a window, in steps.
        early_before: Share of the rendezvous that end on one side before they start on the other,
            by the clocks as recorded.
        early_after: The same when aligned.
        problems: What could not be aligned, and why.
    """

    table: pa.Table
    lags: pa.Table
    rendezvous: int
    window_steps: float
    early_before: float
    early_after: float
    problems: tuple[str, ...]

    @property
    def groups(self) -> list[list[int]]:
        """Ranks whose times can be compared, a list each group."""
        found: dict[int, set[int]] = {}
        for rank, group in zip(
            self.table["rank"].to_pylist(), self.table["group"].to_pylist(), strict=True
        ):
            found.setdefault(group, set()).add(rank)
        return sorted(sorted(ranks) for ranks in found.values())

    def apply(self, spans: pa.Table) -> pa.Table:
        """The spans with ``start_ns`` and ``end_ns`` by the one clock, in the order they were in.

        What belongs to no rank, or to one that could not be aligned, keeps its times.
        """
        rank = np.asarray(spans["rank"].fill_null(-1))
        start_ns = np.asarray(spans["start_ns"])
        shift = np.zeros(len(start_ns), np.int64)
        table = {name: np.asarray(self.table[name].fill_null(0)) for name in CLOCK.names}
        for one in np.unique(table["rank"]):
            of_rank = np.flatnonzero(table["rank"] == one)
            rows = np.flatnonzero(rank == one)
            at = np.searchsorted(table["t_from_ns"][of_rank], start_ns[rows], side="right") - 1
            shift[rows] = table["offset_ns"][of_rank][np.maximum(at, 0)]
        for name in ("start_ns", "end_ns"):
            moved = pa.array(np.asarray(spans[name]) - shift)
            spans = spans.set_column(spans.schema.get_field_index(name), spans.field(name), moved)
        return spans


def align(run: Run) -> Clock:
    """One clock for a run, from both ends of its messages and the ends of its collectives.

    The times of the run are not changed: :meth:`Clock.apply` gives a table with other ones. Each
    rank has an offset per window of steps; the windows are as long as the run's own
    cross-validation allows, and end where a clock jumps. Ranks that never exchange messages, even
    through others, are joined through collectives that both take part in; what is left apart is
    told in ``problems``.

    Args:
        run: The run.
    """
    spans = run.spans
    met = rendezvous(spans)
    ranks = len(met.ranks)
    if not len(met):
        return _unaligned(met)
    window = choose_windows(met, len(LAGS), _restarts(run, met))
    windows = int(window.max()) + 1
    rows = rows_of(met, window)
    found = fit(rows, ranks, windows, len(LAGS))
    group = components(met.i, met.j, ranks)
    several_hosts = spans["host"].null_count > 0 or len(spans["host"].unique()) > 1
    sigma = np.hypot(found.sigma * _WIDER, _BETWEEN_HOSTS_US if several_hosts else 0.0)
    joined = join_chains(collective_ends(spans), found.offsets, sigma, group, window)
    offsets, sigma, group = joined.offsets, joined.sigma, joined.group
    offsets = np.where(np.isfinite(sigma), offsets, np.nan)
    lo, hi = _causal(met, window, offsets)
    before, after = _early(met, np.zeros_like(offsets), window), _early(met, offsets, window)
    return Clock(
        _table(spans, met, window, (offsets, sigma, lo, hi), group),
        pa.table([list(LAGS), _ns(found.lags)], schema=_LAGS),
        len(met),
        len(met.steps) / windows,
        before,
        after,
        _problems(met, group, offsets),
    )


def _unaligned(met: Rendezvous) -> Clock:
    why = "no message has both ends recorded: clocks are as recorded"
    lags = _LAGS.empty_table()
    return Clock(CLOCK.empty_table(), lags, 0, float(len(met.steps)), 0.0, 0.0, (why,))


def _restarts(run: Run, met: Rendezvous) -> Ints:
    """Places in ``met.steps`` at which a later attempt begins: its processes are other ones."""
    if len(run.attempts) < 2:
        return np.zeros(0, np.int64)
    period = max(run.steps) + 1
    attempt = met.steps // period
    return np.flatnonzero(attempt[1:] != attempt[:-1]) + 1


def _causal(met: Rendezvous, window: Ints, offsets: Floats) -> tuple[Floats, Floats]:
    """Bounds of each offset, the others being what they are: neither end comes before a start."""
    w = window[met.step]
    lo, hi = np.full(offsets.shape, -np.inf), np.full(offsets.shape, np.inf)
    most = (met.end_j - met.start_i) / 1e3  # of o[j] - o[i]
    least = -(met.end_i - met.start_j) / 1e3
    other_i, other_j = offsets[met.i, w], offsets[met.j, w]
    np.minimum.at(hi, (met.j, w), other_i + most)
    np.maximum.at(lo, (met.j, w), other_i + least)
    np.minimum.at(hi, (met.i, w), other_j - least)
    np.maximum.at(lo, (met.i, w), other_j - most)
    return lo, hi


def _early(met: Rendezvous, offsets: Floats, window: Ints) -> float:
    w = window[met.step]
    ahead_ns = (np.nan_to_num(offsets[met.j, w]) - np.nan_to_num(offsets[met.i, w])) * 1e3
    early = (met.end_j - ahead_ns < met.start_i) | (met.end_i + ahead_ns < met.start_j)
    return float(early.mean())


def _table(
    spans: pa.Table,
    met: Rendezvous,
    window: Ints,
    values: tuple[Floats, Floats, Floats, Floats],
    group: Ints,
) -> pa.Table:
    ranks, windows = values[0].shape
    _, _, rank, step = places_of(spans)
    used = (rank >= 0) & (step >= 0)
    first = np.full((ranks, windows), _FOR_EVER)
    of = window[step[used]]
    np.minimum.at(first, (rank[used], of), np.asarray(spans["start_ns"])[used])
    # A window in which a rank has no span has no times of its own on it.
    following = np.minimum.accumulate(first[:, ::-1], axis=1)[:, ::-1]
    until = np.concatenate([following[:, 1:], np.full((ranks, 1), _FOR_EVER)], axis=1)
    keep = (first < _FOR_EVER).ravel()
    columns = [
        np.repeat(met.ranks, windows),
        np.tile(np.arange(windows), ranks),
        first.ravel(),
        until.ravel(),
        *(_ns(value.ravel()) for value in values),
        np.repeat(group, windows),
    ]
    arrays = [
        pa.array(column).cast(field.type) for column, field in zip(columns, CLOCK, strict=True)
    ]
    return pa.table(arrays, schema=CLOCK).filter(pa.array(keep))


def _ns(us: Floats) -> pa.Array:
    known = np.isfinite(us)
    return pa.array(np.rint(np.where(known, us, 0) * 1e3).astype(np.int64), mask=~known)


def _problems(met: Rendezvous, group: Ints, offsets: Floats) -> tuple[str, ...]:
    told = []
    numbers = np.unique(group)
    if len(numbers) > 1:
        largest = max(numbers, key=lambda number: int((group == number).sum()))
        for number in numbers[numbers != largest]:
            apart = ", ".join(map(str, met.ranks[group == number].tolist()))
            told.append(
                f"rank {apart}: no message and no collective that names its group and number "
                "connects it with the others; its times cannot be compared with theirs"
            )
    unseen = int(np.isnan(offsets).sum())
    if unseen:
        told.append(f"{unseen} windows of a rank hold no message: its clock is not known there")
    return tuple(told)
