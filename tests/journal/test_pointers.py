"""A run's directory says where its journals are, to who may look into them and to nobody else."""

import json
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from lens_core.journal.location import search
from lens_core.journal.pointers import follow_pointers, write_pointer
from lens_core.journal.process_identity import host_name
from lens_tools.cli import main
from lens_tools.records.read import read_records
from tests.journal.killing import environment, wait_for
from tests.journal.test_recovery import run_program

OPEN = """
    with tracer.start_as_current_span("open", attributes={"lens.op": "recv", "lens.peer.rank": 1}):
        print("ready", flush=True)
        time.sleep(60)
"""
ANOTHER_USER = 12_345


@pytest.fixture(autouse=True)
def a_shell_that_knows_nothing_of_the_job(monkeypatch):
    monkeypatch.delenv("NEMO_LENS_JOURNAL_DIR", raising=False)


@pytest.fixture
def run(tmp_path):
    """A run of one process, whose directory is asked for its journals once the pointer is there."""
    process = run_program(tmp_path, OPEN)
    wait_for(lambda: pointers(tmp_path / "run"))
    yield process, tmp_path / "run"
    process.kill()
    process.wait()


def pointers(directory):
    return [path for path in directory.glob(".journals-*") if path.suffix == ".json"]


def lens(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_live_run_is_found_by_its_directory(run):
    process, directory = run
    report = json.loads(lens("hang", directory, "--json").output)
    assert [one["pid"] for one in report["processes"]] == [process.pid]
    assert report["problems"] == []
    shown = lens("stacks", directory)
    assert (shown.exit_code, f"process {process.pid}" in shown.output) == (0, True)
    assert "1 left alone, alive" in lens("recover", directory).output


def test_a_dead_run_is_recovered_by_its_directory(run):
    process, directory = run
    process.kill()
    process.wait()
    result = lens("recover", directory, "--exit-status", f"{process.pid}:-{signal.SIGKILL}")
    assert result.exit_code == 0, result.output
    (span,) = read_records(directory).spans
    assert span.attributes["nemo.span.truncated.reason"] == "sigkill"
    assert list((directory.parent / "journals").iterdir()) == [], "no empty directory is left"
    again = lens("recover", directory)
    assert again.output.startswith("0 processes recovered"), "of what is gone nothing is said"


def test_lens_ship_finds_them_too(run):
    process, directory = run
    process.kill()
    process.wait()
    result = lens("ship", directory, "--otlp", "http://127.0.0.1:9")
    assert "1 came from journals" in result.output


def test_one_pointer_for_all_processes_of_a_host(run):
    _, directory = run
    (first,) = pointers(directory)
    before = first.stat()
    second = run_program(directory.parent, OPEN)
    second.kill()
    second.wait()
    assert [path.name for path in directory.glob(".journals-*")] == [first.name]
    after = first.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert after.st_mode & 0o777 == 0o600


def test_where_none_can_be_left_the_run_goes_on(tmp_path):
    (tmp_path / "run").write_text("a file where the directory would be")
    code = """
        from lens_core.diagnostics import diagnostics
        while not diagnostics.count("journal.pointer"):
            time.sleep(0.01)
        assert handle.is_exporting
        print("ready", flush=True)
        input()
    """
    process = run_program(tmp_path, code)
    process.communicate("\n", timeout=30)
    assert process.returncode == 0


def test_no_directory_is_made_for_it_alone(tmp_path):
    """Where spans go to a receiver a run has no directory, unless something is spilled."""
    code = """
from lens_core import NemoLensConfig, setup_telemetry
import time
setup_telemetry(NemoLensConfig.from_env())
time.sleep(0.5)
"""
    subprocess.run(
        [sys.executable, "-c", code],
        env=environment(tmp_path, NEMO_LENS_EXPORTER="console"),
        check=True,
        timeout=60,
    )
    assert not (tmp_path / "run").exists()


def pointer(directory, host, target, name=".journals-x.json"):
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(json.dumps({"host": host, "directory": str(target)}))
    return path


def test_another_hosts_journals_are_said_to_be_there(tmp_path):
    pointer(tmp_path / "run", "node7", "/dev/shm/lens-1/run")
    words = "what journals there are of host node7 are on that host, in /dev/shm/lens-1/run"
    hung = lens("hang", tmp_path / "run")
    assert hung.exit_code == 2
    assert words in hung.output
    assert words in lens("recover", tmp_path / "run").output
    assert words in lens("stacks", tmp_path / "run").output


def test_another_hosts_journals_beside_ones_that_are_here(run):
    _, directory = run
    pointer(directory, "node7", "/dev/shm/lens-1/run")
    result = lens("hang", directory, "--json")
    report = json.loads(result.output)
    assert len(report["processes"]) == 1
    assert ["node7" in problem for problem in report["problems"]] == [True]
    assert "node7" in lens("hang", directory).output


def test_a_directory_that_hosts_share_is_followed(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    (shared / "spans-node7-1-2.lensj").touch()
    path = pointer(tmp_path / "run", "node7", shared)
    assert follow_pointers([path]).directories == [shared]
    assert search(str(tmp_path / "run")).directories == [tmp_path / "run", shared]


def test_one_that_leads_to_what_is_gone_says_nothing(tmp_path):
    path = pointer(tmp_path / "run", host_name(), tmp_path / "gone")
    followed = follow_pointers([path])
    assert (followed.directories, followed.notes) == ([], [])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"host": 5, "directory": "/tmp"}',
        b'{"host": "", "directory": "/tmp"}',
        b'{"host": "HOST", "directory": 5}',
        b'{"host": "HOST", "directory": "relative"}',
        b'{"host": "HOST", "directory": "/a\\u0000b"}',
        b'{"host": "HOST", "directory": "/' + b"x" * 100_000 + b'"}',
    ],
    ids=lambda content: str(content[:50]),
)
def test_garbage_is_reported_and_leads_nowhere(content, run):
    process, directory = run
    (directory / ".journals-g.json").write_bytes(content.replace(b"HOST", host_name().encode()))
    result = lens("recover", directory)
    assert result.exit_code == 0
    assert ".journals-g.json is no pointer to journals" in result.output
    assert "1 left alone, alive" in result.output, "the other one is followed"
    assert process.poll() is None


