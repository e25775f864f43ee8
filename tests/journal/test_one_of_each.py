"""What is done in one place: names of files, files that appear whole, a journal that is parsed."""

import os
import threading

import pytest

from lens_core.journal.location import journal_directory, search
from lens_core.journal.read import reader
from lens_core.journal.recover.recovery import DirectorySink, recover
from lens_core.shared_files import file_name, write_atomically
from lens_core.telemetry.export.files import run_directory
from lens_tools.hang.snapshot import take_snapshot
from tests.journal.test_recovery import kill, run_program


@pytest.mark.parametrize("run_id", ["plain-1", "a/b c", "..", "", "r" * 300, "\U0001f600" * 300])
def test_a_run_id_names_the_directory_of_its_files_and_of_its_journals_alike(run_id, tmp_path):
    name = run_directory(tmp_path / "runs", run_id).name
    assert journal_directory(str(tmp_path), run_id).name == name
    assert file_name(name) == name, "a name that was made so is found by that name"
    assert len(os.fsencode(name)) <= 200
    (tmp_path / name).mkdir()  # a file system takes it


def test_two_long_ids_do_not_share_a_directory():
    assert file_name("r" * 300 + "a") != file_name("r" * 300 + "b")


def test_a_long_run_id_leads_to_its_journals(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_LENS_JOURNAL_DIR", str(tmp_path / "journals"))
    run_id = "r" * 300
    directory = journal_directory(str(tmp_path / "journals"), run_id)
    directory.mkdir(parents=True)
    run = run_directory(tmp_path / "runs", run_id)
    for name in (run_id, str(run)):
        assert search(name).directories == [directory]


def test_who_reads_a_file_that_is_written_sees_it_whole(tmp_path):
    path = tmp_path / "file"
    contents = [b"a" * 100_000, b"b" * 100_000]
    write_atomically(path, [contents[0]])
    done = threading.Event()

    def write():
        for number in range(300):
            content = contents[number % 2]
            write_atomically(path, [content[:7], content[7:]])
        done.set()

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    while not done.is_set():
        assert path.read_bytes() in contents
    for writer in writers:
        writer.join()
    assert list(tmp_path.iterdir()) == [path], "nothing else is left"
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_written_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, [b"before"])

    def content():
        yield b"half"
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        write_atomically(path, content())
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_journal_is_parsed_once(tmp_path, monkeypatch):
    parsed = []
    blocks = reader._read_blocks

    def count(*arguments):
        parsed.append(arguments)
        blocks(*arguments)

    monkeypatch.setattr(reader, "_read_blocks", count)
    kill(run_program(tmp_path, "tracer.start_span('x'); print('ready', flush=True); input()"))
    directory = tmp_path / "journals" / "run"
    assert len(take_snapshot([directory]).processes) == len(parsed) == 1
    assert recover([directory], lambda meta: DirectorySink(tmp_path / "run")).truncated == 1
    assert len(parsed) == 2
