"""``lens run``: the command is as without it, and what its killed processes left is recovered."""

import os
import signal
import socket
import stat
import subprocess

import pytest

from lens_tools.records.read import read_records
from tests.journal.killing import environment, wait_for
from tests.launcher.running import lens_run, python, run, running, traced
from tests.telemetry.harness import receiving


def reasons(directory):
    spans = [span for span in read_records(directory / "run").spans if span.truncated]
    return {span.name: span.attributes["nemo.span.truncated.reason"] for span in spans}


@pytest.mark.parametrize("status", [0, 1, 3, 255])
def test_exit_status(status, tmp_path):
    assert run(tmp_path, ["sh", "-c", f"exit {status}"]) == (status, "", "")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGABRT", "SIGSEGV", "SIGTERM", "SIGINT", "SIGPIPE"])
def test_death_by_a_signal(name, tmp_path):
    number = getattr(signal, name)
    assert run(tmp_path, ["sh", "-c", f"kill -{int(number)} $$"])[0] == -number
    shell = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", *lens_run(), "sh", "-c", f"kill -{int(number)} $$"],
        env=environment(tmp_path),
        capture_output=True,
        check=False,
    )
    assert shell.returncode == 128 + number or name == "SIGINT"


def test_commands_that_cannot_be_started(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("not for execution")
    for command, status, words in [
        ("nonesuch-command", 127, "lens run: nonesuch-command: command not found\n"),
        ("/no/such/file", 127, "lens run: /no/such/file: no such file\n"),
        (str(plain), 126, f"lens run: {plain}: Permission denied\n"),
        (str(tmp_path), 126, f"lens run: {tmp_path}: Permission denied\n"),
    ]:
        assert run(tmp_path, [command, "argument"]) == (status, "", words)


def test_a_script_without_an_interpreter_is_one_for_the_shell(tmp_path):
    script = tmp_path / "script"
    script.write_text('echo "$1"; exit 4\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    assert run(tmp_path, [str(script), "an argument"]) == (4, "an argument\n", "")


#: All that a program can see of how it was started.
SURROUNDINGS = """
import os, sys
print(sorted(os.environ.items()))
print(os.getcwd(), os.getpgrp() == os.getpid(), os.getsid(0), os.umask(0))
print(len(os.listdir("/proc/self/fd")))
print({fd: os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2, int(sys.argv[1]))})
for line in open("/proc/self/status"):
    if line.startswith(("SigBlk", "SigIgn")):
        # Not 32 and 33, which are the C library's own.
        print(line[:6], hex(int(line[8:], 16) & ~(3 << 31)))
print(os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.parametrize("ignored", [[], [signal.SIGHUP], [signal.SIGINT, signal.SIGQUIT]])
def test_the_command_is_started_as_it_would_be_without(ignored, tmp_path):
    """Files that are not the standard ones too: a launcher before us may hand some to its ranks."""
    read, write = os.pipe()

    def prepare():
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})

    def seen(prefix):
        with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w") as err:
            subprocess.run(
                [*prefix, *python(SURROUNDINGS, write)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=[write],
                preexec_fn=prepare,
                env=environment(tmp_path),
                check=True,
            )
            return (tmp_path / "out").read_text().replace("True", "False")

    try:
        assert seen(lens_run()) == seen([])
    finally:
        os.close(read)
        os.close(write)


def test_what_reads_the_output_waits_for_the_command_only(tmp_path):
    """Recovery goes on after it, and its reader has other things to do."""
    code = "import os; os.close(1); os.close(0); import time; time.sleep(30)"
    with running(tmp_path, python(code)) as process:
        assert process.stdout.read() == ""
        assert process.poll() is None


@pytest.mark.parametrize(
    ("end", "reason", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "sigkill", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGUSR1)", "sigusr1", -signal.SIGUSR1),
        ("os._exit(3)", "exit", 3),
    ],
)
def test_the_command_itself_dies(end, reason, status, tmp_path):
    code, _, err = run(tmp_path, traced(end))
    assert code == status
    assert reasons(tmp_path) == {"open": reason}
    assert "1 process kept a journal; cut off, the first one first: process " in err
    assert f"recovered spans: 1 open, 0 ended into {tmp_path / 'run'}\n" in err
    assert f"lens hang {tmp_path / 'run'}\n" in err
    assert list((tmp_path / "journals").iterdir()) == []


def test_a_command_that_ends_well(tmp_path):
    code, _, err = run(tmp_path, traced("time.sleep(0.5); span.end(); handle.shutdown()"))
    assert (code, err) == (0, "lens run: 1 process kept a journal; none was killed or failed\n")
    assert (
        run(tmp_path, traced("time.sleep(0.5); span.end(); handle.shutdown()"), "--quiet")[2] == ""
    )


@pytest.mark.parametrize("off", [{"NEMO_LENS_ENABLED": "0"}, {"NEMO_LENS_JOURNAL": "off"}])
def test_without_journals_nothing_is_said(off, tmp_path):
    assert run(tmp_path, traced("os._exit(3)"), **off) == (3, "", "")


LAUNCHER = """
import os, signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
{end}
"""


def test_a_worker_whose_launcher_was_killed(tmp_path):
    """It is ours then, as torchrun's are when torchrun itself is killed."""
    worker = traced(
        """
        parent = os.getppid()
        os.kill(parent, signal.SIGKILL)
        while os.getppid() == parent:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )[2]
    code, _, err = run(tmp_path, python(LAUNCHER.format(end="worker.wait()"), worker))
    assert code == -signal.SIGKILL
    assert reasons(tmp_path) == {"open": "sigkill"}
    assert "SIGKILL" in err


def test_a_worker_that_its_launcher_reaped_and_told_nobody_of(tmp_path):
    """As the agent of torchrun does, which asks ten times a second."""
    end = """
while worker.poll() is None:
    time.sleep(0.1)
sys.exit(1)
"""
    worker = traced("time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)")[2]
    code, _, _ = run(tmp_path, python(LAUNCHER.format(end=end), worker))
    assert code == 1
    assert reasons(tmp_path) == {"open": "sigkill"}


def test_a_worker_that_goes_on_is_left_alone(tmp_path):
    """As under a shell, the command's end is the end; who has not ended yet is named."""
    worker = traced("os.close(0); os.close(1); os.close(2); time.sleep(60)")[2]
    end = "print(worker.pid, flush=True); time.sleep(2); os._exit(0)"
    code, out, err = run(tmp_path, python(LAUNCHER.format(end=end), worker), "--grace", "0.5")
    pid = int(out)
    try:
        assert code == 0
        assert f"still running, left to lens recover: process {pid}\n" in err
        os.kill(pid, 0)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_one_in_another(tmp_path):
    command = [*lens_run(), *traced("os.kill(os.getpid(), signal.SIGKILL)")]
    code, _, _ = run(tmp_path, command)
    assert code == -signal.SIGKILL
    assert reasons(tmp_path) == {"open": "sigkill"}


def test_one_after_the_other(tmp_path):
    for number in (signal.SIGKILL, signal.SIGUSR1):
        assert run(tmp_path, traced(f"os.kill(os.getpid(), {int(number)})"))[0] == -number
    found = [span.attributes["nemo.span.truncated.reason"] for span in read_records(tmp_path).spans]
    assert found == ["sigkill", "sigusr1"]


def test_killed_itself_it_takes_nothing_with_it(tmp_path):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with running(tmp_path, python(code)) as process:
        pid = int(process.stdout.readline())
        group = {pid, process.pid, *_group(process.pid)}
        assert len(group) == 3, "the command, lens run, and its witness"
        process.kill()
        process.wait()
        wait_for(lambda: _group(process.pid) == {pid})


def _group(number):
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == number and fields[0] not in "ZX":
                found.add(int(name))
    return found


@pytest.fixture
def silent_receiver():
    """A receiver that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        yield server, f"http://127.0.0.1:{server.getsockname()[1]}"


def test_recovery_takes_no_longer_than_it_may(silent_receiver, tmp_path):
    _, endpoint = silent_receiver
    command = traced("os._exit(3)")
    code, _, err = run(tmp_path, command, "--otlp", endpoint, "--timeout", "0.5")
    assert code == 3
    assert "recovery was ended: too long" in err
    assert list((tmp_path / "journals" / "run").glob("*.lensj")), "it is there for lens recover"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_recovery_can_be_interrupted(number, silent_receiver, tmp_path):
    server, endpoint = silent_receiver
    command = traced("os._exit(3)")
    with running(tmp_path, command, "--otlp", endpoint, "--timeout", "600") as process:
        connection, _ = server.accept()
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        connection.close()
    assert process.returncode == 3
    assert "recovery was interrupted" in err


def test_with_its_error_output_closed(tmp_path):
    done = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", *lens_run(), *traced("os._exit(3)")],
        env=environment(tmp_path),
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 3
    assert reasons(tmp_path) == {"open": "exit"}


def test_journals_that_the_code_puts_elsewhere(tmp_path):
    code = f"""
    import os
    from lens_core import NemoLensConfig, setup_telemetry
    config = NemoLensConfig.from_env()
    config.journal_dir = {str(tmp_path / "elsewhere")!r}
    setup_telemetry(config).tracer.start_span("open")
    os._exit(3)
    """
    assert run(tmp_path, python(code), "--journals", str(tmp_path / "elsewhere"))[0] == 3
    assert reasons(tmp_path) == {"open": "exit"}


def test_spans_that_a_receiver_gets_go_to_it(tmp_path):
    with receiving() as receiver:
        settings = {"NEMO_LENS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        code, _, err = run(tmp_path, traced("os._exit(3)"), **settings)
        ((span, _),) = receiver.spans()
    assert code == 3
    reason = {pair.key: pair.value.string_value for pair in span.attributes}
    assert reason["nemo.span.truncated.reason"] == "exit"
    assert "lens run: recovered spans: 1 open, 0 ended\n" in err
    assert not (tmp_path / "run").exists()


def test_spans_that_are_an_agents_are_left_to_it(tmp_path):
    code, _, _ = run(tmp_path, traced("os._exit(3)"), NEMO_LENS_EXPORTER="journal")
    assert code == 3
    (journal,) = (tmp_path / "journals" / "run").glob("*.lensj")
    assert journal.with_suffix(".exit").read_text() == "3\n"


def test_bad_seconds_are_refused(tmp_path):
    for value in ("nan", "inf", "-1"):
        code, _, err = run(tmp_path, ["true"], "--timeout", value)
        assert code == 2
        assert "no number of seconds" in err
