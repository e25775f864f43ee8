"""Kills a program that starts and ends spans, over and over, and accounts for every span.

At least 200 deaths and a million spans: SIGKILL, SIGABRT, SIGSEGV, ``os._exit``, ``exec``, and a
cgroup's out-of-memory killer where one can be made; one to three threads; random moments. After
each, recovery must have made the set of spans that the program really started: none lost, none
twice, none invented, none broken. See ``tests/journal/killing.py`` for how that is known.

Then the demo, a training over Ray, whose processes are all killed in the middle of a step: no span
of it may be missing that another one names as its parent or links to.
"""

from __future__ import annotations

import collections
import random
import tempfile
import time
from pathlib import Path

from benchmarks.ratios import Report
from tests.journal.demo_deaths import kill_demo
from tests.journal.killing import DEATHS, kill_one, memory_cgroup

KILLS = 200
SPANS = 1_000_000
DEMO_KILLS = 5
MEMORY_BYTES = 320 << 20
#: Every so many deaths is one for want of memory.
OOM_EVERY = 20


def run(report: Report) -> None:
    seed = time.time_ns()
    rng = random.Random(seed)
    report.title(f"deaths at random moments (seed {seed})")
    deaths: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    started = truncated = recovered_ended = 0
    with tempfile.TemporaryDirectory(prefix="lens-soak-") as folder:
        number = 0
        while number < KILLS or started < SPANS:
            number += 1
            death = rng.choice(list(DEATHS))
            wanted = "oom" if number % OOM_EVERY == 0 else death
            directory = Path(folder) / str(number)
            directory.mkdir()
            after_s = rng.uniform(0.05, 1.2)
            threads = rng.randint(1, 3)
            with memory_cgroup(MEMORY_BYTES) as prefix:
                if wanted == "oom" and prefix is not None:
                    toll = kill_one(directory, "oom", after_s, threads=threads, prefix=prefix)
                    death = "oom"
                else:
                    toll = kill_one(directory, death, after_s, threads=threads)
            deaths[death] += 1
            reasons[toll.reason] += 1
            started += toll.started
            truncated += toll.truncated
            recovered_ended += toll.recovered_ended
            if number % 20 == 0:
                print(f"  {number} deaths, {started} spans accounted for", flush=True)
    for death, count in sorted(deaths.items()):
        report.figure(f"deaths by {death}", count, "")
    print(f"  reasons given: {dict(reasons)}", flush=True)
    report.figure("spans started, each found once", started, "spans")
    report.figure("of them open at death", truncated, "spans")
    report.figure("of them ended and not yet exported", recovered_ended, "spans")
    _demo(report, rng)


def _demo(report: Report, rng: random.Random) -> None:
    report.title("all processes of the demo killed in the middle of its training")
    spans = links = truncated = 0
    for _ in range(DEMO_KILLS):
        with tempfile.TemporaryDirectory(prefix="lens-soak-") as folder:
            toll = kill_demo(Path(folder), rng)
        spans += toll.spans
        links += toll.links
        truncated += toll.truncated
    report.figure("runs", DEMO_KILLS, "")
    report.figure("spans, each once and each with its parent", spans, "spans")
    report.figure("links, each to a span that is there", links, "links")
    report.figure("of the spans open at death", truncated, "spans")
