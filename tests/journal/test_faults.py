"""What goes wrong with the journal never stops the training: it is warned of once, and counted."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from lens_tools.records.read import read_records
from tests.journal.killing import environment, wait_for

PROGRAM = """
    import json, logging, sys, threading, time
    from lens_core import NemoLensConfig, setup_telemetry
    from lens_core.diagnostics import diagnostics

    warnings = []

    class Keep(logging.Handler):
        def emit(self, record):
            warnings.append(record.getMessage())

    logging.getLogger("lens_core").addHandler(Keep())
    handle = setup_telemetry(NemoLensConfig.from_env(strict=True))
    count = [0, 0]
    go = threading.Event()

    def train(index, until):
        while not until():
            with handle.tracer.start_as_current_span("step", attributes={"pad": "x" * PAD}) as span:
                span.set_attribute("loss", 0.5)
                span.add_event("checkpoint", {"path": "y" * 700})
            count[index] += 1
            time.sleep(PAUSE)

    thread = threading.Thread(target=train, args=(1, go.is_set))
    thread.start()
    time.sleep(0.3)
    print("training", flush=True)
    sys.stdin.readline()
    before = sum(count)
    deadline = time.monotonic() + 1.6
    train(0, lambda: time.monotonic() > deadline)
    after = sum(count)
    go.set()
    thread.join()
    complete = handle.shutdown()
    print(json.dumps({
        "trained_on": after > before + 10,
        "spans": sum(count),
        "diagnostics": dict(diagnostics.counts()),
        "warnings": warnings,
        "complete": complete,
    }))
"""


@contextlib.contextmanager
def mounted(path, options):
    """A file system of its own at a path; a visible skip where that cannot be had."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def train(directory, fault=None, *, pad=10, pause_s=0.001, **env):
    """Train, let ``fault`` happen, train on; what the process says of itself, and its spans."""
    source = textwrap.dedent(PROGRAM).replace("PAD", str(pad)).replace("PAUSE", str(pause_s))
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(directory, OTEL_BSP_MAX_QUEUE_SIZE="100000", **env),
        text=True,
    )
    try:
        assert process.stdout.readline() == "training\n"
        if fault is not None:
            fault()
        out, err = process.communicate("\n", timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    told = json.loads(out)
    assert told["trained_on"]
    assert told["complete"]
    assert len(read_records(directory / "run").spans) == told["spans"]
    return told


def the_one_incident(told, kind):
    """Its warning; there was no other diagnostic and no other warning."""
    assert set(told["diagnostics"]) == {kind}
    (warning,) = told["warnings"]
    assert warning.startswith(kind + ": ")
    return warning


def test_no_fault(tmp_path):
    told = train(tmp_path)
    assert told["diagnostics"] == {}
    assert list((tmp_path / "journals").iterdir()) == []


def test_full_disk_at_set_up(tmp_path):
    with mounted(tmp_path / "small", "size=1m") as small:
        told = train(tmp_path, NEMO_LENS_JOURNAL_DIR=str(small))
        assert told["diagnostics"] == {"journal.unavailable": 1}
        assert "No space left" in the_one_incident(told, "journal.unavailable")
        assert list((small / "run").iterdir()) == []


def test_disk_fills_up_later(tmp_path):
    """The exporter takes nothing for a while, and the overflow of the table has no room either."""
    with mounted(tmp_path / "small", "size=4600k") as small:
        env = {"OTEL_BSP_SCHEDULE_DELAY": "60000", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "100000"}
        told = train(tmp_path, pad=2000, pause_s=0.0003, NEMO_LENS_JOURNAL_DIR=str(small), **env)
        assert {"journal.spill_failed", "journal.overflow"} >= set(told["diagnostics"])
        assert told["diagnostics"]["journal.spill_failed"] > 1
        failed = [text for text in told["warnings"] if text.startswith("journal.spill_failed: ")]
        assert len(failed) == 1


def test_read_only_directory(tmp_path):
    with mounted(tmp_path / "locked", "ro") as locked:
        told = train(tmp_path, NEMO_LENS_JOURNAL_DIR=str(locked))
        assert told["diagnostics"] == {"journal.unavailable": 1}
        assert "Read-only" in the_one_incident(told, "journal.unavailable")


def test_without_a_journal_to_export_to_spans_are_in_files(tmp_path):
    (tmp_path / "file").write_text("")
    told = train(
        tmp_path, NEMO_LENS_EXPORTER="journal", NEMO_LENS_JOURNAL_DIR=str(tmp_path / "file/below")
    )
    # All of them are in the files: train() has compared the numbers.
    assert told["diagnostics"] == {"journal.unavailable": 1, "journal.replaced": 1}
    assert any("spans go to a file of the run directory" in text for text in told["warnings"])


def test_directory_is_deleted(tmp_path):
    told = train(tmp_path, lambda: shutil.rmtree(tmp_path / "journals"))
    assert "deleted" in the_one_incident(told, "journal.deleted")


@pytest.mark.parametrize("size", [0, 5000, 100_000])
def test_journal_is_truncated(size, tmp_path):
    def truncate():
        (path,) = (tmp_path / "journals" / "run").glob("*.lensj")
        os.truncate(path, size)

    told = train(tmp_path, truncate)
    assert "cut the journal short" in the_one_incident(told, "journal.truncated")


def test_a_foreign_bus_error_still_ends_the_process(tmp_path):
    source = """
        import mmap, os, sys
        from lens_core import NemoLensConfig, setup_telemetry
        setup_telemetry(NemoLensConfig.from_env(strict=True))
        file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, 8192)
        memory = mmap.mmap(file, 8192)
        os.ftruncate(file, 0)
        memory[0] = 1
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), str(tmp_path / "own")],
        env=environment(tmp_path),
        capture_output=True,
        timeout=60,
    )
    assert process.returncode == -7
    wait_for(lambda: list((tmp_path / "journals" / "run").glob("*.stacks")))
    (stacks,) = (tmp_path / "journals" / "run").glob("*.stacks")
    assert "Bus error" in stacks.read_text()
