"""``lens hang`` names the one to blame: on the live job, on the dead one, and after recovery."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner

from lens_core.journal.read.liveness import Liveness
from lens_core.journal.read.process_files import find_process_files
from lens_core.journal.read.reader import read_journal
from lens_core.journal.recover.recovery import DirectorySink, recover
from lens_tools.cli import main
from tests.gloo import rank_outcomes
from tests.journal import hang_cases
from tests.journal.killing import wait_for
from tests.journal.test_recovery import run_program

CASES = {
    "sleeps_before_its_send": ("stuck", ["rank 1"], "time.sleep", "sleeps_before_its_send"),
    "different_collectives": ("mismatch", ["rank 2"], "barrier #1", None),
    "sends_in_a_circle": ("cycle", ["rank 0", "rank 1", "rank 2", "rank 3"], "wait for each", None),
    "one_is_killed": ("dead", ["rank 2"], "died", None),
    "stuck_in_python": ("stuck", ["rank 3"], "waits for nobody", "spin_for_ever"),
}


def lens(command, *arguments):
    # What the tests wait for is shorter than what counts as a hang by default.
    options = ["--after", "3"] if command == "hang" else []
    return CliRunner().invoke(main, [command, *options, *map(str, arguments)])


def journals(directory):
    return [read_journal(files.journal) for files in find_process_files(directory)]


def live_pids(directory):
    return [
        read_journal(files.journal).process.pid
        for files in find_process_files(directory)
        if files.liveness() is Liveness.ALIVE
    ]


def hangs(directory, alive):
    """Whether all processes are there and nothing has moved for a while."""
    if not directory.is_dir():
        return False
    images = journals(directory)
    now_ns = time.time_ns()
    return (
        len(images) == 4
        and len(live_pids(directory)) == alive
        and all(image.beat and now_ns - image.beat.activity_ns > 4e9 for image in images)
    )


def check(result, kind, names, text, frame):
    assert result.exit_code == 1, result.output
    report = json.loads(result.output)
    suspect = report["suspects"][0]
    assert (suspect["kind"], suspect["processes"]) == (kind, names), report["suspects"]
    assert len(suspect["waiters"]) + len(names) == 4
    if kind != "stuck":
        assert text in suspect["text"]
    if frame is not None:
        (stack,) = [p["stack"] for p in report["processes"] if p["name"] in names]
        assert any(frame in line for line in stack[:2]), stack
    return suspect


@pytest.mark.parametrize("case", CASES)
def test_suspect(case, tmp_path):
    kind, names, text, frame = CASES[case]
    directory = tmp_path / "journals" / "run"
    ranks = threading.Thread(
        target=rank_outcomes,
        args=(hang_cases.run, 4, 60.0, case, str(tmp_path)),
        kwargs={"group_timeout_s": 120.0},
    )
    ranks.start()
    try:
        wait_for(lambda: hangs(directory, alive=3 if case == "one_is_killed" else 4), 45.0)
        check(lens("hang", directory, "--json"), kind, names, text, frame)
        shown = lens("hang", directory).output.splitlines()
        assert shown[0].startswith("suspect: ")
        assert all(name in shown[0] for name in names)
    finally:
        for pid in live_pids(directory):
            os.kill(pid, signal.SIGKILL)
        ranks.join()
    check(lens("hang", directory, "--json"), kind, names, text, frame)
    recovered = recover([directory], lambda meta: DirectorySink(tmp_path / "run"))
    assert len(recovered.processes) == 4
    assert recovered.problems == []
    check(lens("hang", tmp_path / "run", "--json"), kind, names, text, frame)


def test_nothing_there(tmp_path):
    result = lens("hang", tmp_path)
    assert result.exit_code == 2
    assert "no journal" in result.output


def test_ranks_of_several_hosts(tmp_path, monkeypatch):
    """Their directories are given; of another host's processes only the signs of life are known."""
    code = """
        tracer.start_span("{name}", attributes={attributes!r})
        print("ready", flush=True)
        time.sleep(60)
    """
    programs = [
        ("recv", {"lens.op": "recv", "lens.peer.rank": 5}),
        ("compute", {}),
    ]
    processes = []
    for index, (name, attributes) in enumerate(programs):
        (tmp_path / str(index)).mkdir()
        source = code.format(name=name, attributes=attributes)
        processes.append(run_program(tmp_path / str(index), source, LENS_TEST_RANK=str(4 + index)))
    try:
        directories = [tmp_path / str(index) / "journals" / "run" for index in range(2)]
        monkeypatch.setattr("lens_core.journal.read.liveness.boot_id", lambda: "another")
        monkeypatch.setattr("lens_core.journal.read.liveness.host_name", lambda: "another")
        report = json.loads(lens("hang", *directories, "--json").output)
        assert [process["name"] for process in report["processes"]] == ["rank 4", "rank 5"]
        assert not report["is_live"]
        assert report["suspects"][0]["processes"] == ["rank 5"]
        assert report["suspects"][0]["waiters"] == ["rank 4"]
        wait_for(lambda: lens("hang", directories[0]).exit_code == 1)
        shown = lens("hang", directories[0]).output
        assert shown.startswith("cannot tell: nobody has moved for ")
        assert "unknown: rank 5 is waited for, and nothing is known of it" in shown
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_rank_that_is_slow_is_no_hang(tmp_path):
    """It computes for a few seconds, and the other one waits for it; that is so for every step."""
    (tmp_path / "journals").mkdir()
    programs = [
        run_program(
            tmp_path,
            f"""
            tracer.start_span("step", attributes={attributes!r})
            print("ready", flush=True)
            time.sleep(60)
            """,
            LENS_TEST_RANK=str(rank),
        )
        for rank, attributes in enumerate([{"lens.op": "recv", "lens.peer.rank": 1}, {}])
    ]
    try:
        time.sleep(3.0)
        command = [sys.executable, "-m", "lens_tools.cli", "hang", str(tmp_path / "journals")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0
        lines = done.stdout.splitlines()
        assert lines[0].startswith("slow: rank 1 waits for nobody and has not moved for ")
        assert lines[0].endswith("1 waits for it: rank 0")
        assert any(
            line.startswith("not a hang so far: nobody has kept others waiting for 30 s")
            for line in lines
        )
        done = subprocess.run(
            [*command, "--after", "2"], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout.split()[0]) == (1, "suspect:")
        for redirection in (">&-", ">/dev/full"):
            full = ["sh", "-c", f'"$@" {redirection}', "sh", *command, "--after", "2"]
            done = subprocess.run(full, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 2
            assert "lens: the report cannot be written" in done.stderr
            assert "Traceback" not in done.stderr
        short = ["sh", "-c", '("$@"; echo $? >status) | true', "sh", *command, "--after", "2"]
        subprocess.run(short, cwd=tmp_path, check=True, timeout=60)
        assert (tmp_path / "status").read_text() == "1\n", (
            "nobody read it, and it hangs all the same"
        )
    finally:
        for program in programs:
            program.kill()
            program.wait()


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf"])
def test_seconds_that_are_none(seconds, tmp_path):
    for arguments in (
        ["hang", str(tmp_path), "--after", seconds],
        ["stacks", str(tmp_path), "--timeout", seconds],
        ["agent", str(tmp_path), "--otlp", "http://127.0.0.1:4318", "--interval", seconds],
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert "is no number of seconds" in result.output
