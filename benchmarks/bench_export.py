"""What a collector that is down costs a training loop, and how long the process takes to end.

Each sample is a process of its own: a loop of 1,000 steps, of 5 spans each around a few matrix
products, then a normal exit with two spans still open. The collector is up, refuses connections, or
accepts them and never answers.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from benchmarks.ratios import Report
from tests.telemetry.harness import environment, file_spans, receiving, unused_endpoint

STEPS, SPANS_PER_STEP, OPEN, ROUNDS, DEADLINE_S = 1_000, 5, 2, 9, 5.0
UP, TWIN, DOWN, SILENT = "collector up", "A/A control", "collector down", "collector never answers"

LOOP = textwrap.dedent(
    """
    import sys, time
    import numpy
    from lens_core import NemoLensConfig, managed_span, setup_telemetry
    handle = setup_telemetry(NemoLensConfig.from_env())
    opened = [handle.tracer.start_span("open") for _ in range(2)]
    a = numpy.random.default_rng(0).random((64, 64))
    for _ in range(50):
        a = a @ a / 32
    start_ns = time.perf_counter_ns()
    for step in range(1000):
        with managed_span("step", "step", iteration=step):
            for phase in ("data", "forward", "backward", "optimizer"):
                with managed_span("step", phase, iteration=step):
                    for _ in range(12):
                        a = a @ a
                        a /= a.max()
    print((time.perf_counter_ns() - start_ns) / 1e9, time.time(), flush=True)
    """
)


def run(report: Report) -> None:
    loops: dict[str, list[float]] = {name: [] for name in (UP, TWIN, DOWN, SILENT)}
    exits: dict[str, list[float]] = {name: [] for name in loops}
    missing = dict.fromkeys(loops, 0)
    order = random.Random(0)
    for _ in range(ROUNDS):
        names = list(loops)
        order.shuffle(names)
        for name in names:
            loop_s, exit_s, found = _sample(name)
            loops[name].append(loop_s * 1e6 / STEPS)
            exits[name].append(exit_s)
            missing[name] += STEPS * SPANS_PER_STEP + OPEN - found
    report.title(f"a training loop of {STEPS:,} steps, {SPANS_PER_STEP} spans each (per step)")
    report.table(loops, UP, bounds={DOWN: 1.05, SILENT: 1.05})
    report.title(f"from the end of the loop to the end of the process (deadline {DEADLINE_S:g} s)")
    for name, samples in exits.items():
        bound = None if name in (UP, TWIN) else DEADLINE_S + 1
        report.figure(f"{name}, median", statistics.median(samples), "s")
        report.figure(f"{name}, longest", max(samples), "s", at_most=bound)
    report.title("spans that are neither at the collector nor in the spill file")
    for name, count in missing.items():
        report.figure(name, count, "spans", at_most=0)


def _sample(name: str) -> tuple[float, float, int]:
    with tempfile.TemporaryDirectory() as directory, receiving() as receiver:
        receiver.hang_s = 120.0 if name == SILENT else 0.0
        endpoint = unused_endpoint() if name == DOWN else receiver.endpoint
        env = environment(directory, endpoint, NEMO_LENS_SPAN_GROUPS="step")
        done = subprocess.run(
            [sys.executable, "-c", LOOP],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        ended = time.time()
        loop_s, loop_end = map(float, done.stdout.split())
        found = len(file_spans(Path(directory))) + len(receiver.spans())
    return loop_s, ended - loop_end, found