def test_what_stands_in_a_pointer_moves_no_cursor(tmp_path):
    path = pointer(tmp_path, "\x1b[2Jnode", "/\x1b[2J\n/x")
    (note,) = follow_pointers([path]).notes
    assert note == "what journals there are of host ?[2Jnode are on that host, in /?[2J?/x"


def test_a_pointer_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".journals-f.json")
    assert "is not a regular file" in follow_pointers([tmp_path / ".journals-f.json"]).notes[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to somebody else")
@pytest.mark.parametrize("whose", ["pointer", "directory"])
def test_nothing_of_another_user_is_followed(whose, run):
    process, directory = run
    process.kill()
    process.wait()
    (path,) = pointers(directory)
    journals = directory.parent / "journals" / "run"
    os.chown(path if whose == "pointer" else journals, ANOTHER_USER, -1)
    before = sorted(entry.name for entry in journals.iterdir())
    result = lens("recover", directory)
    assert result.output.startswith("lens: ")
    assert "0 processes recovered" in result.output
    assert sorted(entry.name for entry in journals.iterdir()) == before


def test_a_directory_that_others_can_write_to_is_not_followed(run):
    process, directory = run
    process.kill()
    process.wait()
    journals = directory.parent / "journals" / "run"
    journals.chmod(0o777)
    result = lens("recover", directory)
    assert "does not belong to this user alone" in result.output
    assert "0 processes recovered" in result.output
    assert "1 processes recovered" in lens("recover", journals).output, "it was named by a person"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to somebody else")
def test_a_journals_word_does_not_make_us_write_where_another_reads(run, tmp_path):
    process, directory = run
    process.kill()
    process.wait()
    os.chown(directory, ANOTHER_USER, -1)
    journals = tmp_path / "journals" / "run"
    result = lens("recover", journals)
    assert result.exit_code == 1
    said = f"{directory} does not belong to this user; give another: --output DIR"
    assert said in result.output.replace("\n", "")
    assert not list(directory.glob("recovered-*"))
    assert list(journals.glob("*.lensj"))
    assert lens("recover", journals, "--output", tmp_path / "mine").exit_code == 0
    assert len(read_records(tmp_path / "mine").spans) == 1


def test_a_link_in_the_place_of_a_pointer_is_replaced(tmp_path):
    """What it leads to is not written to."""
    (tmp_path / "precious").write_text("as it was")
    write_pointer(tmp_path / "run", tmp_path / "j")
    (path,) = pointers(tmp_path / "run")
    path.unlink()
    path.symlink_to(tmp_path / "precious")
    write_pointer(tmp_path / "run", tmp_path / "j")
    assert (tmp_path / "precious").read_text() == "as it was"
    assert json.loads(path.read_text())["directory"] == str(tmp_path / "j")


def test_many_at_once_leave_one(tmp_path):
    code = f"""
import sys
from pathlib import Path
from lens_core.journal.pointers import write_pointer
for _ in range(300):
    write_pointer(Path({str(tmp_path / "run")!r}), Path("/j"))
    for path in Path({str(tmp_path / "run")!r}).glob("*.json"):
        path.unlink(missing_ok=True)
"""
    several = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(60) for process in several] == [0, 0, 0]
    assert list((tmp_path / "run").glob("*.part")) == []
