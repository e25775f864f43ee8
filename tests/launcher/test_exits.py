"""How a process ended that is another's child."""

import os
import signal

import pytest

from lens_core.journal.notes import exit_note_path, read_exit_note, write_exit_note
from lens_core.journal.process_identity import start_ticks
from lens_tools.launch.exits import exit_status_of, parent_of


@pytest.fixture
def child():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(7)
    os.close(read)
    pidfd = os.pidfd_open(pid)
    yield pid, pidfd
    os.close(pidfd)
    os.close(write)


def is_told_afterwards():
    return tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 15)


def ended(pid):
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_while_its_parent_has_not_asked(child):
    pid, pidfd = child
    ticks = start_ticks(pid)
    assert exit_status_of(pidfd, pid, ticks) is None, "it lives"
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    assert exit_status_of(pidfd, pid, ticks) == -signal.SIGKILL
    os.waitpid(pid, 0)


@pytest.mark.skipif(not is_told_afterwards(), reason="Linux before 6.15 forgets it")
def test_when_its_parent_was_faster(child):
    pid, pidfd = child
    ticks = start_ticks(pid)
    os.kill(pid, signal.SIGUSR1)
    os.waitpid(pid, 0)
    assert exit_status_of(pidfd, pid, ticks) == -signal.SIGUSR1


def test_another_with_its_number_is_not_taken_for_it(child):
    pid, _ = child
    ticks = start_ticks(pid)
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    with open(os.devnull) as no_pidfd:
        assert exit_status_of(no_pidfd.fileno(), pid, ticks) == -signal.SIGKILL
        assert exit_status_of(no_pidfd.fileno(), pid, ticks + 1) is None
    os.waitpid(pid, 0)


def test_parents():
    assert parent_of(os.getpid()) == os.getppid()
    assert parent_of(2**22 + 1) is None


def test_notes(tmp_path):
    journal = tmp_path / "spans-h-1-2.lensj"
    stem = tmp_path / "spans-h-1-2"
    write_exit_note(journal, -9)
    assert list(tmp_path.iterdir()) == [], "there is no journal that it would belong to"
    journal.touch()
    write_exit_note(journal, -9)
    assert read_exit_note(stem) == -9
    write_exit_note(journal, 3)
    assert read_exit_note(stem) == 3
    assert sorted(tmp_path.iterdir()) == [exit_note_path(stem), journal]


@pytest.mark.parametrize("text", ["", "nine", "9999", "-9\n-9", "\u0669", "0x9", "-"])
def test_a_note_that_is_none(text, tmp_path):
    stem = tmp_path / "spans-h-1-2"
    exit_note_path(stem).write_text(text)
    assert read_exit_note(stem) is None


def test_a_note_that_is_a_pipe(tmp_path):
    stem = tmp_path / "spans-h-1-2"
    os.mkfifo(exit_note_path(stem))
    assert read_exit_note(stem) is None
