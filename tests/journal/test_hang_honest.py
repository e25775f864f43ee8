"""``lens hang`` where no span says who waits for whom: by other evidence, or "cannot tell"."""

import contextlib
import json
import os
import signal
import threading
import time

import pytest

from lens_core.journal.read.liveness import Liveness
from lens_core.journal.read.process_files import find_process_files
from lens_core.journal.read.reader import read_journal
from tests.gloo import rank_outcomes
from tests.journal import hang_cases
from tests.journal.killing import wait_for
from tests.journal.test_hang import lens, live_pids
from tests.journal.test_recovery import run_program


@contextlib.contextmanager
def ranks_of(case, world_size, directory, group_timeout_s=120.0):
    """Ranks of that case, until the block ends."""
    journals = directory / "journals" / "run"
    thread = threading.Thread(
        target=rank_outcomes,
        args=(hang_cases.run, world_size, 60.0, case, str(directory)),
        kwargs={"group_timeout_s": group_timeout_s},
    )
    thread.start()
    try:
        wait_for(lambda: journals.is_dir() and len(live_pids(journals)) == world_size, 45.0)
        yield journals
    finally:
        for pid in live_pids(journals):
            os.kill(pid, signal.SIGKILL)
        thread.join()


def report(*directories):
    return json.loads(lens("hang", *directories, "--json").output)


def suspects(directory):
    return [(s["kind"], s["processes"]) for s in report(directory)["suspects"] if s["hangs"]]


@pytest.mark.parametrize("case", ["asleep_in_its_data_loader", "all_reduce_without_a_span"])
def test_the_stack_outside_of_the_collective_is_the_suspect(case, tmp_path):
    with ranks_of(case, 2, tmp_path) as journals:
        wait_for(lambda: suspects(journals) == [("outside", ["rank 1"])])
        result = lens("hang", journals)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[0].startswith("suspect: rank 1 has not moved for ")
    assert lines[0].endswith("1 waits for it: rank 0")
    assert case in lines[2], "the stack of the suspect follows"
    if case == "asleep_in_its_data_loader":
        assert "in train.step > data_loading" in lines[0]


def test_that_nobody_moves_is_said_where_nobody_can_be_named(tmp_path):
    with ranks_of("all_asleep", 2, tmp_path) as journals:
        wait_for(lambda: report(journals)["verdict"] == "unknown")
        result = lens("hang", journals)
    assert result.exit_code == 1
    assert result.output.startswith("cannot tell: nobody has moved for ")
    assert "no span says what it waits for" in result.output.splitlines()[0]
    assert result.output.count("in all_asleep") == 2, "the stacks of all ranks"


def test_side_threads_do_not_hide_who_keeps_the_others_waiting(tmp_path):
    with ranks_of("side_threads_go_on", 2, tmp_path) as journals:
        wait_for(lambda: suspects(journals) == [("stuck", ["rank 1"])])
        (suspect,) = report(journals)["suspects"]
    assert suspect["waiters"] == ["rank 0"]
    assert suspect["text"].endswith("in train.step > data_loading")


def test_those_that_gave_up_name_who_never_came(tmp_path):
    def found():
        return suspects(tmp_path / "run") or suspects(journals)

    with ranks_of("one_never_comes", 3, tmp_path, group_timeout_s=4.0) as journals:
        wait_for(lambda: found()[:1] == [("gave_up", ["rank 2"])])
        result = lens("hang", tmp_path / "run")
    assert result.exit_code == 1
    first = result.output.splitlines()[0]
    assert first.startswith("suspect: ranks 0, 1 gave up after ")
    assert "in all_reduce #0" in first
    assert "; rank 2 never came: it is in train.step > data_loading" in first


