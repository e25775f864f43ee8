"""Kills the stress program and compares what is left of it with what it really did."""

import collections
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lens_core.journal.recover.recovery import DirectorySink, recover
from lens_tools.records.read import read_records
from tests.journal.stress import RECORD, check

#: How the process ends, and what its parent sees.
DEATHS = {
    "SIGKILL": -signal.SIGKILL,
    "SIGABRT": -signal.SIGABRT,
    "SIGSEGV": -signal.SIGSEGV,
    "null": -signal.SIGSEGV,
    "os._exit": 3,
    "exec": None,
}


@dataclass
class Toll:
    """What one death left: spans started, spans recovered as open and as ended, its reason."""

    started: int
    truncated: int
    recovered_ended: int
    reason: str


def environment(directory, **extra):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "NEMO_LENS_"))}
    return {
        **kept,
        "NEMO_LENS_ENABLED": "1",
        "NEMO_LENS_EXPORTER": "file",
        "NEMO_LENS_RUN_ID": "run",
        "NEMO_LENS_OUTPUT_DIR": str(directory),
        "NEMO_LENS_JOURNAL_DIR": str(directory / "journals"),
        "NEMO_LENS_METRICS_ENABLED": "0",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        **extra,
    }


def start_stress(directory, *, threads=2, death="wait", after_s=0.0, limit=None, prefix=(), **env):
    """The stress program, once it works."""
    arguments = [str(directory / "truth"), str(threads), death, str(after_s)]
    if limit is not None:
        arguments.append(str(limit))
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "tests.journal.stress", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(directory, **env),
        cwd=Path(__file__).parents[2],
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill_one(directory, death, after_s, *, threads=2, prefix=(), **env):
    """Start the program, end it in this way, recover it, and check that nothing is lost."""
    process = start_stress(
        directory, threads=threads, death=death, after_s=after_s, prefix=prefix, **env
    )
    try:
        if death == "exec":
            wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
            status = None
        else:
            status = process.wait(60)
            expected = DEATHS.get(death, status)
            # faulthandler may itself fault while it walks threads that run on.
            assert status in (expected, -signal.SIGSEGV), (death, status)
        return account_for(directory, {process.pid: status} if status is not None else {})
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def memory_cgroup(limit_bytes):
    """A new cgroup with a limit, as the words to start a program in it with; ``None`` if that
    cannot be had here."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"lens-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(limit_bytes))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield ("/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
        finally:
            wait_for(lambda procs=group / "cgroup.procs": not procs.read_text().strip())
            group.rmdir()
        return
    yield None


def account_for(directory, exit_statuses=None):
    """Recover, and check all that is there against the truth."""
    run_directory = directory / "run"
    result = recover(
        [directory / "journals" / "run"],
        lambda meta: DirectorySink(run_directory),
        exit_statuses=exit_statuses or {},
    )
    assert (result.problems, result.alive, result.busy) == ([], [], [])
    (reason,) = result.processes.values()
    truth = read_truth(directory / "truth")
    run = read_records(run_directory)
    found = collections.Counter(int(span.span_id, 16) for span in run.spans)
    assert run.repeated == 0
    # The one line that the process may have been killed in the middle of.
    assert len(run.problems) <= 1
    assert all("unfinished" in problem for problem in run.problems)
    missing = truth["S"] - set(found)
    assert not missing, f"{len(missing)} of {len(truth['S'])} started spans are lost"
    invented = set(found) - truth["I"]
    assert not invented, f"{len(invented)} spans were never started"
    for span in run.spans:
        span_id = int(span.span_id, 16)
        assert span.attributes.get("check", check(span_id)) == check(span_id)
        assert isinstance(span.attributes["number"], int)
        assert span.end_ns >= span.start_ns
        if span_id in truth["E"]:
            assert not span.truncated, "a span that had ended is marked as cut off"
            if span.name in ("outer", "inner-0", "inner-3", "inner-6"):
                assert span.attributes["check"] == check(span_id)
            assert (span.status_code == 2) == (span.name == "inner-4")
    again = recover([directory / "journals" / "run"], lambda meta: DirectorySink(run_directory))
    assert again.processes == {}
    return Toll(len(truth["S"]), result.truncated, result.ended, reason)


def read_truth(path):
    sets = {"I": set(), "S": set(), "E": set()}
    content = path.read_bytes()
    for tag, span_id in RECORD.iter_unpack(content[: len(content) // RECORD.size * RECORD.size]):
        sets[tag.decode()].add(span_id)
    return sets


def wait_for(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to be in time")
