"""Kills the processes of ``lens demo`` and checks that what is left hangs together."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from lens_core.journal.read.liveness import Liveness
from lens_core.journal.read.process_files import find_process_files
from lens_core.journal.read.reader import read_journal
from lens_core.journal.recover.recovery import DirectorySink, recover
from lens_tools.records.read import read_records
from tests.journal.killing import environment, wait_for

#: So much of the run has been written when the deaths begin.
WRITTEN_BYTES = 300_000


@dataclass
class DemoToll:
    """What one death of the demo left."""

    spans: int
    links: int
    truncated: int


def kill_demo(directory, rng):
    """Train, kill all processes in a random order, recover, and check the spans' references."""
    journals, run_directory = directory / "journals" / "run", directory / "run"
    command = [sys.executable, "-m", "lens_tools.cli", "demo", "--steps", "100000"]
    with (directory / "log").open("wb") as log:
        demo = subprocess.Popen(
            [*command, "--out", str(directory)],
            env=environment(directory, OMP_NUM_THREADS="1"),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_for(lambda: written(run_directory) > WRITTEN_BYTES, 120.0)
        time.sleep(rng.uniform(0.0, 1.0))
        processes = find_process_files(journals)
        assert len(processes) >= 5, (directory / "log").read_text()
        rng.shuffle(processes)
        for files in processes:
            with contextlib.suppress(ProcessLookupError):
                pid = read_journal(files.journal).process.pid
                os.kill(pid, rng.choice([signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV]))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(demo.pid, signal.SIGKILL)
        demo.wait()
    wait_for(lambda: all(f.liveness() is not Liveness.ALIVE for f in find_process_files(journals)))
    result = recover([journals], lambda meta: DirectorySink(run_directory))
    assert result.problems == []
    run = read_records(run_directory)
    assert run.repeated == 0
    assert all("unfinished" in problem for problem in run.problems)
    there = {(span.trace_id, span.span_id) for span in run.spans}
    for span in run.spans:
        assert not span.parent_span_id or (span.trace_id, span.parent_span_id) in there
        assert all((link.trace_id, link.span_id) in there for link in span.links)
    return DemoToll(
        len(run.spans),
        sum(len(span.links) for span in run.spans),
        sum(span.truncated for span in run.spans),
    )


def written(directory):
    if not directory.is_dir():
        return 0
    return sum(path.stat().st_size for path in directory.glob("*.jsonl"))
