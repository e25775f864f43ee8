"""``lens run``: each signal reaches the command once, whoever sends it, and stops what it would."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.journal.killing import environment, wait_for
from tests.launcher.running import lens_run, python, running

#: Writes each signal that it gets; ends a second after the first of them.
COUNTER = """
import os, signal, time
got = []
def handle(number, frame):
    got.append(number)
    os.write(1, f"{signal.Signals(number).name}\\n".encode())
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM"):
    signal.signal(getattr(signal, name), handle)
os.write(1, b"ready\\n")
while not got:
    time.sleep(0.05)
end = time.monotonic() + 1.0
while time.monotonic() < end:
    time.sleep(0.05)
"""

#: A shell's job control, for one job: it continues what stops, in the foreground.
JOB_CONTROL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = os.fork()
if job == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execvp(sys.argv[1], sys.argv[1:])
while True:
    _, status = os.waitpid(job, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        break
    os.tcsetpgrp(0, os.getpid())
    print("stopped by", signal.Signals(os.WSTOPSIG(status)).name, flush=True)
    input()
    os.tcsetpgrp(0, job)
    print("continued", flush=True)
    os.killpg(job, signal.SIGCONT)
print("status", os.waitstatus_to_exitcode(status), flush=True)
"""

SIGNALS = ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM"]


@pytest.mark.parametrize("name", SIGNALS)
def test_one_that_is_sent_to_lens_run_alone_is_passed_on(name, tmp_path):
    with running(tmp_path, python(COUNTER)) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(getattr(signal, name))
        out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == (f"{name}\n", 0)


@pytest.mark.parametrize("name", SIGNALS)
def test_one_that_is_sent_to_all_is_not_passed_on(name, tmp_path):
    """A launcher that is told to end a second time may leave its workers behind."""
    with running(tmp_path, python(COUNTER)) as process:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, getattr(signal, name))
        out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == (f"{name}\n", 0)


@pytest.mark.parametrize("pattern", ["a_name_of_its_own", " run --"])
def test_one_that_is_sent_by_name(pattern, tmp_path):
    """As ``pkill -f`` does: by the command's name to both, by that of lens run to it alone."""
    with running(tmp_path, [*python(COUNTER), "a_name_of_its_own"]) as process:
        assert process.stdout.readline() == "ready\n"
        group = [process.pid, *children(process.pid)]
        meant = [pid for pid in group if pattern in arguments(pid)]
        assert len(meant) == (1 if pattern == " run --" else 3)
        for pid in meant:
            os.kill(pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == ("SIGTERM\n", 0)


def test_several_at_once(tmp_path):
    with running(tmp_path, python(COUNTER)) as process:
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGTERM, signal.SIGINT):
            os.killpg(process.pid, number)
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=30)
    assert sorted(out.split()) == ["SIGINT", "SIGTERM", "SIGUSR1"]


def test_without_its_witness_all_are_passed_on(tmp_path):
    with running(tmp_path, python(COUNTER)) as process:
        assert process.stdout.readline() == "ready\n"
        witness = min(children(process.pid))  # the older of the two
        os.kill(witness, signal.SIGKILL)
        wait_for(lambda: witness not in children(process.pid))
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    assert out == "SIGTERM\n"


def test_one_that_ends_the_command(tmp_path):
    with running(tmp_path, python("print(1, flush=True); import time; time.sleep(60)")) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM


def test_under_nohup(tmp_path):
    command = ["nohup", *lens_run(), *python(COUNTER.replace('"SIGHUP", ', ""))]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(tmp_path),
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == "SIGTERM\n"
    finally:
        process.kill()
        process.wait()


def test_stopped_and_continued_alone(tmp_path):
    """The job stops with it, and goes on with it."""
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with running(tmp_path, python(code)) as process:
        command = int(process.stdout.readline())
        # A group whose parent is of another session is not stopped by the terminal's signal.
        assert os.getsid(process.pid) == os.getsid(0)
        process.send_signal(signal.SIGTSTP)
        wait_for(lambda: state(command) == state(process.pid) == "T")
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: state(command) == state(process.pid) == "S")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM


def test_a_command_that_does_not_stop_goes_on(tmp_path):
    code = """
    import os, signal, sys
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    print("ready", flush=True)
    print("read", sys.stdin.readline(), flush=True)
    """
    with terminal(tmp_path, code) as master:
        read_until(master, "ready")
        os.write(master, b"\x1a")
        os.write(master, b"typed\n")
        seen = read_until(master, "status 0")
    assert "read typed" in seen
    assert "stopped" not in seen


@contextlib.contextmanager
def terminal(directory, code):
    """The command in the foreground of a terminal of its own, with job control."""
    pid, master = pty.fork()
    if pid == 0:
        arguments = python(JOB_CONTROL, *lens_run(), *python(code))
        os.execve(sys.executable, arguments, environment(directory))
    try:
        yield master
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.close(master)
        os.waitpid(pid, 0)


def read_until(master, text, timeout_s=30.0):
    seen, deadline = "", time.monotonic() + timeout_s
    while text not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([master], [], [], 0.2)[0]:
            seen += os.read(master, 4096).decode(errors="replace")
    return seen


def test_the_terminals_interrupt(tmp_path):
    with terminal(tmp_path, COUNTER.replace("while not got", "while len(got) < 2")) as master:
        read_until(master, "ready")
        os.write(master, b"\x03")
        first = read_until(master, "SIGINT\r\n")
        time.sleep(0.5)
        os.write(master, b"\x03")
        rest = read_until(master, "status")
    assert (first + rest).count("SIGINT") == 2


def test_the_terminals_stop(tmp_path):
    code = """
    import os, sys
    print("ready", flush=True)
    print("read", sys.stdin.readline(), flush=True)
    sys.exit(5)
    """
    with terminal(tmp_path, code) as master:
        read_until(master, "ready")
        os.write(master, b"\x1a")
        read_until(master, "stopped by SIGTSTP")
        os.write(master, b"\n")
        read_until(master, "continued")
        os.write(master, b"typed\n")
        seen = read_until(master, "status 5")
    assert "read typed" in seen


def children(parent):
    return [pid for pid in pids() if field(pid, 1) == str(parent)]


def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def field(pid, index):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[index]
    except OSError:
        return ""


def state(pid):
    return field(pid, 0)


def arguments(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode()
    except OSError:
        return ""