def test_a_rank_that_keeps_no_journal_is_not_accused(tmp_path):
    wait = {"lens.op": "all_reduce"}
    code = f"""
        tracer.start_span("step", attributes={wait!r})
        print("ready", flush=True)
        time.sleep(60)
    """
    waiting = run_program(tmp_path, code, LENS_TEST_RANK="1", RANK="1", WORLD_SIZE="2")
    try:
        journals = tmp_path / "journals" / "run"
        wait_for(lambda: report(journals)["verdict"] == "unknown")
        result = lens("hang", journals)
    finally:
        waiting.kill()
        waiting.wait()
    assert result.exit_code == 1
    assert result.output.startswith("cannot tell: ")
    assert "rank 0 is waited for, and nothing is known of it" in result.output
    assert "suspect" not in result.output


@pytest.mark.parametrize("exporter", ["none", "file"])
def test_open_spans_can_be_kept_without_an_exporter(exporter, tmp_path):
    env = {"NEMO_LENS_EXPORTER": exporter, "NEMO_LENS_JOURNAL": "open"}
    program = run_program(
        tmp_path, "tracer.start_span('x'); print('ready', flush=True); input()", **env
    )
    try:
        (process,) = report(tmp_path / "journals" / "run")["processes"]
    finally:
        program.kill()
        program.wait()
    assert [span["name"] for span in process["open_spans"]] == ["x"]


def test_one_that_sigterm_ended_is_one_process(tmp_path):
    code = """
        with tracer.start_as_current_span("outer"), tracer.start_as_current_span("inner"):
            print("ready", flush=True)
            time.sleep(60)
    """
    program = run_program(tmp_path, code)
    program.terminate()
    program.wait()
    (process,) = report(tmp_path / "run", tmp_path / "journals" / "run")["processes"]
    assert process["reason"].lower() == "sigterm"
    assert {span["name"] for span in process["open_spans"]} == {"outer", "inner"}


HEALTHY = {
    "slow steps": "while True:\n    with tracer.start_as_current_span('step'): time.sleep(0.7)",
    "evaluation": "with tracer.start_as_current_span('evaluate'):\n"
    "    while True:\n        with tracer.start_as_current_span('batch'): time.sleep(0.1)",
    "checkpoint of one": "while True:\n"
    "    with tracer.start_as_current_span('step'): time.sleep(0.1 if rank else 60)",
    "idle between steps": "while True:\n"
    "    with tracer.start_as_current_span('step'): pass\n    time.sleep(1.5)",
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_job_that_goes_on_does_not_hang(kind, tmp_path):
    (tmp_path / "journals").mkdir()
    code = "print('ready', flush=True)\n" + HEALTHY[kind]
    programs = [run_program(tmp_path, code, LENS_TEST_RANK=str(rank)) for rank in (0, 1)]
    try:
        time.sleep(4.0)
        result = lens("hang", tmp_path / "journals")
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert (result.exit_code, result.output.split(":")[0]) == (0, "nothing hangs"), result.output


def test_a_run_that_has_ended_is_said_to_have(tmp_path):
    code = "tracer.start_span('x').end(); print('ready', flush=True)"
    run_program(tmp_path, code).wait()
    result = lens("hang", tmp_path / "run")
    assert result.exit_code == 0
    assert "has ended; none of its 1 spans was cut off" in result.output


def test_stacks_are_shown_of_those_that_go_on(tmp_path):
    code = "tracer.start_span('x'); print('ready', flush=True); input()"
    program = run_program(tmp_path, code)
    try:
        result = lens("hang", tmp_path / "journals", "--stacks")
        assert result.output.startswith("nothing hangs")
        assert "rank 5 is at" in result.output
    finally:
        program.kill()
        program.wait()


def test_the_reason_is_a_hang_although_a_side_thread_went_on(tmp_path):
    code = """
        import threading
        def push():
            while True:
                with tracer.start_as_current_span("push"):
                    time.sleep(0.02)
        tracer.start_span("stuck")
        threading.Thread(target=push, daemon=True).start()
        print("ready", flush=True)
        input()
    """
    program = run_program(tmp_path, code)
    try:
        time.sleep(2.5)
        (files,) = find_process_files(tmp_path / "journals" / "run")
        assert files.liveness() is Liveness.ALIVE
        beat = read_journal(files.journal).beat
        assert beat.time_ns - beat.activity_ns > 1e9, "the main thread has not moved"
    finally:
        program.kill()
        program.wait()
