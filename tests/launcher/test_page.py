"""What docs/hangs.md tells to type."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from lens_tools.records.read import read_records
from tests.journal.killing import environment
from tests.launcher.running import traced

PAGE = Path(__file__).parents[2] / "docs" / "hangs.md"


def block(name):
    (found,) = re.findall(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found


def killed(directory, **env):
    process = subprocess.Popen(
        traced("print('ready', flush=True); time.sleep(60)"),
        stdout=subprocess.PIPE,
        env=environment(directory, **env),
        cwd=directory,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.kill()
    return process


def reasons(directory):
    return [span.attributes["nemo.span.truncated.reason"] for span in read_records(directory).spans]


def test_the_epilog_of_a_slurm_task(tmp_path):
    job = {"NEMO_LENS_RUN_ID": "", "SLURM_JOB_ID": "4711"}
    killed(tmp_path, **job).wait()
    script = tmp_path / "epilog"
    script.write_text(block("epilog"))
    script.chmod(0o700)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run([script], env=environment(tmp_path, PATH=path, **job), check=True, timeout=60)
    assert reasons(tmp_path / "4711") == ["unknown"]


def test_a_launcher_of_your_own(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_LENS_JOURNAL_DIR", str(tmp_path / "journals"))
    worker = killed(tmp_path)
    code = block("recover").replace("runs/RUN_ID", str(tmp_path / "run"))
    exec(code, {"worker": worker})
    assert worker.returncode == -signal.SIGKILL
    assert reasons(tmp_path / "run") == ["sigkill"]
