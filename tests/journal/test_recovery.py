"""Recovery: each span once, the living left alone, the torn and the foreign passed over."""

import dataclasses
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from click.testing import CliRunner

from lens_core.journal.read.death import death_reason
from lens_core.journal.read.liveness import Liveness, is_alive
from lens_core.journal.read.process_files import find_process_files
from lens_core.journal.read.reader import read_journal
from lens_core.journal.recover.recovery import DirectorySink, recover
from lens_tools.cli import main
from lens_tools.hang.analysis import analyse
from lens_tools.hang.snapshot import take_snapshot
from lens_tools.records.read import read_records
from tests.journal.killing import account_for, environment, kill_one, start_stress, wait_for
from tests.telemetry.harness import receiving

HOLD = """
    import os, sys, time
    from lens_core import NemoLensConfig, setup_telemetry
    rank = int(os.environ.get("LENS_TEST_RANK", "5"))
    handle = setup_telemetry(NemoLensConfig.from_env(), resource_attributes={"nv.dl.rank": rank})
    tracer = handle.tracer
"""


def run_program(directory, code, **env):
    """A process that has set telemetry up; it writes ``ready`` when it is where it should be."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD) + textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(directory, **env),
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process, number=signal.SIGKILL):
    process.send_signal(number)
    process.wait()


def recover_run(directory, **arguments):
    output = directory / "run"
    return recover(
        [directory / "journals" / "run"], lambda meta: DirectorySink(output), **arguments
    )


def test_what_an_open_span_held(tmp_path):
    code = """
        from opentelemetry.trace import SpanKind, StatusCode
        with tracer.start_as_current_span("outer", attributes={"rank": 5}) as outer:
            inner = tracer.start_span("inner", kind=SpanKind.CLIENT, attributes={"at start": 1})
            inner.set_attribute("text", "\\u00e9\\ud800")
            inner.set_attributes({"list": [1, 2], "large": 2**70, "float": 0.5, "yes": True})
            inner.set_attribute("huge", 1 << 20_000)
            inner.add_event("event", {"k": "v" * 2000}, timestamp=77)
            inner.add_link(outer.get_span_context(), {"lens.peer.rank": 3})
            inner.set_status(StatusCode.ERROR, "bad")
            inner.update_name("renamed")
            print("ready", flush=True)
            time.sleep(60)
    """
    killed = run_program(tmp_path, code)
    time.sleep(1.2)
    before_ns = time.time_ns()
    kill(killed)
    time.sleep(1.0)
    assert recover_run(tmp_path).truncated == 2
    spans = {span.name: span for span in read_records(tmp_path / "run").spans}
    inner, outer = spans["renamed"], spans["outer"]
    assert dict(inner.attributes) == {
        "at start": 1,
        "text": "\u00e9?",
        "list": [1, 2],
        "large": str(2**70),
        "huge": hex(1 << 20_000),
        "float": 0.5,
        "yes": True,
        "nemo.span.truncated": True,
        "nemo.span.truncated.reason": "unknown",
    }
    assert [(e.name, e.time_ns) for e in inner.events[:1]] == [("event", 77)]
    assert inner.events[0].attributes == {"k": "v" * 2000}
    assert inner.events[1].name == "nemo.span.truncated"
    assert inner.events[1].attributes["nemo.span.truncated.reason"] == "unknown"
    assert [(link.span_id, dict(link.attributes)) for link in inner.links] == [
        (outer.span_id, {"lens.peer.rank": 3})
    ]
    assert (inner.kind, inner.status_code, inner.status_message) == (3, 2, "bad")
    assert inner.parent_span_id == outer.span_id
    assert inner.trace_id == outer.trace_id
    assert inner.rank == outer.rank == 5
    assert inner.scope == "lens_core"
    # The end is the last sign of life, written twice a second, and not the time of the recovery.
    assert before_ns - 800_000_000 < inner.end_ns <= before_ns
    assert outer.end_ns == inner.end_ns


def test_the_living_are_left_alone(tmp_path):
    process = start_stress(tmp_path)
    try:
        for _ in range(5):
            result = recover_run(tmp_path)
            assert (result.processes, len(result.alive)) == ({}, 1)
            assert result.problems == []
    finally:
        kill(process)
    account_for(tmp_path)


def test_a_pid_that_is_used_again_is_not_the_same_process(tmp_path):
    kill_me = run_program(tmp_path, "tracer.start_span('x'); print('ready', flush=True); input()")
    (files,) = find_process_files(tmp_path / "journals" / "run")
    process = read_journal(files.journal).process
    assert is_alive(process, files.journal) is Liveness.ALIVE
    copy = tmp_path / "copy.lensj"
    shutil.copy(files.journal, copy)
    assert is_alive(process, copy) is Liveness.REPLACED, "it does not have this file mapped"
    kill(kill_me)
    assert is_alive(process, files.journal) is Liveness.DEAD


def test_another_host_is_left_alone_unless_it_is_known_to_be_over(tmp_path, monkeypatch):
    process = run_program(tmp_path, "tracer.start_span('x'); print('ready', flush=True); input()")
    kill(process)
    monkeypatch.setattr("lens_core.journal.read.liveness.boot_id", lambda: "another")
    monkeypatch.setattr("lens_core.journal.read.liveness.host_name", lambda: "another")
    assert len(recover_run(tmp_path).alive) == 1
    assert recover_run(tmp_path, assume_dead=True).truncated == 1


def test_torn_and_foreign_files_do_not_stop_the_rest(tmp_path):
    code = "tracer.start_span('x'); tracer.start_span('y'); print('ready', flush=True); input()"
    env = {"NEMO_LENS_JOURNAL_DIR": str(tmp_path / "all")}
    # Stopped before the first dies: each would recover what another one left.
    processes = [run_program(tmp_path, code, **env) for _ in range(3)]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    for process in processes:
        kill(process)
    first, second, _ = find_process_files(tmp_path / "all" / "run")
    content = bytearray(first.journal.read_bytes())
    content[content.index(b"\xa1x\x00")] ^= 0xFF  # the name of a span
    first.journal.write_bytes(content)
    os.truncate(second.journal, 5000)
    (tmp_path / "all" / "run" / "spans-foreign.lensj").write_bytes(b"not a journal" * 1000)
    (tmp_path / "all" / "run" / "notes.txt").write_text("mine")
    result = recover([tmp_path / "all" / "run"], lambda meta: DirectorySink(tmp_path / "run"))
    assert result.truncated == 3
    assert len(result.processes) == 2
    problems = "\n".join(result.problems)
    assert len(result.problems) == 3
    assert "checksum" in problems
    assert "cut short" in problems
    assert "not a journal" in problems
    assert len(read_records(tmp_path / "run").spans) == 3
    left = sorted(path.name for path in (tmp_path / "all" / "run").iterdir())
    assert "notes.txt" in left
    assert "spans-foreign.lensj" in left
    assert f"{first.journal.name}.damaged" in left, "what could not be read is kept"


def test_recovery_that_is_killed_can_be_repeated(tmp_path):
    process = start_stress(tmp_path)
    time.sleep(0.3)
    kill(process)

    class Dies(DirectorySink):
        def deliver(self, name, spans):
            super().deliver(name, spans)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recover([tmp_path / "journals" / "run"], lambda meta: Dies(tmp_path / "run"))
    account_for(tmp_path)


def test_a_journal_that_was_never_complete_is_removed(tmp_path):
    directory = tmp_path / "journals" / "run"
    directory.mkdir(parents=True)
    old, new = directory / ".spans-h-1-2.lensj.part", directory / ".spans-h-3-4.lensj.part"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    assert recover_run(tmp_path).problems == []
    assert list(directory.iterdir()) == [new]


def test_only_one_recovers_at_a_time(tmp_path):
    kill(run_program(tmp_path, "tracer.start_span('x'); print('ready', flush=True); input()"))
    (files,) = find_process_files(tmp_path / "journals" / "run")
    with open(files.journal) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = recover_run(tmp_path)
        assert (result.processes, len(result.busy)) == ({}, 1)
    assert recover_run(tmp_path).truncated == 1


def test_the_next_start_of_the_run_recovers(tmp_path):
    code = "tracer.start_span('lost'); print('ready', flush=True); input()"
    kill(run_program(tmp_path, code))
    process = run_program(tmp_path, "print('ready', flush=True); input()")
    try:
        wait_for(lambda: list((tmp_path / "run").glob("recovered-*.jsonl")))
    finally:
        kill(process)
    (span,) = [span for span in read_records(tmp_path / "run").spans if span.truncated]
    assert span.name == "lost"


def test_the_next_start_of_another_run_tidies_up(tmp_path):
    code = "tracer.start_span('lost'); print('ready', flush=True); input()"
    kill(run_program(tmp_path, code))
    (tmp_path / "journals" / "mine").mkdir()  # an empty directory that is no run's stays
    nothing = "tracer.start_span('x').end(); time.sleep(1); print('ready', flush=True); input()"
    empty = run_program(tmp_path, nothing, NEMO_LENS_RUN_ID="empty")
    kill(empty)
    process = run_program(
        tmp_path, "print('ready', flush=True); input()", NEMO_LENS_RUN_ID="another"
    )
    try:
        wait_for(lambda: sorted(os.listdir(tmp_path / "journals")) == ["another", "mine"])
    finally:
        kill(process)
    (span,) = [span for span in read_records(tmp_path / "run").spans if span.truncated]
    assert span.name == "lost"
    assert not list((tmp_path / "empty").glob("recovered-*"))


def test_the_next_start_sends_over_otlp_what_was_to_be_sent_so(tmp_path):
    code = "tracer.start_span('lost'); print('ready', flush=True); input()"
    with receiving() as receiver:
        env = {"NEMO_LENS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        env["OTEL_EXPORTER_OTLP_ENDPOINT"] = receiver.endpoint
        kill(run_program(tmp_path, code, **env))
        process = run_program(tmp_path, "print('ready', flush=True); input()", **env)
        try:
            wait_for(lambda: receiver.span_names() == ["lost"])
        finally:
            kill(process)


def test_hang_is_the_reason_where_nothing_else_is_known(tmp_path):
    kill(run_program(tmp_path, "tracer.start_span('x'); print('ready', flush=True); input()"))
    (files,) = find_process_files(tmp_path / "journals" / "run")
    image = read_journal(files.journal)
    late_ns = image.beat.activity_ns + 61_000_000_000
    image.beat = dataclasses.replace(image.beat, time_ns=late_ns)
    assert death_reason(image, Liveness.DEAD, stacks=files.stacks) == "hang"
    assert death_reason(image, Liveness.DEAD, stacks=files.stacks, exit_status=-6) == "sigabrt"


def test_command(tmp_path):
    toll_directory = tmp_path / "a"
    toll_directory.mkdir()
    kill_one(toll_directory, "SIGKILL", 0.2)
    kill(run_program(tmp_path, "tracer.start_span('x'); print('ready', flush=True); input()"))
    result = CliRunner().invoke(
        main, ["recover", str(tmp_path / "journals" / "run"), "--output", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    assert "1 processes recovered: 0 ended spans, 1 that were open" in result.output
    assert len(read_records(tmp_path / "out").spans) == 1


def test_stacks_of_a_process_that_runs(tmp_path):
    process = start_stress(tmp_path, threads=3)
    try:
        for _ in range(3):
            result = CliRunner().invoke(main, ["stacks", str(tmp_path / "journals" / "run")])
            assert result.exit_code == 0, result.output
            assert "[MainThread]" in result.output
            assert "in work" in result.output
        assert process.poll() is None
    finally:
        kill(process)
    account_for(tmp_path)


def test_stacks_of_a_process_whose_interpreter_lock_is_held_by_c_code(tmp_path):
    code = """
        import ctypes
        tracer.start_span("x")
        def held_by_c():
            while True:
                ctypes.PyDLL(None).sleep(60)
        print("ready", flush=True)
        held_by_c()
    """
    process = run_program(tmp_path, code)
    try:
        time.sleep(0.5)
        result = CliRunner().invoke(main, ["stacks", str(tmp_path / "journals" / "run")])
    finally:
        kill(process)
    assert result.exit_code == 0, result.output
    assert f"rank 5, process {process.pid}" in result.output
    assert "in held_by_c" in result.output


def test_recovery_does_not_change_who_died(tmp_path):
    """The others went on, and what they did then has ended: only the dead one has open spans."""
    code = """
        wait = {"lens.op": "send", "lens.peer.rank": 1}
        with tracer.start_as_current_span("step", attributes=wait):
            print("ready", flush=True)
            input()
        with tracer.start_as_current_span("after"):
            pass
        print("after", flush=True)
        input()
    """
    ranks = [run_program(tmp_path, code, LENS_TEST_RANK=str(rank)) for rank in (0, 1)]
    time.sleep(0.7)  # a sign of life of each
    kill(ranks[0])
    time.sleep(2)
    ranks[1].stdin.write("\n")
    ranks[1].stdin.flush()
    assert ranks[1].stdout.readline() == "after\n"
    time.sleep(0.7)  # a sign of life
    kill(ranks[1])
    journals, run = tmp_path / "journals" / "run", tmp_path / "run"
    (before,) = analyse(take_snapshot([journals, run])).suspects
    assert (before.kind, before.names) == ("dead", ("rank 0",))
    assert recover_run(tmp_path).truncated == 1
    (after,) = analyse(take_snapshot([journals, run])).suspects
    assert (after.kind, after.names) == ("dead", ("rank 0",))
