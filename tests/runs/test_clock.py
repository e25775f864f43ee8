from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lens_tools import read_run
from lens_tools.clock import align, held_out, rendezvous
from lens_tools.runs.reading import write_run
from lens_tools.runs.run_table import ReadingReport, Run
from lens_tools.runs.schema import SPANS
from lens_tools.runs.straggler import read_straggler_trace
from tests.runs.traces import pipeline_trace

STEPS = 16


def recorded(tmp_path, **options):
    path = tmp_path / "trace.parquet"
    pipeline_trace(path, **options)
    return Run(path, read_straggler_trace(path), ReadingReport())


def offsets_us(run, clock, steps=STEPS):
    """Of each rank and step its offset, by the row that its step's first span falls into."""
    spans, found = run.spans.to_pylist(), {}
    table = clock.table.to_pylist()
    for span in spans:
        found.setdefault((span["rank"], span["step"]), span["start_ns"])
    result = np.full((len(run.ranks), steps), np.nan)
    for (rank, step), start_ns in found.items():
        (row,) = [
            r for r in table if r["rank"] == rank and r["t_from_ns"] <= start_ns < r["t_to_ns"]
        ]
        result[rank, step] = np.nan if row["offset_ns"] is None else row["offset_ns"] / 1e3
    return result


def planted_us(clock_s, ranks, steps=STEPS):
    planted = np.array([[clock_s(rank, step) for step in range(steps)] for rank in range(ranks)])
    return (planted - planted.mean(0)) * 1e6


CLOCKS = {
    "right": lambda rank, step: 0.0,
    "500 ms ahead": lambda rank, step: 0.5 * (rank == 2),
    "50 ppm of drift, 200 ms a step": lambda rank, step: 10e-6 * step * (rank == 3),
    "a jump of 3 ms": lambda rank, step: 0.003 * (rank == 1 and step >= 13),
    "a jump of two hours, by NTP": lambda rank, step: -7200.0 * (rank == 4 and step >= 7),
    "a host whose clock is three hours off": lambda rank, step: 10800.0 * (rank % 2),
}


@pytest.mark.parametrize("name", CLOCKS)
def test_planted_clocks_are_found(tmp_path, name):
    clock_s = CLOCKS[name]
    run = recorded(tmp_path, steps=STEPS, clock_s=clock_s)
    clock = align(run)
    assert clock.problems == ()
    assert clock.groups == [list(range(6))]
    error = np.abs(offsets_us(run, clock) - planted_us(clock_s, 6))
    assert error.max() < 50
    assert np.median(error) < 5
    assert clock.early_after == 0


def test_messages_that_arrive_before_they_were_sent_are_counted_before_and_after(tmp_path):
    run = recorded(tmp_path, steps=4, clock_s=CLOCKS["500 ms ahead"])
    clock = align(run)
    # Of three ranks in a replica's row, all of the messages of the middle one's.
    assert clock.early_before == pytest.approx(0.5)
    assert clock.early_after == 0


def test_the_raw_times_are_kept_and_the_aligned_ones_are_another_table(tmp_path):
    run = recorded(tmp_path, steps=3, clock_s=CLOCKS["500 ms ahead"])
    before = run.spans.to_pylist()
    moved = align(run).apply(run.spans).to_pylist()
    assert run.spans.to_pylist() == before
    shift = {}
    for one, other in zip(before, moved, strict=True):
        shift.setdefault(one["rank"], set()).add(one["start_ns"] - other["start_ns"])
        assert one["end_ns"] - one["start_ns"] == other["end_ns"] - other["start_ns"]
    assert max(shift[2]) - min(shift[0]) == pytest.approx(0.5e9, abs=50_000)


def test_the_lag_of_who_waited_is_found(tmp_path):
    (late,) = [
        row["lag_ns"]
        for row in align(recorded(tmp_path, steps=STEPS)).lags.to_pylist()
        if row["class"] == "sender came late"
    ]
    assert late == pytest.approx(20_000, abs=2_000)


def test_error_bars_hold_between_random_halves(tmp_path):
    met = rendezvous(recorded(tmp_path, steps=STEPS, microbatches=8).spans)
    tested = [held_out(met, seed) for seed in range(3)]
    assert 1.4826 * np.median(np.abs(np.concatenate([t.z for t in tested]))) < 1.3
    for test in tested:
        assert np.median(test.aligned) < 4 < 15 < np.median(test.raw)


def test_what_nothing_connects_is_said_and_not_compared(tmp_path):
    clock = align(recorded(tmp_path, steps=3, gather=False))
    assert clock.groups == [[0, 2, 4], [1, 3, 5]]
    assert len(clock.problems) == 1
    assert "rank 1, 3, 5" in clock.problems[0] or "rank 0, 2, 4" in clock.problems[0]


def test_a_run_without_messages_has_no_clock_and_says_why(tmp_path):
    clock = align(Run(Path("x"), SPANS.empty_table(), ReadingReport()))
    assert clock.table.num_rows == 0
    assert "no message" in clock.problems[0]


def test_attempts_have_clocks_of_their_own(tmp_path):
    first = recorded(tmp_path, steps=6).spans
    again = recorded(tmp_path, steps=6, clock_s=lambda rank, step: 0.02 * (rank == 1)).spans
    later = 3_600_000_000_000
    for name in ("start_ns", "end_ns"):
        moved = pa.array(np.asarray(again[name]) + later)
        again = again.set_column(again.schema.get_field_index(name), SPANS.field(name), moved)
    attempt = pa.array(np.ones(again.num_rows, np.int32))
    again = again.set_column(1, SPANS.field("attempt"), attempt)
    whole = pa.concat_tables([first, again]).unify_dictionaries()
    clock = align(Run(tmp_path, whole, ReadingReport()))
    rows = [row for row in clock.table.to_pylist() if row["rank"] == 1]
    mean = 0.02e9 / 6
    assert all(abs(r["offset_ns"]) < 50_000 for r in rows if r["t_from_ns"] < later)
    assert all(
        abs(r["offset_ns"] - (0.02e9 - mean)) < 50_000 for r in rows if r["t_from_ns"] >= later
    )
    assert {r["t_from_ns"] >= later for r in rows} == {True, False}


def test_a_batched_exchange_counts_once(tmp_path):
    spans = recorded(tmp_path, steps=2).spans
    met = rendezvous(spans)
    # Each message is recorded a second time, with the same times and a name of its own.
    hop = pa.array([h and h + " again" for h in spans["hop_id"].to_pylist()], pa.string())
    doubled = spans.set_column(spans.schema.get_field_index("hop_id"), SPANS.field("hop_id"), hop)
    both = rendezvous(pa.concat_tables([spans, doubled]).unify_dictionaries())
    assert len(both) == len(met) == 2 * 2 * 2 * 2 * 4
    assert set(both.lag.tolist()) == {0}


def test_an_imported_run_is_aligned_as_it_was_read(tmp_path):
    run = recorded(tmp_path, steps=2)
    write_run(tmp_path / "run", run.spans)
    assert align(read_run(tmp_path / "run")).table.equals(align(run).table)
