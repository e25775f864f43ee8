"""One clock: how far apart both ends of a message are, on messages that the fit has not seen.

Bounds: held out (fitted on one half of the distinct rendezvous, tested on the other, three seeds).
``LENS_BENCH_TRACES`` names a directory with the published traces ``trace-AR.parquet`` and
``trace-ST.parquet`` (repository ByteDance-Seed/StragglerAnalysis, ``data/``); without it only a
made one is measured.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.ratios import Report
from lens_tools.clock import align, held_out, rendezvous
from lens_tools.runs.run_table import ReadingReport, Run
from lens_tools.runs.straggler import read_straggler_trace
from tests.runs.traces import pipeline_trace

#: Trace to the largest median and 99th percentile held out, in microseconds.
BOUNDS = {"AR": (27.0, 140.0), "ST": (5.0, 35.0), "made": (4.0, 12.0)}
SEEDS = range(3)


def run(report: Report) -> None:
    """Print the held-out errors, the error bars and the time of an alignment."""
    report.title("both ends of a message, us p50 / p90 / p99 held out")
    for name, path in _traces():
        whole = Run(path, read_straggler_trace(path), ReadingReport())
        met = rendezvous(whole.spans)
        began = time.perf_counter()
        clock = align(whole)
        took_s = time.perf_counter() - began
        tested = [held_out(met, seed) for seed in SEEDS]
        print(
            f"{name}: {len(met):,} rendezvous, {took_s:.1f} s, windows of "
            f"{clock.window_steps:.1f} steps; arrive before they were sent: "
            f"{clock.early_before:.2%}, aligned {clock.early_after:.2%}"
        )
        for kind in ("raw", "offsets_alone", "aligned"):
            values = np.concatenate([getattr(test, kind) for test in tested])
            print(f"  {kind:<14}", " / ".join(f"{v:.1f}" for v in np.percentile(values, _SHARES)))
        z = np.concatenate([test.z for test in tested])
        sd = 1.4826 * float(np.median(np.abs(z)))
        for test in tested:
            print("  one seed      ", *np.percentile(test.aligned, _SHARES).round(1))
        p50, _, p99 = np.percentile(np.concatenate([t.aligned for t in tested]), _SHARES)
        report.figure(f"{name}, three seeds, p50", p50, "us", at_most=BOUNDS[name][0])
        report.figure(f"{name}, three seeds, p99", p99, "us", at_most=BOUNDS[name][1])
        report.figure(f"{name}, split-half z of the offsets, sd", sd, "", at_most=1.3)


_SHARES = (50, 90, 99)


def _traces():
    if folder := os.environ.get("LENS_BENCH_TRACES"):
        for name in ("AR", "ST"):
            yield name, Path(folder) / f"trace-{name}.parquet"
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "made.parquet"
        pipeline_trace(path, steps=24, microbatches=8)
        yield "made", path
